"""`shoestring generate`: generates text with a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.core.world import own_device
from shoestring.data.chat_template import template_source
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.adapted import AdaptedRows
from shoestring.decode.compiled import choose_passes
from shoestring.decode.drafters import open_drafter
from shoestring.decode.engine import Engine, Request, stream
from shoestring.decode.report import describe
from shoestring.decode.settings.generation import SKIP, Decoding, Generation, Sampling, SamplingRule
from shoestring.decode.skipping.adapters import OnlineSkipping, Skipping
from shoestring.decode.skipping.plan import SkipPlan
from shoestring.models.decoder_layers import LIBRARIES
from shoestring.models.description import Description, describe_model
from shoestring.models.loading import load_model
from shoestring.models.tokenizer_files import missing_tokenizer

DEFAULT = SamplingRule(temperature=0.8, top_p=0.95)
"""Sampling rule for a model whose files name no sampling settings."""


def generate(
    model: str | Path,
    prompt: str,
    settings: Generation | None = None,
    *,
    report: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Yield the continuation of a prompt in pieces. A character that consists of several tokens is yielded as a whole.

    The model runs on the GPU if there is one.

    Args:
        model: run folder, model folder, or hf:NAME.
        prompt: text to continue; with `settings.chat`, the question to answer.
        report: function that is called at the end with each line of a report on the cost of generation and the gain
            from speculation.

    Raises:
        CheckpointError: there is no such model. ConfigError: the model has no tokenizer, or a setting is out of range.
    """
    settings = settings or Generation()
    built, tokenizer, description = open_described(model)
    sampling = settings.sampling.over(description.sampling, DEFAULT)
    if settings.chat:
        start = encode_question(tokenizer, prompt, settings.system, settings.variables())
    else:
        start = tokenizer.encode_prompt(prompt, parse_special=settings.parse_special)
    text = tokenizer.stream(start, settings.skip_special_tokens)
    room = len(start) + settings.max_tokens
    engine = build_engine(built, tokenizer, settings.decoding, room=room, skip=settings.skip)
    request = Request(
        tokens=start,
        max_new=settings.max_tokens,
        sampling=Sampling(**vars(sampling.rule), seed=settings.sampling.seed),
        stop=frozenset(description.ends),
        rolling=True,
    )
    for token in stream(engine, request):
        yield text.add(token)
    yield text.rest()
    if report is not None:
        for line in (*describe(engine), *filter(None, [str(sampling)])):
            report(line)


def encode_question(tokenizer: Tokenizer, question: str, system: str, variables: Mapping[str, Any]) -> list[int]:
    """Tokens of a single question, formatted by the tokenizer's chat template.

    Raises:
        ConfigError: there is no chat template, or it refuses the question. DataError: the template is not valid.
    """
    if template_source(tokenizer) is None:
        raise ConfigError("the model has no chat template", hint="without --chat, a prompt is continued as it is")
    messages = [{"role": "system", "content": system}] if system else []
    with closing(ConfinedTemplate(tokenizer)) as template:
        tokens = template.encode([*messages, {"role": "user", "content": question}], variables)
    return tokens or list(tokenizer.ends)


def open_described(source: str | Path) -> tuple[nn.Module, Tokenizer, Description]:
    """Open a trained model on this process's device, with its tokenizer and its description.

    Raises:
        CheckpointError: `source` holds no model. ConfigError: the model has no tokenizer.
    """
    if (device := own_device(0)).type == "cpu":
        native.compile_ahead(*LIBRARIES)
    model, tokenizer = load_model(source)
    if tokenizer is None:
        raise missing_tokenizer(source)
    return model.to(device), tokenizer, describe_model(source, tokenizer, model)


def build_engine(
    model: nn.Module,
    tokenizer: Tokenizer,
    decoding: Decoding,
    *,
    slots: int = 1,
    context: int | None = None,
    room: int | None = None,
    skip: str = "",
    adapters: bool = False,
    pass_seconds: float | None = None,
) -> Engine:
    """Build the engine that generates with a model, and with the drafter that the settings name.

    Args:
        slots: number of texts that are generated at the same time.
        context: maximum number of tokens that the model sees; defaults to the model's own context.
        room: number of tokens per text that the cache can hold, if smaller than `context`.
        skip: fraction of the bytes moved per token that skipping sublayers should avoid, or the file of a skip plan; by
            default no sublayer is skipped.
        adapters: whether each text may use low-rank adapters of its own.
        pass_seconds: maximum time that a pass over prompts should take; by default there is no limit.

    Raises:
        CheckpointError: the draft model does not exist. ConfigError: the drafter has a different vocabulary, or a
            number is out of range.
    """
    speculation, passes = decoding.speculation, decoding.passes
    drafter = open_drafter(speculation, model, tokenizer, slots=slots, room=room or context, passes=passes)
    patched = bool(skip) or adapters or speculation.draft == SKIP
    adapter = choose_passes(model, context, passes, patched=patched)
    if skip:
        try:
            share = float(skip)
        except ValueError:
            adapter = Skipping(adapter, SkipPlan.load(Path(skip)))
        else:  # choose the sublayers while generating
            if drafter is not None:
                raise ConfigError(
                    "--skip with a fraction learns from passes over one token, but --draft makes passes over several "
                    "tokens",
                    hint="give the file of a skip plan, or use --draft skip alone, which does not change the text",
                )
            adapter = OnlineSkipping(adapter, share, min(room or adapter.context, adapter.context))
    if adapters:
        adapter = AdaptedRows(adapter)
    return Engine(adapter, slots=slots, room=room, pass_seconds=pass_seconds, drafter=drafter, speculation=speculation)
