"""Decoding from packed 2:4 weights on a CPU: products against torch.mv, and a packed model against the dense one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from benchmarks.timing import paired
from shoestring.decode.engine import generate
from shoestring.decode.settings.generation import Sampling
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.packed24 import PackedLinear, pack, packed, packed_linear
from shoestring.models.saving import save_model
from shoestring.sparse.masks import prune as masked
from shoestring.sparse.masks import row_mask
from shoestring.verbs.prune import prune
from shoestring.verbs.settings import OneShotPruning

SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (16384, 2048), (2048, 8192))
"""Rows and columns of the weights of a decoder's layers: attention and feed-forward, of 8 B and 1 B parameters."""
CACHES = 4  # times the last-level cache, at least, that the weights of either side fill
TOKENS = 64


def last_level_cache() -> int:
    """Bytes, by what the kernel says of the first core."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().rstrip("K")) * 1024 for path in sizes), default=32 * 2**20)


def product_of(rows: int, columns: int) -> tuple[float, str]:
    """torch.mv's time over that of the packed product of as many weights as leave the caches cold."""
    copies = -(-CACHES * last_level_cache() // (rows * columns * 2))  # of the packed ones, which are smaller
    draw = torch.Generator().manual_seed(0)
    dense, small = [], []
    for _ in range(copies):
        weight = torch.randn(rows, columns, generator=draw)
        weight = masked(weight, row_mask(weight))
        dense.append(weight)
        small.append(pack(weight))
    x = torch.randn(columns, generator=draw)
    one, other = cycle(dense), cycle(small)
    ratio = paired(lambda: torch.mv(next(one), x), lambda: packed_linear(x, *next(other)), rounds=16, warmup=2 * copies)
    gbs = rows * columns * 17 / 8 / ratio.b_seconds / 1e9
    return ratio.median, f"{rows} x {columns} {ratio.median:.2f}x ({gbs:.1f} GB/s)"


def product(_: Deadline) -> Measured:
    found = [product_of(*size) for size in SIZES]
    note = f"{torch.get_num_threads()} threads, cache {last_level_cache() // 2**20} MiB: "
    return Measured(median(ratio for ratio, _ in found), note + ", ".join(said for _, said in found))


def folders(folder: Path) -> tuple[Path, Path]:
    """A pruned model, dense with zeros and packed."""
    torch.manual_seed(0)
    whole = folder / "whole"
    save_model(
        GPT(GPTConfig(vocab_size=512, context=256, dim=256, layers=4, heads=4, kv_heads=4, hidden=1024)),
        None,
        whole,
        {},
    )
    for form in ("dense", "packed"):
        prune(str(whole), folder / form, OneShotPruning(format=form))
    return folder / "dense", folder / "packed"


def models(compare: Callable[[GPT, GPT], Measured], _: Deadline) -> Measured:
    with TemporaryDirectory() as folder:
        dense, small = (load_model(path)[0] for path in folders(Path(folder)))
    assert isinstance(dense, GPT) and isinstance(small, GPT) and len(packed(small)) == 16
    return compare(dense.eval(), small.eval())


@torch.no_grad()
def logits(dense: GPT, small: GPT) -> Measured:
    """A token at a time, as a decoder asks: the packed product is taken for few rows only."""
    tokens = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    caches = [(model, KVCache(1, model.config.context)) for model in (dense, small)]
    gap = 0.0
    for n in range(TOKENS):
        one, other = (model(tokens[:, n : n + 1], cache) for model, cache in caches)
        gap = max(gap, float((one - other).abs().max()))
    return Measured(gap, f"{TOKENS} positions, 4 layers, fp32")


def same_tokens(dense: GPT, small: GPT) -> Measured:
    def drawn(model: GPT) -> list[list[int]]:
        double = model.double()
        return [list(generate(double, [seed], max_new=TOKENS, sampling=Sampling(seed=seed))) for seed in range(8)]

    one, other = drawn(dense), drawn(small)
    return Measured(float(one == other), f"{sum(map(len, one))} tokens of 8 prompts, drawn at temperature 1, in fp64")


def size(dense: GPT, small: GPT) -> Measured:
    """Bytes of the packed tensors over those of the weights that they stand for."""

    def share(dtype: torch.dtype) -> float:
        layers = [module for module in small.modules() if isinstance(module, PackedLinear)]
        tensors: list[Tensor] = [tensor for layer in layers for tensor in (layer.values.to(dtype), layer.indices)]
        weights = sum(layer.in_features * layer.out_features for layer in layers) * dtype.itemsize
        return sum(tensor.nbytes for tensor in tensors) / weights

    return Measured(share(torch.bfloat16), f"bf16; fp32 {share(torch.float32):.3f}")


def rows() -> list[Bar]:
    """Every bar of packed decoding."""
    return [
        Bar(
            "sparse.packed-product",
            "time of torch.mv over that of the packed product in fp32, weights beyond the caches, median of 6 sizes",
            ">=",
            1.3,
            measure=product,
            baseline="torch.mv",
            peers=("torch",),
        ),
        Bar(
            "sparse.packed-logits",
            "largest difference of logits, packed folder against dense",
            "<=",
            1e-4,
            measure=partial(models, logits),
            kind="exact",
        ),
        Bar(
            "sparse.packed-tokens",
            "the packed folder generates the tokens that the dense one does (1 is yes)",
            ">=",
            1.0,
            measure=partial(models, same_tokens),
            kind="exact",
        ),
        Bar(
            "sparse.packed-size",
            "bytes of packed tensors over those of the dense weights",
            "<=",
            0.57,
            measure=partial(models, size),
            kind="exact",
        ),
    ]
