"""Runs and jobs whose settings differ between two ranks, in the processes of a pool."""

import json

import torch

import shoestring as ss
from shoestring.core.errors import ShoestringError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.run import override, parse
from shoestring.training import same_run
from shoestring.training.loop import train
from tests.small_jobs import Net


def refusal(work):
    try:
        work()
    except ShoestringError as error:
        return error.parts()
    return None


def runs(document, cases):
    """What each case says, in which the second rank has other flags, or another version."""
    world, said = World.current(), []
    for flags in cases:
        own = json.loads(json.dumps(document))
        code, version = same_run._digest, torch.__version__
        if world.rank == 1:
            override(own, flags if flags[0].startswith("--") else [])
            if "code" in flags:
                same_run._digest = lambda folder: "other"
            if "torch" in flags:
                torch.__version__ = "9.9"
        said.append(refusal(lambda own=own: train(parse(own), world)))
        same_run._digest, torch.__version__ = code, version
    return said


def features(kind, first, second):
    """What composing says, where each rank has features of its own: [[name, settings], …]."""
    world = World.current()
    given = [getattr(getattr(ss, area), name)(**settings) for area, name, settings in (second if world.rank else first)]
    model = Net()
    if kind == "compose":
        return refusal(lambda: ss.compose(Job(model, world=world), given).close())
    rate = 0.1 * (1 + world.rank) if kind == "rates" else 0.1
    if kind == "factories":
        job = Job(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1 * (1 + world.rank)), world=world)
        return refusal(lambda: ss.compose(job, given).close())
    return refusal(lambda: ss.attach(model, torch.optim.SGD(model.parameters(), lr=rate), *given).close())


def prepared(source, folder, sequences):
    world = World.current()
    settings = ss.data.Data(tokenizer="bytes", sequence=sequences[world.rank], held_out=0.3)
    return refusal(lambda: ss.data.together.prepare(source, folder, settings, world=world))
