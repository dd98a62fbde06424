"""Time of generation with tiny models, as a multiple of transformers' own with its best cache that is not compiled."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.models import zoo
from benchmarks.rows import Bar
from benchmarks.timing import Paired, paired
from shoestring.decode.adapter import adapt
from shoestring.decode.engine import generate
from shoestring.decode.settings.generation import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CASES = (
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gpt2",
    "deepseek_v3",
    "mixtral",
    "bloom",
    "gpt_neo",
    "mamba2",
    "qwen3_next",
    "phi3, longrope",
)
"""One case of each of twelve families: windows, latent attention, a mixture, ALiBi, recurrent layers, a rope that
switches."""
TOKENS = 400
PAIRS = 12
PROMPT = 8


def timed(name: str, tokens: int = TOKENS, pairs: int = PAIRS) -> Paired:
    """Our processor time for a text as a multiple of transformers', one thread, in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _with_context(name, PROMPT + tokens + 1)
        prompt = torch.arange(3, 3 + PROMPT)
        adapter = adapt(model)

        def ours() -> None:
            assert len(list(generate(adapter, prompt, max_new=tokens, sampling=Sampling(temperature=0)))) == tokens

        theirs = _theirs(model, prompt, tokens)
        return paired(ours, theirs, rounds=pairs, warmup=1, order="AB", clock=time.process_time)
    finally:
        torch.set_num_threads(threads)


def rows() -> Iterator[Bar]:
    """A bar for each of the families."""
    for name in CASES:
        identity = name.replace(", ", "-").replace("_", "-")
        yield Bar(
            f"models.time-{identity}",
            f"processor time for {TOKENS} tokens of a tiny {name} over transformers' with its best uncompiled cache",
            "<=",
            1.1,
            measure=lambda _, name=name: timed(name).measured(),
            baseline="transformers' generate",
            peers=("transformers",),
        )


def _with_context(name: str, context: int) -> PreTrainedModel:
    """The model of a case in float32, for texts of at least `context` tokens."""
    make = zoo.CASES[name]

    def longer() -> Any:
        config: Any = make()
        if getattr(config, "max_position_embeddings", context) < context:
            config.max_position_embeddings = context
        return config

    zoo.CASES[name] = longer
    try:
        return zoo.build(name, dtype=torch.float32)
    finally:
        zoo.CASES[name] = make


def _theirs(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> Callable[[], None]:
    """Generation by transformers, with whichever of its caches is the fastest."""
    settings = importlib.import_module("transformers").GenerationConfig
    model.generation_config = settings(pad_token_id=zoo.END)

    def generation(kind: str | None) -> Callable[[], None]:
        chosen = settings(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=zoo.END,
            cache_implementation=kind,
            disable_compile=True,
        )

        def act() -> None:
            cast(Any, model).generate(prompt[None], generation_config=chosen)

        return act

    seconds: dict[str | None, float] = {}
    for kind in (None, "static"):
        try:
            generation(kind)()
            seconds[kind] = _seconds(generation(kind))
        except Exception:  # a model need not take each cache; the first is the default
            if kind is None:
                raise
            continue
    return generation(min(seconds, key=lambda kind: seconds[kind]))


def _seconds(act: Callable[[], None]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began
