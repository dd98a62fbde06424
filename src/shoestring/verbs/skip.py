"""`shoestring skip`: chooses sublayers of a model to skip, by their effect on sample text, and saves them as a plan."""

from __future__ import annotations

from pathlib import Path

from shoestring import figures
from shoestring._torch import own_device
from shoestring.decode.adapter import adapt
from shoestring.decode.skipping.plan import make_plan
from shoestring.models.sublayers import KINDS, sublayers
from shoestring.verbs.conversion import open_source, sample_text
from shoestring.verbs.settings import SkipChoice

BATCH = 8  # number of samples in a forward pass


def skip(model: str, out: Path, settings: SkipChoice | None = None) -> list[str]:
    """Choose the sublayers to skip and write the plan to `out`.

    Returns:
        Lines with the skipped sublayers, the fraction of the bytes that skipping avoids, and the loss before and after.

    Raises:
        ConfigError: there is no text to measure on, a number is out of range, or the model's sublayers are not known.
        CheckpointError: `model` does not name a model.
    """
    settings = settings or SkipChoice()
    source, built, _ = open_source(model)
    device = own_device(0)
    adapter = adapt(built.to(device))
    text = sample_text(model, source, built, settings.text).to(device)
    plan = make_plan(adapter, text.split(BATCH), settings.share, context=settings.context or text.shape[1])
    plan.save(out)
    known, lines = sublayers(built), []
    for kind in KINDS:
        names = [name for name in plan.ratios if known[name].kind == kind]
        total = sum(sublayer.kind == kind for sublayer in known.values())
        lines.append(f"skipped of {total} {kind} sublayers: {len(names)} ({', '.join(names) or 'none'})")
    lines.append(f"bytes moved for a token at a context of {plan.context}: {figures.percent(plan.saved)} saved")
    if plan.loss_before is not None:
        loss = f"{plan.loss_before:.4f} nats a token before, {plan.loss_after:.4f} after"
        lines.append(f"loss on the samples: {loss}")
    return [*lines, f"written to {out}; shoestring generate {model} --skip {out}"]
