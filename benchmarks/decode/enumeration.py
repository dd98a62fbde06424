"""Rules of verification, enumerated: the exact distribution of the text that a rule gives, and rules with a fault.

The vocabulary is small, the model's and the drafter's distributions are random functions of the context, and coins are
integrated out: between the probabilities at which a rule decides, its decision is constant. So the distance to the
model's own distribution is exact but for rounding, and a fault shows however rarely it strikes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch
from torch import Tensor

from shoestring.decode.verification import (
    Verdict,
    block_acceptance,
    one_hot,
    token_acceptance,
    verify_block,
    verify_tokens,
)

Verify = Callable[[Tensor, Tensor, Sequence[int], Sequence[float]], Verdict]
Chances = Callable[[Tensor, Tensor, Sequence[int]], Sequence[float]]


@dataclass(frozen=True)
class Rule:
    """How a round of speculation goes; what is not named is as it should be."""

    name: str
    verify: Verify
    chances: Chances
    """The probabilities with which `verify` compares coins."""
    draws: Callable[[Tensor], Tensor] = lambda q: q
    """The distribution that drafted tokens are drawn from, of the one that the drafter says."""
    says: Callable[[Tensor], Tensor] = lambda q: q
    """The distribution that is verified against, of the drafter's."""
    length: Callable[[Tensor, Tensor, Sequence[int]], int] = lambda p, q, draft: len(draft)
    """How many of the drafted tokens are verified."""
    shared_coin: bool = False


class Worlds:
    """The model's and the drafter's distributions (V,) of each context of up to γ tokens, in float64."""

    def __init__(self, seed: int, V: int, length: int, *, equal: bool = False, zeros: bool = False) -> None:
        draw = torch.Generator().manual_seed(seed)

        def table() -> dict[tuple[int, ...], Tensor]:
            drawn = {}
            for count in range(length + 1):
                for context in product(range(V), repeat=count):
                    logits = 1.5 * torch.randn(V, generator=draw, dtype=torch.float64)
                    if zeros:
                        logits[int(torch.randint(V, (), generator=draw))] = -torch.inf
                    drawn[context] = logits.softmax(-1)
            return drawn

        self.V, self.length = V, length
        self.p = table()
        self.q = self.p if equal else table()

    def sequences(self) -> Iterator[tuple[int, ...]]:
        """Every draft."""
        return product(range(self.V), repeat=self.length)

    def target(self) -> Tensor:
        """The model's own distribution of γ + 1 tokens, (V, …, V)."""
        return self.continued({(): torch.tensor(1.0, dtype=torch.float64)})

    def continued(self, weights: dict[tuple[int, ...], Tensor]) -> Tensor:
        """The distribution of γ + 1 tokens that begin with these texts, at these weights, and go on by the model."""
        joint = torch.zeros((self.V,) * (self.length + 1), dtype=torch.float64)
        for text, weight in weights.items():
            spread = weight
            for count in range(len(text), self.length + 1):
                rest = [self.p[text + more] for more in product(range(self.V), repeat=count - len(text))]
                spread = spread[..., None] * torch.stack(rest).view(*spread.shape, self.V)
            joint[text] += spread
        return joint


def enumerate_rule(rule: Rule, world: Worlds) -> tuple[Tensor, float]:
    """The distribution of γ + 1 tokens that a round by `rule` begins, and the mean number of accepted tokens."""
    weights: dict[tuple[int, ...], Tensor] = {}
    mean = 0.0
    for draft in world.sequences():
        prefixes = [draft[:n] for n in range(world.length + 1)]
        p = torch.stack([world.p[prefix] for prefix in prefixes])
        q = torch.stack([world.q[prefix] for prefix in prefixes[:-1]])
        drawn = float(torch.stack([rule.draws(row)[token] for row, token in zip(q, draft, strict=True)]).prod())
        if drawn == 0:
            continue
        q = torch.stack([rule.says(row) for row in q])
        kept = rule.length(p, q, draft)
        p, q, tokens = p[: kept + 1], q[:kept], draft[:kept]
        for weight, coins in integrate(rule.chances(p, q, tokens), shared=rule.shared_coin):
            accepted, following = rule.verify(p, q, tokens, coins)
            mean += drawn * weight * accepted
            for token in range(world.V):
                text = (*draft[:accepted], token)
                weights[text] = weights.get(text, 0.0) + drawn * weight * following[token]
    return world.continued(weights), mean


def integrate(chances: Sequence[float], *, shared: bool) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Coins of every cell in which a decision is constant, each with the cell's probability."""

    def cells(bounds: Sequence[float]) -> list[tuple[float, float]]:
        edges = sorted({0.0, 1.0, *(min(bound, 1.0) for bound in bounds)})
        return [(high - low, (low + high) / 2) for low, high in pairwise(edges)]

    if shared:
        for weight, coin in cells(chances):
            yield weight, (coin,) * len(chances)
        return
    for chosen in product(*(cells([chance]) for chance in chances)):
        weight = 1.0
        for share, _ in chosen:
            weight *= share
        yield weight, tuple(coin for _, coin in chosen)


def total_variation(rule: Rule, world: Worlds) -> float:
    """Distance of the rule's text to the model's own: half the sum of the differences."""
    return float((enumerate_rule(rule, world)[0] - world.target()).abs().sum() / 2)


TOKEN = Rule("token", verify_tokens, lambda p, q, draft: token_acceptance(p, q, draft).tolist())
BLOCK = Rule("block", verify_block, lambda p, q, draft: block_acceptance(p, q, draft)[0])
CERTAIN = tuple(  # a drafter that is certain of each of its tokens, as prompt lookup is
    replace(rule, name=f"{rule.name}, certain draft", draws=lambda q: _peak(q), says=lambda q: _peak(q))
    for rule in (TOKEN, BLOCK)
)


def _peak(q: Tensor) -> Tensor:
    return one_hot([int(q.argmax())], q[None])[0]


def _warm(q: Tensor) -> Tensor:
    return q.sqrt() / q.sqrt().sum()


def _sure_prefix(p: Tensor, q: Tensor, draft: Sequence[int]) -> int:
    """The tokens before the first of low confidence: that one was drawn, and is dropped without verification."""
    return next((n for n, token in enumerate(draft) if q[n, token] < 0.4), len(draft))


def _welcome_prefix(p: Tensor, q: Tensor, draft: Sequence[int]) -> int:
    """The tokens before the first that the model would rather not have: verification is anticipated."""
    return next((n for n, token in enumerate(draft) if p[n, token] < q[n, token]), len(draft))


def _then(change: Callable[[Verdict, Tensor, Tensor], Tensor], rule: Rule, name: str) -> Rule:
    """`rule` with another distribution of the token that follows."""

    def verify(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
        verdict = rule.verify(p, q, draft, coins)
        return Verdict(verdict.accepted, change(verdict, p, q))

    return replace(rule, name=f"{rule.name}: {name}", verify=verify)


def _unscaled(verdict: Verdict, p: Tensor, q: Tensor) -> Tensor:
    """A residual that is not normalized: what is missing to 1 falls to the last token, as in a search of its sums."""
    if verdict.accepted == len(q):
        return verdict.following
    residual = (p - q[verdict.accepted])[verdict.accepted].clamp(min=0)
    return torch.cat((residual[:-1], 1 - residual[:-1].sum()[None]))


def _token_residual(verdict: Verdict, p: Tensor, q: Tensor) -> Tensor:
    """The residual of token verification, without the share of the prefix that the model supports."""
    if verdict.accepted == len(q):
        return verdict.following
    residual = (p[verdict.accepted] - q[verdict.accepted]).clamp(min=0)
    return residual / residual.sum()


def _block_with(chances: Chances, name: str) -> Rule:
    """Block verification with other chances of acceptance."""

    def verify(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
        allowed = chances(p, q, draft)
        accepted = max((n for n, chance in enumerate(allowed, start=1) if coins[n - 1] < chance), default=0)
        forced = [0.0 if n == accepted else 1.0 for n in range(1, len(draft) + 1)]
        return Verdict(accepted, verify_block(p, q, draft, forced).following if accepted else _first(p, q))

    return Rule(f"block: {name}", verify, chances)


def _first(p: Tensor, q: Tensor) -> Tensor:
    residual = (p[0] - q[0]).clamp(min=0)
    return residual / residual.sum() if residual.sum() > 0 else p[0]


def _supports(p: Tensor, q: Tensor, draft: Sequence[int]) -> list[float]:
    return block_acceptance(p, q, draft)[1][1:]


MUTANTS = (
    *(_then(lambda verdict, p, q: p[verdict.accepted], rule, "correct from p") for rule in (TOKEN, BLOCK)),
    *(_then(_unscaled, rule, "residual not normalized") for rule in (TOKEN, BLOCK)),
    _then(_token_residual, BLOCK, "residual of token verification"),
    *(replace(rule, name=f"{rule.name}: unsure token dropped", length=_sure_prefix) for rule in (TOKEN, BLOCK)),
    *(replace(rule, name=f"{rule.name}: stops by anticipation", length=_welcome_prefix) for rule in (TOKEN, BLOCK)),
    *(replace(rule, name=f"{rule.name}: draft at temperature 2", draws=_warm) for rule in (TOKEN, BLOCK)),
    *(replace(rule, name=f"{rule.name}: greedy draft against softmax q", draws=_peak) for rule in (TOKEN, BLOCK)),
    *(replace(rule, name=f"{rule.name}: one coin for all", shared_coin=True) for rule in (TOKEN, BLOCK)),
    _block_with(_supports, "support as acceptance"),
    _block_with(TOKEN.chances, "acceptance of token verification"),
)
