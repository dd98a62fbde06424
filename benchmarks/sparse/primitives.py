"""Masks, draws and the soft threshold, against enumeration and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product

import torch
from torch import Tensor

from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured, Op
from shoestring.sparse import masks
from shoestring.sparse.mvue import draw_key, mvue, uniforms
from shoestring.sparse.product import shrink
from shoestring.sparse.soft import least_squares_scale

TILES = 10**6
DRAWS = 400_000
LINES = 64
PAIRS = list(combinations(range(4), 2))


def rows() -> list[Bar]:
    """Every bar of the primitives."""

    def bar(name: str, what: str, op: Op, value: float, measure: Callable[..., Measured], baseline: str = "") -> Bar:
        return Bar(
            f"sparse.{name}", what, op, value, measure=measure, baseline=baseline, peers=("torch",), kind="exact"
        )

    patterns = "all 6^4 choices of two per row, in double precision"
    gaussian = "of 4 million Gaussian weights"
    return [
        bar(
            "tiles-l1", f"largest relative loss of kept L1 in 10^6 tiles ({patterns})", "<=", 1e-6, partial(tiles, "l1")
        ),
        bar(
            "tiles-l2", f"largest relative loss of kept L2 in 10^6 tiles ({patterns})", "<=", 1e-6, partial(tiles, "l2")
        ),
        bar(
            "kept-rows",
            f"share of squares that row masks keep {gaussian}",
            ">=",
            0.867,
            kept_by_rows,
            "torch's default",
        ),
        bar(
            "kept-tiles",
            f"share of squares that transposable masks keep {gaussian}",
            ">=",
            0.819,
            kept_by_tiles,
            "torch's default",
        ),
        bar("mvue-bias", "largest |z| of 64 entries over 4x10^5 unbiased draws", "<=", 4.0, bias),
        bar(
            "mvue-variance",
            "variance of draws over squares, Gaussian gradients",
            "<=",
            0.51,
            variance,
            "the sequential draw of T-SR-STE's code",
        ),
        bar(
            "mvue-correlation",
            "largest correlation of the random numbers of 512 groups, in standard deviations",
            "<=",
            6.0,
            correlation,
        ),
        bar(
            "sste-continuity",
            "steepest change of S-STE's weights along 64 random lines, times the weights' own",
            "<=",
            3.0,
            continuity,
            "a hard mask of rows",
        ),
        bar(
            "sste-scale",
            "relative distance of S-STE's scale from the minimum of the squares, found by search",
            "<=",
            1e-6,
            scale,
        ),
    ]


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def valid_choices() -> Iterator[tuple[int, ...]]:
    """Those of the 6^4 choices of a pair of columns per row that take every column twice; counted anew each time."""
    for choice in product(range(6), repeat=4):
        if all(sum(column in PAIRS[pair] for pair in choice) == 2 for column in range(4)):
            yield choice


def tiles(norm: str, deadline: Deadline) -> Measured:
    """Compare `tile_codes` with an enumeration, in parts that fit the memory."""
    worst = 0.0
    for seed in range(TILES // 62_500):
        deadline.check()
        weight = gaussian(1000, 1000, seed)
        mask = masks.transposable_mask(weight, norm="l1" if norm == "l1" else "l2")
        assert all(bool((each.view(-1, 4).sum(1) == 2).all()) for each in (mask, mask.t().contiguous()))
        scores = weight.double().abs() if norm == "l1" else weight.double().square()
        kept = (scores * mask).view(250, 4, 250, 4).sum((1, 3))
        pairs = torch.stack([scores.view(250, 4, 250, 4)[..., list(pair)].sum(-1) for pair in PAIRS])
        best = torch.zeros_like(kept)
        for choice in valid_choices():
            best = torch.maximum(best, sum((pairs[pair, :, row] for row, pair in enumerate(choice)), torch.zeros(())))
        worst = max(worst, float(((best - kept) / best).max()))
    return Measured(worst)


def _kept(mask: Callable[[Tensor], Tensor]) -> float:
    weight = gaussian(2048, 2048)
    return float(masks.kept_energy(weight, mask(weight)))


def kept_by_rows(_: Deadline) -> Measured:
    return Measured(_kept(masks.row_mask), f"by signed value, torch's default: {_kept(masks.torch_default_mask):.3f}")


def kept_by_tiles(_: Deadline) -> Measured:
    kept = _kept(partial(masks.transposable_mask, norm="l2"))
    others = f"by L1 {_kept(masks.transposable_mask):.4f}, greedy by magnitude {_kept(masks.greedy_mask):.4f}"
    return Measured(kept, f"by L2; {others}, torch's default {_kept(masks.torch_default_mask):.4f}")


def bias(_: Deadline) -> Measured:
    x = gaussian(64, 1, seed=1)
    z = torch.zeros(64, dtype=torch.float64)
    for group in range(16):
        four = x[4 * group : 4 * group + 4]
        drawn = mvue(four.expand(4, DRAWS).contiguous(), draw_key(7, torch.tensor(group))).double()
        error = (drawn.mean(1) - four[:, 0].double()).abs()
        spread = drawn.std(1) / DRAWS**0.5
        # An entry that is always kept has no spread, and only the rounding of fp32.
        z[4 * group : 4 * group + 4] = torch.where(error < 1e-6, 0.0, error / spread.clamp_min(1e-12))
    return Measured(float(z.max()))


def sequential(x: Tensor) -> Tensor:
    """The probabilities that an entry is kept where two are drawn one after the other, in proportion to magnitudes."""
    a = x.abs()
    share = a / a.sum(0)
    odds = share / (a.sum(0) - a)
    return share + a * (odds.sum(0) - odds)


def variance(_: Deadline) -> Measured:
    x = gaussian(4, 4 * DRAWS, seed=2).double()
    drawn = mvue(x, draw_key(0, torch.tensor(0)))
    reference = (x.square() * (1 / sequential(x) - 1)).sum() / x.square().sum()
    return Measured(
        float((drawn - x).square().sum() / x.square().sum()),
        f"the least an unbiased draw of two can have is 0.4735; sequential draws {float(reference):.4f}",
    )


def correlation(_: Deadline) -> Measured:
    calls = 16_384
    drawn = torch.stack([uniforms(draw_key(0, torch.tensor(call)), 16, 32).flatten() for call in range(calls)])
    between = torch.corrcoef(drawn.double().T) - torch.eye(512)
    return Measured(float(between.abs().max()) * calls**0.5, "130,816 pairs: 4.7 is to be expected")


def steepest(change: Callable[[Tensor], Tensor], seed: int) -> float:
    """The largest step of what `change` makes of the weights on a line of 65,536 points, over the weights' step."""
    generator = torch.Generator().manual_seed(seed)
    weight, direction = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    at = torch.linspace(-1, 1, 65_536, dtype=torch.float64)[:, None]
    values = change(weight + at * direction)
    return float((values.diff(dim=0).norm(dim=1) / (direction.norm() * (at[1] - at[0]))).max())


def continuity(_: Deadline) -> Measured:
    soft = max(steepest(shrink, seed) for seed in range(LINES))
    hard = max(steepest(lambda weight: weight * masks.row_mask(weight), seed) for seed in range(LINES))
    return Measured(soft, f"the hard mask: {hard:.0f}, and more on finer lines")


def scale(_: Deadline) -> Measured:
    weight = gaussian(1024, 1024).double()
    shrunk = shrink(weight)

    def error(scale: float) -> float:
        return float((weight - scale * shrunk).square().sum())

    low, high = 0.0, 4.0
    for _turn in range(200):  # by thirds: the error is convex in the scale
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if error(one) < error(two) else (one, high)
    found = float(least_squares_scale(weight))
    return Measured(
        abs(found / low - 1), f"scale {found:.4f}, relative squares {error(found) / float(weight.square().sum()):.4f}"
    )
