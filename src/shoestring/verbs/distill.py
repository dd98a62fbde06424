"""`shoestring distill`: trains a draft model in two stages from one run file, and measures its acceptance rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.task import Repeated
from shoestring.core.world import World
from shoestring.data.loader import sweep
from shoestring.decode import Distill
from shoestring.models.distillation import acceptance
from shoestring.models.loading import open_model, origin_trust
from shoestring.models.saving import pass_on
from shoestring.report.recorder import Recorder
from shoestring.run import Run
from shoestring.training.data_loading import open_data, to_device
from shoestring.training.loop import train
from shoestring.training.user_code import import_user_code, model_of

REFERENCE, DRAFT = "reference", "draft"
HELD_OUT = 512
"""Maximum number of held-out samples on which acceptance is measured."""


def stages(run: Run) -> dict[str, Run]:
    """Map the name of each stage to its run: first a reference that is trained on all tokens, then the draft model.

    The name is also the name of the stage's folder inside the run folder. There is no stage for the reference if the
    run file names a reference, or if the draft model is trained on all tokens.

    Raises:
        ConfigError: the run file has no table [decode.distill].
    """
    feature = next((feature for feature in run.features if isinstance(feature, Distill)), None)
    if feature is None:
        raise ConfigError("the run file has no table [decode.distill]", hint="name the model to draft for: its teacher")
    base = Path(run.settings.folder or Path("runs") / run.name)
    cache = str((base / feature.cache_folder).absolute()) if feature.cache_folder else ""
    all_tokens = replace(feature, cache_folder=cache, reference="")
    if feature.fraction == 1:
        return {DRAFT: _stage(run, feature, all_tokens, base / DRAFT)}
    selected = replace(feature, cache_folder=cache, reference=feature.reference or str(base / REFERENCE))
    first = {} if feature.reference else {REFERENCE: _stage(run, feature, all_tokens, base / REFERENCE)}
    return {**first, DRAFT: _stage(run, feature, selected, base / DRAFT)}


def _stage(run: Run, feature: Distill, instead: Distill, folder: Path) -> Run:
    features = tuple(instead if other is feature else other for other in run.features)
    return replace(run, settings=replace(run.settings, folder=str(folder)), features=features)


def distill(run: Run, world: World, record: Recorder | None = None, *, say: Callable[[str], object]) -> str:
    """Train the stages one after another; report where each model is, and what fraction of its drafts is accepted.

    Every rank must call this function. If a stage is stopped, the function returns without measuring acceptance; the
    next start with `run.resume = "auto"` continues the stage.

    Args:
        say: function that is called with each line of the report.

    Returns:
        How the last stage ended: "finished" or "stopped".

    Raises:
        ShoestringError: there is an error that the user can correct; raised on all ranks.
    """
    planned = stages(run)
    folders: dict[str, Path] = {}
    for name, stage in planned.items():
        result = train(stage, world, record)
        folders[name] = result.folder
        world.agree(partial(_vouch, stage, result.folder / "model", world))
        feature = next(feature for feature in stage.features if isinstance(feature, Distill))
        tokens = f"{figures.percent(feature.fraction)} of the tokens" if feature.reference else "all tokens"
        say(f"{name}: {result.status}, {tokens}, in {result.folder}")
        if result.status != "finished":
            return result.status
    shares = _acceptances(run, planned[DRAFT], folders[DRAFT], world)
    listed = ", ".join(f"{name} {figures.percent(share)}" for name, share in shares.items())
    say(f"probability that a drafted token is accepted, on held-out text: {listed or 'there is no held-out text'}")
    return "finished"


def _vouch(stage: Run, model: Path, world: World) -> None:
    """Record on every host that this run wrote the model, so that the next stage may open it."""
    if world.local_rank == 0 and model.is_dir():
        pass_on(origin_trust(stage.settings.model), model)


def _acceptances(run: Run, last: Run, folder: Path, world: World) -> dict[str, float]:
    """Acceptance rates, by name, of the model before training, the reference and the draft model; empty if there is no
    held-out text."""
    code = world.agree(lambda: import_user_code(last, skip=("run.evaluate", "run.sinks")))
    data = open_data(last, world, folder, code)
    if data.held_out is None:
        return {}
    feature = next(feature for feature in last.features if isinstance(feature, Distill))
    teacher = open_model(feature.teacher).to(world.device)
    plain = model_of(run).build(data.model_arguments).eval()
    models = {"before training": plain}
    if feature.reference:
        models[REFERENCE] = open_model(feature.reference)
    models[DRAFT] = open_model(str(folder))
    batch = max(1, last.settings.batch // (world.size * last.settings.accumulate))
    rates = {}
    for name, model in models.items():
        # The held-out samples are divided among the ranks.
        shares = sweep(
            data.held_out, batch=batch, rank=world.rank, size=world.size, limit=HELD_OUT, collate=data.collate
        )
        batches = (to_device(samples, world.device) for samples in shares if not isinstance(samples, Repeated))
        own = acceptance(model.to(world.device), teacher, batches, code.forward)
        totals, counts = zip(*(json.loads(message) for message in world.gather(json.dumps(own).encode())), strict=True)
        rates[name] = sum(totals) / sum(counts)
    return rates
