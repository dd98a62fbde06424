"""What speculation must not change: distributions by enumeration, greedy text, and the caches after a rollback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.decode.enumeration import BLOCK, CERTAIN, MUTANTS, TOKEN, Rule, Worlds, enumerate_rule, total_variation
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from shoestring.decode.adapter import Adapter, OwnModel
from shoestring.decode.drafters.base import Drafter
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine
from shoestring.decode.randomness import Purpose, key, race
from shoestring.decode.request import Request, Row
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, GPTConfig

CONTEXT, PROMPTS, DRAWS = 120, 200, 1_000_000
QUANTILE = 27.88  # 99.9% of chi-squared with 9 degrees of freedom
SHIFT = 0.97  # temperature of the sampler's planted fault


def close_pair(context: int = CONTEXT) -> tuple[GPT, GPT]:
    """A model, and a drafter with its embedding and its first block, which agrees with it about half the time."""
    shape = GPTConfig(vocab_size=12, dim=32, layers=3, heads=4, kv_heads=2, hidden=48, context=context, init_std=0.35)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, draft = (GPT(replace(shape, layers=layers)).double() for layers in (3, 1))
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    return target, draft


def prompts(count: int, **sampling: Any) -> Iterator[Request]:
    """Texts to continue, unlike in length."""
    numbers = torch.Generator().manual_seed(0)
    for index in range(count):
        length, more = torch.randint(1, 40, (2,), generator=numbers).tolist()
        tokens = torch.randint(12, (length,), generator=numbers).tolist()
        yield Request(tokens=tokens, max_new=more, sampling=replace(Sampling(seed=index), **sampling))


def drafters(draft: GPT, slots: int, speculation: Speculation) -> dict[str, Drafter]:
    """One of each kind."""
    return {
        "model": ModelDrafter(OwnModel(draft, CONTEXT), slots, speculation),
        "lookup": PromptLookup(),
        "skip": SkippingDrafter(speculation),
    }


def texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    rows = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return [row.text for row in rows]


@cache
def worlds() -> list[Worlds]:
    """Small vocabularies with 2 and 3 drafted tokens; some with impossible tokens, one where both models are equal."""
    found = [Worlds(seed, V, length) for seed, (V, length) in enumerate([(3, 2)] * 4 + [(4, 2)] * 2 + [(3, 3)] * 2)]
    return [*found, Worlds(8, 3, 2, equal=True), Worlds(9, 4, 2, zeros=True), Worlds(10, 3, 3, zeros=True)]


def distance(rules: tuple[Rule, ...], _: Deadline) -> Measured:
    """Largest over rules and worlds."""
    worst = max(total_variation(rule, world) for rule in rules for world in worlds())
    return Measured(worst, f"{len(worlds())} pairs of distributions, 3 or 4 tokens, 2 or 3 drafted, fp64")


def mutants(_: Deadline) -> Measured:
    """The least distance of a fault, each by its worst world."""
    shown = {rule.name: max(total_variation(rule, world) for world in worlds()) for rule in MUTANTS}
    least = min(shown, key=lambda name: shown[name])
    return Measured(shown[least], f"{len(shown)} faults; the least is `{least}`")


def gain(_: Deadline) -> Measured:
    """By how much block verification accepts more, where it does so least."""
    means = [enumerate_rule(BLOCK, world)[1] - enumerate_rule(TOKEN, world)[1] for world in worlds()]
    return Measured(min(means), f"{len(means)} pairs of distributions; largest {max(means):.4f}")


def statistic(p: torch.Tensor, drawn_from: torch.Tensor) -> float:
    """Twice the log-likelihood ratio of tokens drawn by the race against p."""
    counts = torch.zeros(len(p), dtype=torch.float64)
    for start in range(0, DRAWS, 50_000):
        keys = [key(0, Purpose.TEXT, position) for position in range(start, start + 50_000)]
        counts += torch.tensor(race(drawn_from.expand(len(keys), -1), keys)).bincount(minlength=len(p))
    return float(2 * (counts * (counts / (p * DRAWS)).log()).sum())


def sampler(_: Deadline) -> Measured:
    p = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    fault = p ** (1 / SHIFT) / (p ** (1 / SHIFT)).sum()
    note = f"{DRAWS:,} draws; with temperature {SHIFT} in place of 1: {statistic(p, fault) / QUANTILE:.1f}"
    return Measured(statistic(p, p) / QUANTILE, note)


def identity(sampling: dict[str, float], _: Deadline) -> Measured:
    """Share of prompts whose text is that of plain decoding, over drafters, draft lengths and batch sizes."""
    target, draft = close_pair()
    asked = list(prompts(PROMPTS, **sampling))
    plain = texts(Engine(target), asked)
    same, tried, accepted = 0, 0, dict[str, list[float]]()
    for slots in (1, 8):
        for length in (0, 5):
            speculation = Speculation(draft_length=length)
            for kind, drafter in drafters(draft, slots, speculation).items():
                engine = Engine(target, slots=slots, chunk=16, drafter=drafter, speculation=speculation)
                same += sum(a == b for a, b in zip(texts(engine, asked), plain, strict=True))
                tried += len(asked)
                counts = engine.counts.drafts
                accepted.setdefault(kind, []).append(sum(counts.accepted) / max(sum(counts.drafted), 1))
    shares = ", ".join(f"{kind} {min(found):.0%} to {max(found):.0%}" for kind, found in accepted.items())
    note = f"{PROMPTS} prompts, every drafter, batch 1 and 8, drafts of 5 and automatic, fp64"
    return Measured(same / tried, f"{note}; drafted tokens that were accepted: {shares}")


def rollback(_: Deadline) -> Measured:
    """Largest difference of a key or value from that of a fresh prefill, after every pass."""
    target, draft = close_pair()
    speculation = Speculation(draft_length=4)
    drafter = ModelDrafter(OwnModel(draft, CONTEXT), 4, speculation)
    engine = Engine(target, slots=4, chunk=16, drafter=drafter, speculation=speculation)
    rows = [engine.submit(request) for request in prompts(24)]
    worst, checked = 0.0, 0
    while engine.busy:
        engine.step()
        for row in (row for row in rows if row.ending is None and row.slot >= 0 and row.drafted):
            worst = max(worst, *differences(engine, drafter, row))
            checked += 1
    return Measured(worst, f"{checked} rows after a pass with drafts, model and drafter, fp64")


def differences(engine: Engine, drafter: ModelDrafter, row: Row) -> Iterator[float]:
    """Of the model's and the drafter's cache of a row, from fresh ones."""
    yield difference(engine.model, engine.cache, row.slot, row.history[: engine.cache.lengths[row.slot]])
    kept = drafter.held[row.slot].kept(row.history, row.begin)
    yield difference(drafter.model, drafter.cache, row.slot, row.history[:kept])


def difference(adapter: Adapter, kept: KVCache, slot: int, tokens: list[int]) -> float:
    fresh = adapter.new_cache(1, CONTEXT)
    adapter.read(torch.tensor([tokens]), fresh)
    count = len(tokens)
    return max(
        float((held[slot, :, :count] - wanted[0, :, :count]).abs().max())
        for layer, pair in fresh.layers.items()
        for held, wanted in zip(kept.layers[layer], pair, strict=True)
    )


def rows() -> list[Bar]:
    """Every bar of exactness."""
    enumerated = "total variation between the text of a round and the model's own, enumerated"
    return [
        Bar(
            "decode.exact-token",
            f"{enumerated}: token verification",
            "<=",
            1e-12,
            partial(distance, (TOKEN,)),
            kind="exact",
        ),
        Bar(
            "decode.exact-block",
            f"{enumerated}: block verification",
            "<=",
            1e-12,
            partial(distance, (BLOCK,)),
            kind="exact",
        ),
        Bar(
            "decode.exact-certain",
            f"{enumerated}: drafters without a distribution",
            "<=",
            1e-12,
            partial(distance, CERTAIN),
            kind="exact",
        ),
        Bar(
            "decode.faults-caught",
            "total variation of the least visible of the planted faults",
            ">=",
            1e-3,
            mutants,
            kind="exact",
        ),
        Bar(
            "decode.block-accepts",
            "tokens that block verification accepts more than token verification, least",
            ">=",
            -1e-12,
            gain,
            kind="exact",
        ),
        Bar(
            "decode.sampler",
            "likelihood-ratio statistic of drawn tokens over its 99.9% quantile",
            "<=",
            1.0,
            sampler,
            kind="exact",
        ),
        Bar(
            "decode.greedy-identity",
            "share of prompts whose greedy text with drafts is that of plain decoding",
            ">=",
            1.0,
            partial(identity, {"temperature": 0.0}),
            kind="exact",
        ),
        Bar(
            "decode.sampled-identity",
            "share of prompts whose sampled text with drafts, verified invariantly, is that of plain decoding",
            ">=",
            1.0,
            partial(identity, {"temperature": 1.0}),
            kind="exact",
        ),
        Bar(
            "decode.rollback",
            "largest difference of caches after a rollback from those of a fresh prefill",
            "<=",
            1e-10,
            rollback,
            kind="exact",
        ),
    ]
