"""`shoestring generate`: text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.core.world import own_device
from shoestring.decode.adapter import Adapter
from shoestring.decode.compiled import choose_passes
from shoestring.decode.drafters import open_drafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.engine import stream as generate
from shoestring.decode.report import describe
from shoestring.decode.settings import SKIP, Passes, Sampling, Speculation
from shoestring.decode.skipping.adapters import OnlineSkipping, Skipping
from shoestring.decode.skipping.plan import SkipPlan
from shoestring.models.loading import load_model


def stream(
    path: Path,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    speculation: Speculation | None = None,
    report: Callable[[str], object] | None = None,
    skip: str = "",
    passes: Passes = "auto",
) -> Iterator[str]:
    """Yield the continuation in pieces; a character of several tokens is yielded once it is complete.

    It is generated on the GPU where there is one.

    Args:
        report: is told, at the end, line by line what generation cost and what speculation gained.
        skip: a share of the bytes moved for a token to save by skipping sublayers, or the file of a plan for it.
        passes: how those over few tokens run.

    Raises:
        CheckpointError: `path` holds no model. ConfigError: no tokenizer with it, or an argument out of range.
    """
    model, tokenizer = load_model(path)
    if tokenizer is None:
        raise ConfigError(f"`{path}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    start, text = tokenizer.encode_prompt(prompt), tokenizer.stream()
    request = Request(
        tokens=start, max_new=tokens, sampling=sampling, stop=frozenset({tokenizer.end_of_text}), rolling=True
    )
    room = len(start) + tokens
    speculation = speculation or Speculation()
    model = model.to(own_device(0))
    drafter = open_drafter(speculation, model, tokenizer, room=room, passes=passes)
    adapter = choose_passes(model, None, passes, skips=bool(skip) or speculation.drafter == SKIP)
    if skip:
        adapter = _skipping(adapter, skip, room, drafts=drafter is not None)
    engine = Engine(adapter, room=room, drafter=drafter, speculation=speculation)
    for token in generate(engine, request):
        yield text.add(token)
    yield text.rest()
    if report is not None:
        for line in describe(engine):
            report(line)


def _skipping(adapter: Adapter, skip: str, room: int, *, drafts: bool) -> Adapter:
    """The model without the sublayers of a plan, or, where `skip` is a share, without those that the text suggests."""
    try:
        share = float(skip)
    except ValueError:
        return Skipping(adapter, SkipPlan.load(Path(skip)))
    if drafts:
        raise ConfigError(
            "--skip with a share learns from passes over one token, and --draft makes longer ones",
            hint="give the file of a plan, or --draft skip alone, which keeps the text",
        )
    return OnlineSkipping(adapter, share, min(room, adapter.context))
