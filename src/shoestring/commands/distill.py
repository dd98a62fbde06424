"""`shoestring distill`: a drafter trained in two stages from one run file, and what became of its acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.data.loader import sweep
from shoestring.decode import Distill
from shoestring.models.distillation import acceptance
from shoestring.models.loading import build_model, open_model
from shoestring.report.recorder import Recorder
from shoestring.run import Run
from shoestring.training.data_loading import DataSets, open_data, to_device
from shoestring.training.loop import train

REFERENCE, DRAFT = "reference", "draft"
HELD_OUT = 512
"""Largest number of held-out samples that acceptance is measured on."""


def stages(run: Run) -> dict[str, Run]:
    """The runs, by the name of their folder inside the run's: a reference on all tokens, and the draft.

    The reference is left out where the run file names one, or where no token is left out.

    Raises:
        ConfigError: the run file has no table [decode.distill].
    """
    feature = next((feature for feature in run.features if isinstance(feature, Distill)), None)
    if feature is None:
        raise ConfigError("the run file has no table [decode.distill]", hint="name the model to draft for: its teacher")
    base = Path(run.settings.folder or Path("runs") / run.name)
    cache = str((base / feature.cache).absolute()) if feature.cache else ""
    all_tokens = replace(feature, cache=cache, reference="")
    if feature.fraction == 1:
        return {DRAFT: _stage(run, feature, all_tokens, base / DRAFT)}
    selected = replace(feature, cache=cache, reference=feature.reference or str(base / REFERENCE))
    first = {} if feature.reference else {REFERENCE: _stage(run, feature, all_tokens, base / REFERENCE)}
    return {**first, DRAFT: _stage(run, feature, selected, base / DRAFT)}


def _stage(run: Run, feature: Distill, instead: Distill, folder: Path) -> Run:
    features = tuple(instead if each is feature else each for each in run.features)
    return replace(run, settings=replace(run.settings, folder=str(folder)), features=features)


def distill(run: Run, world: World, record: Recorder | None = None, *, say: Callable[[str], object]) -> str:
    """Train the stages one after the other, and say where each model is and how many of its drafts are accepted.

    Every rank calls it. It ends early, with no line about acceptance, where a stage was stopped; it continues there
    with `run.resume = "auto"`.

    Args:
        say: takes each line.

    Returns:
        How the last stage ended: "finished" or "stopped".

    Raises:
        ShoestringError: on all ranks, for whatever the user can mend.
    """
    planned = stages(run)
    folders: dict[str, Path] = {}
    for name, stage in planned.items():
        result = train(stage, world, record)
        folders[name] = result.folder
        say(f"{name}: {result.status}, {_learnt(stage)}, in {result.folder}")
        if result.status != "finished":
            return result.status
    found = _acceptances(run, planned[DRAFT], folders[DRAFT], world)
    shares = ", ".join(f"{name} {share:.2%}" for name, share in found.items())
    say(f"probability that a drafted token is accepted, on held-out text: {shares or 'there is no held-out text'}")
    return "finished"


def _acceptances(run: Run, last: Run, folder: Path, world: World) -> dict[str, float]:
    """Of the model before training, the reference and the draft; empty where there is no held-out text."""
    data = open_data(last, world, folder)
    if data.held_out is None:
        return {}
    feature = next(feature for feature in last.features if isinstance(feature, Distill))
    teacher = open_model(feature.teacher).to(world.device)
    plain = build_model(run.settings.model, run.model, data.model_arguments, run.settings.seed).eval()
    models = {"before training": plain}
    if feature.reference:
        models[REFERENCE] = open_model(feature.reference)
    models[DRAFT] = open_model(str(folder))
    return {name: _accepted(model, teacher, data, last, world) for name, model in models.items()}


def _learnt(stage: Run) -> str:
    """What the stage's model learnt from."""
    feature = next(feature for feature in stage.features if isinstance(feature, Distill))
    return f"{feature.fraction:.0%} of the tokens" if feature.reference else "all tokens"


def _accepted(model: nn.Module, teacher: nn.Module, data: DataSets, run: Run, world: World) -> float:
    """The share over the held-out samples, which the ranks divide among them; a collective."""
    assert data.held_out is not None
    batch = max(1, run.settings.batch // (world.size * run.settings.accumulate))
    batches = sweep(data.held_out, batch=batch, rank=world.rank, size=world.size, limit=HELD_OUT)
    mine = acceptance(model.to(world.device), teacher, (to_device(each, world.device) for each in batches))
    totals, counts = zip(*(json.loads(each) for each in world.gather(json.dumps(mine).encode())), strict=True)
    return sum(totals) / sum(counts)
