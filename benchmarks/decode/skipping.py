"""Skipping sublayers at equal bytes moved: quality against published rules, time against bytes, and drafting by it.

Texts are read whole up to a length of context; then their last tokens are decoded with some sublayers skipped. Every
rule chooses on the first half of the held-out text, and is measured on the second half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.decode.pretrained import Pretrained
from benchmarks.harness import stored
from benchmarks.machine import ROOT
from benchmarks.rows import Bar, Measured
from benchmarks.timing import paired
from shoestring.data.tokens import TokenDataset
from shoestring.decode.adapter import OwnModel, adapt
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.decode.skipping import baselines
from shoestring.decode.skipping.choice import Ratios, Rule, Statistics, least_harm, least_loss, saved_bytes
from shoestring.decode.skipping.cost import count_bytes
from shoestring.decode.skipping.importance import Observer
from shoestring.decode.skipping.plan import gather
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.sublayers import skipping

WINDOWS = {128: 160, 512: 64, 2048: 16}
"""Texts of each half, by the length of context."""
DECODED = 64
"""Tokens of each that are decoded."""
SKIPPED = (1, 2, 4, 6)
"""Layers whose bytes, on average, are to be saved."""
PHASES = 8
"""Parts of the decoded text within which SkipDecode skips the same layers."""
ORACLE = (2,)
"""Of SKIPPED, where the oracle is measured, which takes hundreds of passes."""
OURS, SIMILARITY, ORACLE_NAME = "ours", "ours, by similarity alone", "greedy oracle"
PUBLISHED: Mapping[str, Rule] = {
    "early exit": baselines.early_exit,
    "unified skipping": baselines.unified_skipping,
    "AdaSkip as released": baselines.released_adaskip,
}
OTHERS: Mapping[str, Rule] = {"layer drop": baselines.layer_drop, SIMILARITY: least_harm}


class Texts:
    """Texts, read whole but for their last tokens."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        """
        Args:
            tokens: (B, S + 1), of which the last DECODED are predicted.
        """
        self.adapter = OwnModel(model, tokens.shape[1])
        self.prompt, self.rest = tokens[:, : -DECODED - 1], tokens[:, -DECODED - 1 :]
        self.cache = self.adapter.new_cache(len(tokens), tokens.shape[1])
        for row, prompt in enumerate(self.prompt):
            self.adapter.read(prompt[None], self.cache, rows=slice(row, row + 1), wanted="last")

    def nats(self, ratios: Ratios) -> Tensor:
        """Loss of every decoded token, (B, decoded), with these sublayers skipped since the prompt."""
        with skipping(self.adapter.model, ratios):
            logits = self.adapter.read(self.rest[:, :-1], self.cache)
        self.cache.lengths = [self.prompt.shape[1]] * len(self.prompt)
        return F.cross_entropy(logits.flatten(0, 1), self.rest[:, 1:].flatten(), reduction="none").view(len(logits), -1)


@dataclass
class Comparison:
    """All rules at all lengths of context; `check` raises when the time is up."""

    folder: Path
    pretrained: Pretrained
    check: Callable[[], None] = field(default=lambda: None)

    @cached_property
    def model(self) -> GPT:
        model, _ = load_model(self.pretrained.folder)
        assert isinstance(model, GPT)
        return model

    def texts(self, context: int) -> tuple[Texts, Texts]:
        """Of either half of the held-out text."""
        ids = TokenDataset(self.pretrained.folder / "held_out.tokens", context).ids
        halves = np.array_split(np.asarray(ids).astype(np.int64), 2)
        found = []
        for half in halves:
            starts = np.linspace(0, len(half) - context - 1, WINDOWS[context]).astype(int)
            found.append(Texts(self.model, torch.tensor(np.stack([half[at : at + context + 1] for at in starts]))))
        return found[0], found[1]

    @cached_property
    def cases(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Nats a token of every rule, by the length of context and the number of layers whose bytes are saved."""
        found = {}
        for context in WINDOWS:
            found |= {(context, layers): self._stored(context, layers) for layers in SKIPPED}
        return found

    def _stored(self, context: int, layers: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            return self._case(context, layers)

        return stored(self.folder / f"{context}-{layers}.json", self.check, make)

    @cached_property
    def _prepared(self) -> dict[int, tuple[Texts, Statistics]]:
        return {}

    @torch.inference_mode()
    def _case(self, context: int, layers: int) -> dict[str, Any]:
        if context not in self._prepared:
            self._prepared.clear()  # keys and values of one length at a time
            sample, test = self.texts(context)
            known: dict[tuple[tuple[str, float], ...], list[float]] = {}

            def losses(ratios: Ratios) -> list[float]:
                key = tuple(sorted(ratios.items()))
                if key not in known:
                    self.check()
                    known[key] = sample.nats(ratios).mean(1).tolist()
                return known[key]

            with Observer(self.model) as observer:
                losses({})
            given = gather(observer, count_bytes(self.model), context)
            self._prepared[context] = test, replace(given, losses=losses)
        test, given = self._prepared[context]
        budget = layers * sum(each.bytes for each in given.candidates) / len(given.blocks)
        full = float(test.nats({}).mean())
        rules: dict[str, Any] = {}

        def add(name: str, ratios: Ratios) -> None:
            nats = float(test.nats(ratios).mean())
            saved = saved_bytes(given, ratios) / given.total
            rules[name] = {"nats": nats, "saved": saved, "skipped": dict(ratios)}

        for name, rule in {**PUBLISHED, **OTHERS}.items():
            add(name, rule(given, budget))
        phases = [baselines.skip_decode(given, budget, (phase + 0.5) / PHASES) for phase in range(PHASES)]
        parts = [test.nats(ratios).chunk(PHASES, 1)[phase] for phase, ratios in enumerate(phases)]
        saved = fmean(saved_bytes(given, ratios) for ratios in phases) / given.total
        rules["SkipDecode"] = {"nats": float(torch.cat(parts, 1).mean()), "saved": saved}
        # Sublayers are of unlike sizes, so the released rule may save more than it has to: ours then saves as much.
        least = rules["AdaSkip as released"]["saved"] * given.total
        add(OURS, least_loss(given, least))
        if layers in ORACLE:
            add(ORACLE_NAME, baselines.greedy_oracle(given, budget))
        return {"full": full, "rules": rules}


def quality(comparison: Comparison) -> Measured:
    """The least advantage over the best published rule."""
    gains = {}
    for (context, layers), case in comparison.cases.items():
        rules = case["rules"]
        best = min((*PUBLISHED, "SkipDecode"), key=lambda name: rules[name]["nats"])
        gains[context, layers] = math.exp(rules[best]["nats"] - rules[OURS]["nats"]), best, rules[OURS]["saved"]
    worst = min(gains, key=lambda case: gains[case][0])
    said = [
        f"{context} tokens, {saved:.0%} saved: {gain:.3f} ({best})"
        for (context, _), (gain, best, saved) in gains.items()
    ]
    return Measured(gains[worst][0], "; ".join(said))


def distance(comparison: Comparison) -> Measured:
    """What the oracle does better."""
    gaps = {
        case: found["rules"][OURS]["nats"] - found["rules"][ORACLE_NAME]["nats"]
        for case, found in comparison.cases.items()
        if ORACLE_NAME in found["rules"]
    }
    said = [f"{context} tokens, bytes of {layers} layers: {gap:+.3f}" for (context, layers), gap in gaps.items()]
    return Measured(fmean(gaps.values()), "nats a token; " + "; ".join(said))


# -- time --------------------------------------------------------------------------------------------------------------

WIDE = GPTConfig(vocab_size=2048, dim=1024, layers=12, heads=16, kv_heads=16, hidden=2816, context=2048)
"""A model whose weights no cache holds, so that its time is that of moving them. What they are does not matter."""
LEFT_OUT = {f"blocks.{layer}.{part}": 1.0 for layer in (0, 3, 6, 9) for part in ("attention", "mlp")}
PROMPT, ROUNDS = 256, 8


def wide() -> GPT:
    torch.manual_seed(0)
    return GPT(WIDE).eval()


@torch.inference_mode()
def decoding_time() -> Measured:
    """The speed-up of a token's pass as a share of what the bytes predict, the least over lengths of context."""
    adapter, found = adapt(wide()), {}
    costs = count_bytes(adapter)
    for context in (128, 1024, 2047):
        cache = adapter.new_cache(1, context + 1)
        adapter.read(torch.zeros(1, 1, dtype=torch.int64), cache)
        for pair in cache.layers.values():
            for held in pair:
                held.normal_()

        def decode(ratios: Ratios, cache: KVCache = cache, context: int = context) -> None:
            cache.lengths = [context]
            with skipping(adapter.model, ratios):
                adapter.read(torch.zeros(1, 1, dtype=torch.int64), cache)

        saved = sum(costs.sublayers[name].at(context) for name in LEFT_OUT)
        predicted = costs.total(context) / (costs.total(context) - saved)
        found[context] = (
            paired(lambda: decode({}), lambda: decode(LEFT_OUT), rounds=ROUNDS).median / predicted,
            predicted,
        )
    said = [f"{context} tokens: {share:.3f} of {predicted:.2f}x" for context, (share, predicted) in found.items()]
    return Measured(min(share for share, _ in found.values()), "; ".join(said))


@torch.inference_mode()
def first_token_time() -> Measured:
    """The speed-up of reading a prompt as a share of what its arithmetic predicts: reading is not bound by bytes."""
    adapter, tokens = adapt(wide()), torch.arange(PROMPT)[None]

    def read(ratios: Ratios) -> None:
        with skipping(adapter.model, ratios):
            adapter.read(tokens, adapter.new_cache(1, PROMPT), wanted="last")

    def flops(ratios: Ratios) -> int:
        with FlopCounterMode(display=False) as counter:
            read(ratios)
        return counter.get_total_flops()

    predicted = flops({}) / flops(LEFT_OUT)
    ratio = paired(lambda: read({}), lambda: read(LEFT_OUT), rounds=ROUNDS)
    note = f"{ratio.median:.2f}x of {predicted:.2f}x, {PROMPT} tokens, {ratio.b_seconds:.2f} s"
    return Measured(ratio.median / predicted, note)


# -- drafting ----------------------------------------------------------------------------------------------------------

SHARES, LENGTHS, NEW = (0.2, 0.35), (1, 3), 32


def drafting(comparison: Comparison) -> Measured:
    """The best measured speed-up of drafting by the model itself, which keeps the text."""
    model = comparison.model
    ids = TokenDataset(comparison.pretrained.folder / "held_out.tokens", 256).ids
    prompts = [np.asarray(ids[start : start + 256]).tolist() for start in np.linspace(0, len(ids) - 257, 4).astype(int)]

    def text(share: float, length: int) -> tuple[list[list[int]], Engine]:
        speculation = Speculation(draft_length=length)
        drafter = SkippingDrafter(speculation, share=share) if share else None
        engine = Engine(model, room=512, drafter=drafter, speculation=speculation)
        rows = []
        for prompt in prompts:
            rows.append(engine.submit(Request(tokens=prompt, max_new=NEW, sampling=Sampling(temperature=0))))
            while engine.busy:
                engine.step()
        return [row.text for row in rows], engine

    plain, said, best = text(0, 0)[0], [], (0.0, 0.0)
    for share in SHARES:
        for length in LENGTHS:
            texts, engine = text(share, length)
            assert texts == plain
            drafts = engine.counts.drafts
            accepted = sum(drafts.accepted) / sum(drafts.drafted)
            ratio = paired(lambda: text(0, 0), lambda s=share, n=length: text(s, n), rounds=6, order="AB").median
            best = max(best, (ratio, 1 / (1 - share)))
            said.append(f"{share:.0%} skipped, {length} drafted: {accepted:.2f} accepted, {ratio:.2f}x")
    return Measured(best[0], f"bound {best[1]:.2f}x at the same share; " + "; ".join(said))


# -- rows and the picture ----------------------------------------------------------------------------------------------

PICTURE = ROOT / "docs" / "pictures" / "decode-skipping.png"


def rows(ask: Callable[[], Comparison]) -> list[Bar]:
    """Every bar of skipping."""
    published = "the best of early exit, SkipDecode, unified skipping and AdaSkip as released"
    least = "the least over contexts of 128 to 2048 and 8% to 50% of the bytes saved"
    share = "the speed-up of 12 layers of width 1024 without 8 of their 24 sublayers, as a share of what"
    return [
        Bar(
            "decode.skip-perplexity",
            f"perplexity of the best published rule over ours, at equal bytes moved, {least}",
            ">",
            1.0,
            measure=lambda _: quality(ask()),
            baseline=published,
            kind="drawn",
        ),
        Bar(
            "decode.skip-oracle",
            "nats a token that a greedy oracle, which measures every choice, is better by, at equal bytes moved",
            "<=",
            0.05,
            measure=lambda _: distance(ask()),
            baseline="greedy oracle",
            kind="drawn",
        ),
        Bar(
            "decode.skip-tokens",
            f"{share} the bytes moved predict, for a token, the least over contexts",
            ">=",
            0.9,
            measure=lambda _: decoding_time(),
            baseline="bytes moved",
        ),
        Bar(
            "decode.skip-first-token",
            f"{share} the arithmetic predicts, for a prompt of 256 tokens",
            ">=",
            0.9,
            measure=lambda _: first_token_time(),
            baseline="floating-point operations",
        ),
        Bar(
            "decode.skip-draft",
            "best speed-up of drafting by the trained model of 12 layers itself, without some sublayers, greedy text",
            ">=",
            1.0,
            measure=lambda _: drafting(ask()),
            baseline="plain decoding",
        ),
    ]


def draw(comparison: Comparison, path: Path = PICTURE) -> Path:
    """Perplexity over the bytes saved, at each length of context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from benchmarks.styles import STYLES

    names = (*PUBLISHED, "SkipDecode", "layer drop", OURS, ORACLE_NAME)
    figure, panels = pyplot.subplots(1, len(WINDOWS), figsize=(13, 4.5), layout="constrained")
    for axes, context in zip(panels, WINDOWS, strict=True):
        cases = [comparison.cases[context, layers] for layers in SKIPPED]
        for name, (colour, style, marker) in zip(names, STYLES[: len(names)], strict=True):
            found = [case["rules"][name] for case in cases if name in case["rules"]]
            x = [0.0, *(100 * each["saved"] for each in found)]
            y = [math.exp(cases[0]["full"]), *(math.exp(each["nats"]) for each in found)]
            axes.plot(x, y, color=colour, linestyle=style, marker=marker, markersize=4, label=name)
        axes.set_yscale("log")
        axes.set(xlabel="bytes moved for a token saved, %", title=f"context of {context} tokens")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("held-out perplexity of decoded tokens")
    panels[-1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
