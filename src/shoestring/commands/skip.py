"""`shoestring skip`: which sublayers of a model to skip, chosen from sample text and kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoestring.commands.converting import open_source, sample_text
from shoestring.core.world import own_device
from shoestring.decode.adapter import adapt
from shoestring.decode.skipping.plan import make_plan
from shoestring.models.sublayers import KINDS, sublayers

BATCH = 8  # samples that are measured at a time


def skip(model: str, out: Path, share: float, context: int, data: str, samples: int, sequence: int) -> Iterator[str]:
    """Choose, write the plan to `out`, and say what it is, line by line.

    Args:
        context: tokens of context at which bytes are counted; 0 takes the length of a sample.

    Raises:
        ConfigError: there is no text to measure on, a number out of range, or the model's sublayers are not known.
        CheckpointError: there is no model.
    """
    source, built, _ = open_source(model)
    device = own_device(0)
    adapter = adapt(built.to(device))
    text = sample_text(model, source, built, data, samples, sequence).to(device)
    plan = make_plan(adapter, text.split(BATCH), share, context=context or text.shape[1])
    plan.save(out)
    known = sublayers(built)
    for kind in KINDS:
        names = [name for name in plan.ratios if known[name].kind == kind]
        total = sum(sublayer.kind == kind for sublayer in known.values())
        yield f"skipped of {total} {kind} sublayers: {len(names)} ({', '.join(names) or 'none'})"
    yield f"bytes moved for a token at a context of {plan.context}: {plan.saved:.1%} saved"
    if plan.loss_before is not None:
        yield f"loss on the samples: {plan.loss_before:.4f} nats a token before, {plan.loss_after:.4f} after"
    yield f"written to {out}; shoestring generate {model} --skip {out}"
