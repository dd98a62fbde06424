"""Copies that are still in flight when somebody continues: a copy is made only once somebody waits for it."""

from concurrent.futures import Future
from functools import partial
from threading import RLock

import pytest
import torch
from torch import nn
from torch.optim import SGD

from shoestring import checkpoint
from shoestring.checkpoint.tiers.staging import Stager
from shoestring.core.compose import attach


class Lazy(Future):
    """Work that is done by whoever first waits for its result."""

    def __init__(self, work):
        super().__init__()
        self.work = work
        self.turn = RLock()  # of several threads that wait

    def result(self, timeout=None):
        with self.turn:
            if not self.done():
                self.set_result(self.work())
        return super().result(timeout)


class LazyWorker:
    def __init__(self):
        self.under_way = []

    def submit(self, work, *arguments):
        self.under_way.append(Lazy(partial(work, *arguments)))
        return self.under_way[-1]

    def stop(self, *_, **__):
        for each in self.under_way:
            each.result()


class Eager(LazyWorker):
    """Does its work before anything else happens."""

    def submit(self, work, *arguments):
        done = super().submit(work, *arguments)
        done.result()
        return done


@pytest.fixture
def late(monkeypatch):
    """Nothing is copied, or sealed, before somebody waits for it; called with a thread's name, that one is eager."""
    of = {"_copier": LazyWorker, "_follower": LazyWorker}
    before = Stager.__init__

    def init(self, *arguments, **settings):
        before(self, *arguments, **settings)
        vars(self).update({name: made() for name, made in of.items()})

    monkeypatch.setattr(Stager, "__init__", init)
    return lambda name: of.update({name: Eager})


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class OwnLoop:
    """A loop of one's own that saves its second step to memory and is then killed in the third."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 4)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        places = {"folder": str(folder / "saves"), "memory_folder": str(folder / "memory")}
        self.settings = checkpoint.Tiered(**places, memory_every=2, disk_every=0)

    def step(self):
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return weights(self.model)

    def by_attach(self, steps):
        with checkpoint.attach({"model": self.model, "optimizer": self.optimizer}, settings=self.settings) as saves:
            began, there = saves.restore(), weights(self.model)
            for _ in range(steps):
                there = self.step()
                saves.step()
                yield began, there
            yield began, there

    def by_features(self, steps):
        job = attach(self.model, self.optimizer, self.settings)
        began, there = job.restore("auto"), weights(self.model)
        for _ in range(steps):
            yield began, self.step()
        yield began, there
        job.close()  # without a last checkpoint, so that what is restored was copied while training continued


@pytest.mark.parametrize("program", [OwnLoop.by_attach, OwnLoop.by_features])
def test_the_optimizer_waits_for_what_it_changes_to_be_copied(tmp_path, late, program):
    saved = [there for _, there in program(OwnLoop(tmp_path), 3)][1]
    ((began, found),) = program(OwnLoop(tmp_path), 0)
    assert began == 2 and all(torch.equal(found[name], value) for name, value in saved.items())


def test_nothing_is_sealed_before_it_is_copied(tmp_path, late):
    late("_follower")
    saved = [there for _, there in OwnLoop(tmp_path).by_attach(3)][1]
    ((began, found),) = OwnLoop(tmp_path).by_attach(0)  # a seal of bytes that were not there yet is of others
    assert began == 2 and all(torch.equal(found[name], value) for name, value in saved.items())
