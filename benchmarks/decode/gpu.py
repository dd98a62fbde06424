"""Bars that need a GPU: decoding a model of the shape of Llama 3 8B, random weights in bf16.

Passes are measured against the bandwidth. Speculation is measured with a draft of the model's first two blocks and its
head: what the other blocks write to the residual stream is scaled by the ε at which the wanted share of drafted tokens
is accepted, as in `pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Bar, Deadline, Measured, shared
from benchmarks.timing import FEWEST_ROUNDS, gpu_seconds, paired

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.decode.adapter import Adapter
    from shoestring.decode.compiled import Compiled
    from shoestring.decode.engine import Engine
    from shoestring.models.cache import KVCache
    from shoestring.models.gpt import GPT

SHAPE = {
    "vocab_size": 128256, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "context": 2048,
    "tied": False, "rope_theta": 500_000.0,
}  # fmt: skip
PROMPT, ROUNDS, CALLS = 128, 11, 10
DRAFT_BLOCKS, ACCEPTANCE, LONGEST = 2, 0.8, 7
TEXTS, TRIALS = 4, 12


@shared
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


# -- speculation -------------------------------------------------------------------------------------------------------


def first_blocks(model: GPT, count: int = DRAFT_BLOCKS) -> GPT:
    """The model's first blocks, with its embedding and its head; the weights are the model's own."""
    from dataclasses import replace

    import torch

    from shoestring.models.gpt import GPT

    with torch.device("meta"):
        draft = GPT(replace(model.config, layers=count))
    draft.embed, draft.blocks, draft.norm, draft.head = model.embed, model.blocks[:count], model.norm, model.head
    return draft.eval()


def scale(model: GPT, factor: float) -> None:
    """Multiply what the blocks behind the draft's write to the residual stream."""
    import torch

    from shoestring.models.gpt import Block

    with torch.no_grad():
        for block in list(model.blocks)[DRAFT_BLOCKS:]:
            assert isinstance(block, Block)
            for written in (block.attention.out, block.mlp.down):
                written.weight.mul_(factor)


def greedy(engine: Engine, new: int) -> list[list[int]]:
    """Texts that continue random prompts, one after the other."""
    import torch

    from shoestring.decode.request import Request
    from shoestring.decode.settings.generation import Sampling
    from shoestring.models.gpt import GPT

    numbers = torch.Generator().manual_seed(0)
    assert isinstance(engine.model.model, GPT)
    length = min(PROMPT, engine.window // 2)
    prompts = torch.randint(engine.model.model.config.vocab_size, (TEXTS, length), generator=numbers).tolist()
    rows = [engine.submit(Request(tokens=each, max_new=new, sampling=Sampling(temperature=0))) for each in prompts]
    while engine.busy:
        engine.step()
    return [row.text for row in rows]


def speedup(model: Adapter, wrap: Callable[[GPT], Adapter], new: int, rounds: int = ROUNDS) -> Measured:
    """Plain decoding over speculation, at the ε where drafted tokens are accepted as often as is wanted.

    Args:
        model: of several blocks; its weights are changed.
        wrap: gives the draft an adapter.
        new: tokens of each text.
    """
    from shoestring.decode.drafters.model import ModelDrafter
    from shoestring.decode.engine import Engine
    from shoestring.decode.settings.generation import Speculation
    from shoestring.models.gpt import GPT

    whole = model.model
    assert isinstance(whole, GPT)
    adapter = wrap(first_blocks(whole))

    def speculating(length: int) -> Engine:
        speculation = Speculation(draft_length=length, max_draft_length=LONGEST)
        return Engine(model, drafter=ModelDrafter(adapter, 1, speculation), speculation=speculation)

    def accepted(engine: Engine) -> float:
        greedy(engine, new)
        counts = engine.counts.drafts
        return sum(counts.accepted) / max(sum(counts.tried), 1)

    epsilon, low, high = 1.0, 0.0, 2.0  # acceptance falls from 1 as ε grows
    trials = speculating(4)
    found: dict[float, float] = {}
    for _ in range(TRIALS):
        trials.counts.drafts = type(trials.counts.drafts)()
        found[epsilon] = accepted(trials)
        low, high = (epsilon, high) if found[epsilon] > ACCEPTANCE else (low, epsilon)
        scale(whole, (low + high) / 2 / epsilon)
        epsilon = (low + high) / 2
    best = min(found, key=lambda each: abs(found[each] - ACCEPTANCE))
    scale(whole, best / epsilon)
    plain, drafting = Engine(model), speculating(0)
    same = greedy(plain, new) == greedy(drafting, new)
    ratio = paired(lambda: greedy(plain, new), lambda: greedy(drafting, new), rounds=rounds, order="AB")
    share = accepted(drafting)
    note = (
        f"{ratio}; {share:.2f} of the tried tokens accepted at ε = {best:.3g}, texts {'' if same else 'not '}the same"
    )
    return ratio.measured(note)


def drafting(_: Deadline) -> Measured:
    from shoestring.decode.compiled import Compiled

    return speedup(target(), lambda draft: Compiled(draft, SHAPE["context"]), 96, FEWEST_ROUNDS)


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
        Bar(
            "decode.gpu-drafting",
            f"time of plain decoding of {model} over that with a draft of its first two blocks and head, of which "
            f"{ACCEPTANCE:.0%} of the tokens are accepted; the bound is 2.2x",
            ">=", 1.9, measure=drafting, baseline="plain decoding", gpu=True,
        ),
    ]  # fmt: skip
