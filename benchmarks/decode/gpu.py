"""Bars that need a GPU: decoding a model of the shape of Llama 3 8B, random weights in bf16, against the bandwidth."""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.timing import gpu_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.decode.compiled import Compiled
    from shoestring.models.cache import KVCache

SHAPE = {
    "vocab_size": 128256, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "context": 2048,
    "tied": False, "rope_theta": 500_000.0,
}  # fmt: skip
PROMPT, ROUNDS, CALLS = 128, 11, 10


@cache
def target() -> Compiled:
    import torch

    from shoestring.decode.compiled import Compiled
    from shoestring.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = GPT(GPTConfig(**SHAPE))
    finally:
        torch.set_default_dtype(torch.float32)
    return Compiled(model.eval(), SHAPE["context"])


def prompted() -> tuple[KVCache, Tensor]:
    """A cache that holds a prompt, and 8 tokens to go on with."""
    import torch

    tokens = torch.randint(SHAPE["vocab_size"], (1, PROMPT + 8), device="cuda")
    cache = target().new_cache(1, SHAPE["context"])
    target().read(tokens[:, :PROMPT], cache)
    return cache, tokens[:, PROMPT:]


def pass_seconds(count: int, held: KVCache, tokens: Tensor) -> float:
    """Of a pass over `count` tokens, which are forgotten again."""

    def work() -> None:
        target().read(tokens[:, :count], held)
        held.lengths = [PROMPT]

    return gpu_seconds(work, CALLS)


def bandwidth() -> float:
    """Bytes a second that a copy of 4 GiB reads and writes."""
    import torch

    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    return 2 * source.nbytes / median(gpu_seconds(lambda: copy.copy_(source), CALLS) for _ in range(ROUNDS))


def plain(_: Deadline) -> Measured:
    rate = bandwidth()
    held, tokens = prompted()
    pass_seconds(1, held, tokens)
    seconds = median(pass_seconds(1, held, tokens) for _ in range(ROUNDS))
    model = target().model
    weights = sum(parameter.nbytes for name, parameter in model.named_parameters() if name != "embed.weight")
    read = weights + held.nbytes * PROMPT // (SHAPE["context"] + 1)
    note = f"{1 / seconds:.0f} tokens a second, {read / 1e9:.2f} GB a token, {rate / 1e12:.2f} TB/s"
    return Measured(read / seconds / rate, note)


def verifying(_: Deadline) -> Measured:
    held, tokens = prompted()
    for count in (1, 8):
        pass_seconds(count, held, tokens)
    pairs = [(pass_seconds(1, held, tokens), pass_seconds(8, held, tokens)) for _ in range(ROUNDS)]
    return Measured(median(eight / one for one, eight in pairs), f"{ROUNDS} alternating rounds")


def rows() -> list[Bar]:
    """All bars that need a GPU."""
    model = "a model of the shape of Llama 3 8B in bf16"
    return [
        Bar(
            "decode.gpu-plain",
            f"plain decoding of {model}: bytes read a second, of the bandwidth of a copy",
            ">=", 0.8, measure=plain, baseline="a copy", gpu=True,
        ),
        Bar(
            "decode.gpu-verify", f"time to verify 8 tokens with {model} over that of one token",
            "<=", 1.10, measure=verifying, baseline="one token", gpu=True,
        ),
    ]  # fmt: skip
