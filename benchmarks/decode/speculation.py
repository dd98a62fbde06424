"""What speculation gains: against the bound of its own costs, against transformers' assisted generation, and where
there is nothing to gain.

Models have 12 blocks, 768 wide, in fp32. Speeds are ratios of runs in alternation.
"""

from __future__ import annotations

import argparse
import inspect
import json as module_to_read
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode.exactness import close_pair, prompts
from benchmarks.decode.pairs import CONTEXT, Pairs, deepened
from benchmarks.harness import Deadline, stored
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.timing import Paired, paired
from shoestring.core.errors import DataError
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.adapter import Adapter, OwnModel
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.engine import Engine
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.models.cache import CachePlace, KVCache
from shoestring.models.gpt import GPT

EPSILONS = (8, 32, 64, 112)
PROMPT, NEW = 16, 192
"""Tokens: prompts are short, because what they cost is no matter of speculation."""
LONGEST = 12
ROUNDS = 8
TEXTS = 6
"""Unlike each other, of which each round takes the next."""
FIXED = {
    "num_assistant_tokens": 0,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
"""Of transformers' settings, drafts of a fixed length; how many tokens is filled in."""
ASSISTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Draft lengths of transformers, of which it gets its best; the best lies between the first and the last."""


class Scripted(OwnModel):
    """A model that does all its arithmetic, and then continues a given text whatever it computed."""

    script: Sequence[int] = ()

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        logits = super().logits(tokens, cache, place, last)
        positions = place.positions.expand(len(tokens), -1)[:, -logits.shape[1] :]
        following = torch.tensor([*self.script, 0])[(positions + 1).clamp(max=len(self.script))]
        return torch.zeros_like(logits).scatter_(2, following[..., None], 1.0)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The texts of all requests, as many at a time as the engine has slots."""
    rows = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return [row.text for row in rows]


def natural(tokenizer: Tokenizer, count: int, new: int = NEW) -> list[Request]:
    """Requests that begin with pieces of real code and sample at a temperature of 1."""
    tokens = tokenizer.encode(inspect.getsource(argparse))
    starts = range(200, 200 + count * PROMPT, PROMPT)
    return [
        Request(tokens=tokens[start : start + PROMPT], max_new=new, sampling=Sampling(seed=start)) for start in starts
    ]


class Turns:
    """Generates another text at each call; ways to generate that are compared get the same ones in turn."""

    def __init__(self, generate: Callable[[Request], object], requests: Sequence[Request]) -> None:
        self.generate, self.requests = generate, cycle(requests)

    def __call__(self) -> None:
        self.generate(next(self.requests))


# -- the pair ----------------------------------------------------------------------------------------------------------


Ratio = tuple[float, tuple[float, float]]
"""A value and its interval."""


def ratio_of(times: Paired) -> Ratio:
    """The median ratio of two ways, and its interval."""
    return times.median, times.interval


@dataclass
class Speeds:
    """One target: how often its drafter is accepted, what passes cost, and the times of all ways to generate."""

    epsilon: float
    acceptance: float
    """Of the first drafted token."""
    bound: float
    """The speed-up that acceptance and costs allow at the best length."""
    ours: Paired
    """Plain decoding over speculation."""
    best: Paired
    """Transformers' assisted generation at its best length over ours."""
    default: Paired
    theirs: Paired
    """Transformers' plain decoding over its assisted generation at its best length."""
    length: int
    """The length at which transformers was best."""

    @property
    def share(self) -> Ratio:
        """Our speed-up over the bound."""
        low, high = self.ours.interval
        return self.ours.median / self.bound, (low / self.bound, high / self.bound)

    @property
    def gain(self) -> Ratio:
        """Our speed-up over our plain decoding, over transformers' over its own; its interval is that of all pairs of
        an end of one and an end of the other."""
        (low, high), (slow, fast) = self.ours.interval, self.theirs.interval
        return self.ours.median / self.theirs.median, (low / fast, high / slow)


@dataclass
class Contest:
    """All targets. What was measured of one is a file in `folder`, and is not measured again."""

    pairs: Pairs
    folder: Path

    def all(self) -> list[Speeds]:
        """In the order of ε."""
        return [self.speeds(epsilon) for epsilon in EPSILONS]

    def speeds(self, epsilon: float) -> Speeds:
        """Of one target."""
        path = self.folder / f"{epsilon:g}.json"
        found = stored(path, self.pairs.check, lambda: asdict(self._measure(epsilon)))
        ratios = {name: Paired(**found[name]) for name in ("ours", "best", "default", "theirs")}
        return Speeds(found["epsilon"], found["acceptance"], found["bound"], **ratios, length=found["length"])

    def _measure(self, epsilon: float) -> Speeds:
        draft, tokenizer = self.pairs.drafter()
        target = deepened(draft, epsilon)
        requests = natural(tokenizer, TEXTS)
        rates = acceptance(target, draft, requests)
        bound = best_speedup(rates, *costs(OwnModel(target, CONTEXT), OwnModel(draft, CONTEXT)))
        peer = Assisted(*self.pairs.saved(epsilon))
        length = peer.best_length(requests[0])
        engines = Engine(target), speculating(target, draft)
        for request in requests[:3]:  # costs and acceptance are learnt once for all texts
            run(engines[1], [request])

        def compare(one: Callable[[Request], object], other: Callable[[Request], object]) -> Paired:
            found = paired(Turns(one, requests), Turns(other, requests), rounds=ROUNDS, warmup=1, order="AB")
            self.pairs.check()
            return found

        plain, drafted = (lambda request, engine=engine: run(engine, [request]) for engine in engines)
        best = partial(peer, length)
        return Speeds(
            epsilon, rates[0], bound, compare(plain, drafted), compare(best, drafted),
            compare(partial(peer, None), drafted), compare(peer.alone, best), length,
        )  # fmt: skip


def speculating(target: GPT, draft: GPT, *, slots: int = 1, **settings: Any) -> Engine:
    """An engine with a smaller model as the drafter."""
    given: dict[str, Any] = {"verification": "block", "max_draft_length": LONGEST} | settings
    speculation = Speculation(**given)
    drafter = ModelDrafter(OwnModel(draft, CONTEXT), slots, speculation)
    return Engine(target, slots=slots, drafter=drafter, speculation=speculation)


def acceptance(target: GPT, draft: GPT, requests: Sequence[Request]) -> list[float]:
    """Of each position of a draft, given those before it; drafts have the largest length."""
    engine = speculating(target, draft, slots=4, draft_length=LONGEST)
    run(engine, requests)
    counts = engine.counts.drafts
    return [stayed / max(tried, 1) for stayed, tried in zip(counts.accepted, counts.tried, strict=True)]


def costs(target: Adapter, draft: Adapter) -> tuple[list[float], float]:
    """Seconds of passes of the model over 1 to `LONGEST` + 1 tokens, and of the drafter over one; medians."""
    caches = [adapter.new_cache(1, CONTEXT) for adapter in (target, draft)]
    for adapter, held in zip((target, draft), caches, strict=True):
        adapter.read(torch.zeros(1, PROMPT + NEW // 2, dtype=torch.int64), held)

    def seconds(adapter: Adapter, held: KVCache, tokens: int) -> float:
        given, length = torch.zeros(1, tokens, dtype=torch.int64), held.lengths[0]
        began = time.perf_counter()
        adapter.read(given, held).argmax(-1).tolist()
        taken = time.perf_counter() - began
        held.lengths[0] = length
        return taken

    passes = [[seconds(target, caches[0], m) for m in range(1, LONGEST + 2)] for _ in range(15)]
    drafts = [seconds(draft, caches[1], 1) for _ in range(45)]
    return [statistics.median(column) for column in zip(*passes, strict=True)], statistics.median(drafts)


def best_speedup(rates: Sequence[float], passes: Sequence[float], each: float) -> float:
    """Tokens a second of the best draft length over those without drafts (Leviathan et al. 2023, theorem 3.8)."""
    tokens, together, best = 1.0, 1.0, 1.0
    for length, rate in enumerate(rates, start=1):
        together *= rate
        tokens += together
        best = max(best, tokens * passes[0] / (passes[length] + length * each))
    return best


class Assisted:
    """Transformers' assisted generation with the same pair."""

    def __init__(self, drafter: Path, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.target: Any = AutoModelForCausalLM.from_pretrained(target)
        self.drafter: Any = AutoModelForCausalLM.from_pretrained(drafter)
        self.defaults = {name: getattr(self.drafter.generation_config, name) for name in FIXED}

    def __call__(self, length: int | None, request: Request) -> None:
        """Drafts of a fixed length, or by transformers' defaults."""
        for name, value in FIXED.items():
            setattr(self.drafter.generation_config, name, self.defaults[name] if length is None else value)
        if length is not None:
            self.drafter.generation_config.num_assistant_tokens = length
        self._generate(request, assistant_model=self.drafter)

    def alone(self, request: Request) -> None:
        """Without drafts."""
        self._generate(request)

    def _generate(self, request: Request, **more: Any) -> None:
        torch.manual_seed(request.sampling.seed)
        count = request.max_new
        made = self.target.generate(
            torch.tensor([request.tokens]), do_sample=True, top_k=0, temperature=1.0, max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0, eos_token_id=None, **more,
        )  # fmt: skip
        assert made.shape[1] == len(request.tokens) + count

    def best_length(self, request: Request) -> int:
        """By two runs of each, after one that warms up.

        Raises:
            DataError: the best is the longest of `ASSISTED`, so that a longer one may be better.
        """
        self(ASSISTED[0], request)
        taken = {}
        for length in (*ASSISTED, *reversed(ASSISTED)):
            began = time.perf_counter()
            self(length, request)
            taken[length] = min(taken.get(length, float("inf")), time.perf_counter() - began)
        best = min(taken, key=lambda length: taken[length])
        if best == ASSISTED[-1]:
            raise DataError(f"transformers is best at the longest drafts, {best}", hint="add longer ones to ASSISTED")
        return best


def over_targets(ask: Callable[[], Contest], ratio: Callable[[Speeds], Ratio], _: Deadline) -> Measured:
    """The least value over the targets, with its interval."""
    found = ask().all()
    each = ", ".join(f"{ratio(one)[0]:.2f} at an acceptance of {one.acceptance:.2f}" for one in found)
    lengths = ", ".join(str(one.length) for one in found)
    gains = ", ".join(f"{one.ours.median:.2f}x of {one.bound:.2f}x" for one in found)
    theirs = ", ".join(f"{one.theirs.median:.2f}x" for one in found)
    note = f"{each}; speed-up {gains}; transformers over its own plain decoding {theirs} at lengths of {lengths}"
    value, interval = min(map(ratio, found))
    return Measured(value, note, interval)


# -- without a pair ----------------------------------------------------------------------------------------------------


def predicted(_: Deadline) -> Measured:
    """The largest deviation of tokens per pass from what acceptance, measured with longer drafts, predicts."""
    target, draft = close_pair()
    requests = [Request(tokens=each.tokens, max_new=80, sampling=each.sampling) for each in prompts(1000)]

    def engine(length: int) -> Engine:
        speculation = Speculation(draft_length=length)
        drafter = ModelDrafter(OwnModel(draft, 120), 16, speculation)
        made = Engine(target, slots=16, drafter=drafter, speculation=speculation)
        run(made, requests)
        return made

    counts = engine(6).counts.drafts
    worst, notes = 0.0, []
    for length in (1, 2, 4):
        speculator = engine(length).speculator
        assert speculator is not None
        rounds = speculator.rounds[length]
        measured, expected = rounds.tokens / rounds.rows, counts.expected(length)
        worst = max(worst, abs(measured / expected - 1))
        notes.append(f"{length}: {measured:.3f} for {expected:.3f}")
    return Measured(worst, f"drafts of 6 predict those of {', '.join(notes)}; {len(requests)} texts of 80 tokens")


def lookup(task: str, pairs: Callable[[], Pairs], _: Deadline) -> Measured:
    """Plain decoding over prompt lookup."""
    draft, tokenizer = pairs().drafter()
    source = inspect.getsource(module_to_read.JSONEncoder.__init__)
    if task == "copying":  # an edit: the same function with a name changed throughout
        prompt = tokenizer.encode(source)[:180]
        answer = tokenizer.encode(re.sub("indent", "margin", source))[:160]
    else:  # prose that no one repeats
        prose = textwrap.dedent(module_to_read.__doc__ or "") + (re.__doc__ or "")
        tokens = tokenizer.encode(re.sub(r"\s+", " ", prose))
        prompt, answer = tokens[:100], tokens[100:260]
    model = Scripted(deepened(draft, 0.0), CONTEXT)
    model.script = [*prompt, *answer]
    request = Request(tokens=prompt, max_new=len(answer), sampling=Sampling(temperature=0))
    ways = []
    for drafter in (None, PromptLookup()):
        engine = Engine(model, drafter=drafter)
        assert run(engine, [request]) == [answer]
        ways.append(partial(run, engine, [request]))
    return paired(*ways, rounds=ROUNDS, order="AB").measured()


def useless(pairs: Callable[[], Pairs], _: Deadline) -> Measured:
    """Plain decoding over automatic lengths with a drafter that knows nothing."""
    draft, tokenizer = pairs().drafter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        random = GPT(draft.config).eval()
    target = deepened(draft, 32)
    requests = natural(tokenizer, TEXTS)
    # A new engine each time: what it has to find out is part of the price.
    ways = (lambda: Engine(target)), (lambda: speculating(target, random))
    turns = [Turns(lambda request, way=way: run(way(), [request]), requests) for way in ways]
    return paired(*turns, rounds=ROUNDS, order="AB").measured()


def batched(pairs: Callable[[], Pairs], _: Deadline) -> Measured | NotRun:
    """Plain decoding over speculation for 8 texts at a time, which transformers refuses."""
    draft, tokenizer = pairs().drafter()
    target = deepened(draft, 16)
    requests = natural(tokenizer, 8, new=NEW // 4)
    plain, ours = Engine(target, slots=8), speculating(target, draft, slots=8)
    run(ours, requests)
    return paired(partial(run, plain, requests), partial(run, ours, requests), rounds=ROUNDS, order="AB").measured()


def rows(ask: Callable[[], Contest]) -> list[Bar]:
    """Every bar of speculation."""

    def pairs() -> Pairs:
        return ask().pairs

    peers = ("torch", "transformers")
    assisted = "time of transformers' assisted generation over ours, same pair, least over acceptances of 0.5 to 0.95"
    return [
        Bar(
            "decode.tokens-predicted",
            "largest deviation of tokens per pass from what measured acceptance predicts",
            "<=",
            0.02,
            predicted,
            kind="drawn",
        ),
        Bar(
            "decode.pair-bound",
            "speed-up by a drafter over the bound from measured costs and acceptance, least over acceptances",
            ">=",
            0.85,
            partial(over_targets, ask, lambda one: one.share),
            baseline="plain decoding of the same engine",
            peers=("torch",),
        ),
        Bar(
            "decode.pair-assisted",
            f"{assisted}, at its best draft length",
            ">=",
            1.05,
            partial(over_targets, ask, lambda one: ratio_of(one.best)),
            baseline="transformers",
            peers=peers,
        ),
        Bar(
            "decode.pair-assisted-defaults",
            f"{assisted}, at its defaults",
            ">=",
            1.15,
            partial(over_targets, ask, lambda one: ratio_of(one.default)),
            baseline="transformers",
            peers=peers,
        ),
        Bar(
            "decode.pair-gain",
            "speed-up by a drafter over plain decoding of the same engine, over that of transformers over its own "
            "plain decoding at its best draft length, least over acceptances of 0.5 to 0.95",
            ">=",
            1.0,
            partial(over_targets, ask, lambda one: one.gain),
            baseline="transformers",
            peers=peers,
        ),
        Bar(
            "decode.lookup-copying",
            "time of plain decoding over that with prompt lookup, a function rewritten with a name changed",
            ">=",
            2.5,
            partial(lookup, "copying", pairs),
        ),
        Bar(
            "decode.lookup-elsewhere",
            "time of plain decoding over that with prompt lookup, prose",
            ">=",
            0.97,
            partial(lookup, "elsewhere", pairs),
        ),
        Bar(
            "decode.switch-off",
            "time of plain decoding over that with a drafter that knows nothing, lengths automatic",
            ">=",
            0.97,
            partial(useless, pairs),
        ),
        Bar(
            "decode.batched",
            "time of plain decoding of 8 texts at a time over that with a drafter, acceptance of about 0.9",
            ">=",
            1.0,
            partial(batched, pairs),
        ),
    ]
