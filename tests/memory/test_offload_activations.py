"""Activations in host memory: the same bits as with activations on the device, and where their bytes are."""

from itertools import count

import pytest
import torch
from torch import nn

from shoestring import memory
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.memory import OffloadActivations, Recompute
from shoestring.memory.offload import activations
from shoestring.memory.offload.activations import ActivationBytes, SavedStorage
from shoestring.memory.offload.buffers import LEASE, HostBuffer, HostBuffers
from shoestring.memory.predicted import predict
from shoestring.models.gpt import tiny
from shoestring.optim import AdamW
from shoestring.testing import FeatureSuite, Pool
from tests.memory.observed import needs_compiler

ALL = OffloadActivations(min_mb=0.0)


@pytest.mark.slow
class TestOffloadActivations(FeatureSuite):
    """Copies are exact."""

    feature = ALL
    tolerance = 0.0


def small(layers=4):
    torch.manual_seed(0)
    return tiny(vocab_size=64, dim=16, layers=layers, heads=2, kv_heads=2, hidden=32)


def batch(number, length=8):
    tokens = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(number))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained(*features, micro=1, steps=3):
    model = small()
    with compose(Job(model, progress=Progress(total=steps), world=World()), [AdamW(lr=1e-2), *features]) as job:
        losses = [float(job.step(*(batch(micro * step + i) for i in range(micro)))) for step in range(steps)]
    return losses, [each.detach().clone() for each in model.parameters()], job


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("features", [(ALL,), (ALL, Recompute()), (Recompute(every_nth=2), ALL)], ids=len)
def test_losses_and_weights_are_the_same_bits(features):
    with_it = trained(*features, micro=2)
    assert same(with_it, trained(micro=2))
    facts = with_it[2].trace.facts
    assert 0 < facts["activations_on_device"] < facts["activations_offloaded"]
    assert facts["activations_copied"] == 2 * facts["activations_offloaded"]  # down and up, once
    assert LEASE not in with_it[2].world.memory.leases  # given back


class Views(nn.Module):
    """Saves three views of one storage, one of them transposed, its own parameter and a view of that."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 16))
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x):
        q, k, v = (x @ self.weight.t()).split(16, dim=-1)
        return x + (q * self.scale) @ k.transpose(-1, -2) @ v / 100


class Stack(nn.Module):
    def __init__(self, kind=Views, blocks=3):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def attached(model, feature=ALL):
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), feature)


def gradients(model, x, keep=False):
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=keep)
    first = [each.grad.clone() for each in model.parameters()]
    if keep:
        loss.backward()
    return first, [each.grad for each in model.parameters()]


def test_views_of_one_storage_travel_once_and_weights_stay():
    plain, offloaded, x = Stack(), Stack(), torch.randn(8, 16)
    with attached(offloaded) as job:
        for keep in (False, True):
            for one, other in zip(gradients(plain, x, keep), gradients(offloaded, x, keep), strict=True):
                assert all(map(torch.equal, one, other))
        job.optimizer.step()
        # Of each of two blocks: its input, the product of which q, k and v are views, q * scale, and q @ k.
        once = 2 * 4 * (8 * 16 + 8 * 48 + 8 * 16 + 8 * 8)
        assert job.trace.facts["activations_offloaded"] == once


def test_what_a_backward_pass_never_took_is_free_again():
    model = Stack()
    with attached(model) as job:
        taken = []
        for _ in range(3):
            model(torch.randn(8, 16))
            taken.append(job.world.memory.leases[LEASE][0])
        assert taken[0] == taken[1] == taken[2]
        model.eval()
        model(torch.randn(64, 16))
        with torch.no_grad():
            model.train()(torch.randn(64, 16))
        assert job.world.memory.leases[LEASE][0] == taken[0]


def test_buffers_follow_the_length_of_batches():
    model = Stack()
    with attached(model) as job:
        taken = []
        for length in (8, 7, 64, 64, 8, 8, 8):
            gradients(model, torch.randn(length, 16))
            taken.append(job.world.memory.leases[LEASE][0])
    assert taken[1] == taken[0] and taken[6] == taken[0] and taken[3] > 4 * taken[0]


class WritesOver(nn.Module):
    """Writes over what its backward pass needs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x).exp()
        with torch.no_grad():
            y.mul_(2)
        return y


def test_what_is_written_over_is_refused_as_autograd_does():
    plain, offloaded = Stack(WritesOver), Stack(WritesOver)
    plain.blocks[2], offloaded.blocks[2] = nn.Identity(), nn.Identity()  # of which autograd holds activations itself
    for step in (lambda: gradients(plain, torch.randn(4, 16)), lambda: gradients(offloaded, torch.randn(4, 16))):
        with attached(offloaded), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step()


def test_a_pass_that_fails_leaves_nothing_behind():
    model = Stack()
    with attached(model):
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(4, 15))
        assert model(torch.randn(4, 16)).grad_fn is not None
        held = torch.randn(4, 4, requires_grad=True).exp()
        assert held.grad_fn._saved_result is not None  # outside of blocks nothing is packed


def peak_of_two_steps(shape, recompute):
    """The peak of two traced steps, and the bytes of host memory that they lease."""
    features = [AdamW(), OffloadActivations(min_mb=0.01), *([Recompute()] if recompute else [])]
    job = Job(tiny(**shape))
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    with memory.traced() as traced, job, compose(job, features):
        for _ in range(2):
            job.step({"inputs": tokens, "targets": tokens})
        leased = job.world.memory.leases[LEASE][0]
    window = traced.profile.main
    return window.peak - window.by_kind().get("unnamed", 0), leased


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (Recompute(),)], ids=["plain", "recomputed"])
def test_the_prediction_is_the_peak(more):
    shape, features = {"layers": 6, "vocab_size": 64}, [AdamW(), OffloadActivations(min_mb=0.01), *more]
    with torch.device("meta"):
        outline = tiny(**shape)
    without = predict(outline, [AdamW(), *more], cross_entropy, (4, 64), ranks=1)
    with torch.device("meta"):
        outline = tiny(**shape)
    predicted = predict(outline, features, cross_entropy, (4, 64), ranks=1)
    with Pool(1, timeout=100) as pool:  # a process in which no other test has left anything
        ((peak, leased),) = pool.call(peak_of_two_steps, shape=shape, recompute=bool(more))
    assert predicted.peak == pytest.approx(peak, rel=0.01)
    assert predicted.host == leased > 0 == without.host
    assert predicted.peak <= without.peak - (0 if more else predicted.host / 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"min_mb": -1.0}, "min_mb"), ({"blocks": 4}, "must be from 0 to 3, got 4"), ({"blocks": -1}, "from 0 to 3")],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        attached(small(), OffloadActivations(**settings))
    with pytest.raises(ConfigError, match="needs at least 2"):
        attached(nn.Sequential(nn.Linear(2, 2)), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [False, True])
def test_code_compiled_before_the_feature_was_attached_is_said_to_offload_nothing(caplog, reset):
    model = small()
    model.compile(backend="eager")
    with compose(Job(model, world=World()), [AdamW()]) as job:
        job.step(batch(0))
    if reset:
        torch.compiler.reset()
    with compose(Job(model, world=World()), [AdamW(), ALL]) as job:
        for number in range(2):
            job.step(batch(number))
        assert bool(job.trace.facts["activations_offloaded"]) is reset
    assert [record.args for record in caplog.records if "nothing is offloaded" in record.msg] == [
        ("memory.offloadactivations",)
    ] * (not reset)
    torch.compiler.reset()


# -- faults ------------------------------------------------------------------------------------------------------------


def _taken_twice(self, source):
    buffer = next((each for each in self._taken if each.nbytes >= source.nbytes), None) or HostBuffer(source)
    self._taken.add(buffer)
    return buffer


COUNT = count()


FAULTS = {
    "buffers that are taken twice": (
        lambda: test_losses_and_weights_are_the_same_bits((ALL,)),
        (HostBuffers, "take", _taken_twice),
    ),
    "nothing is copied up": (
        lambda: test_losses_and_weights_are_the_same_bits((ALL,)),
        (SavedStorage, "fetch", lambda self: self.on_device.zero_()),
    ),
    "the device forgets nothing": (
        lambda: test_losses_and_weights_are_the_same_bits((ALL,)),
        (SavedStorage, "leave", lambda self: None),
    ),
    "every view travels": (
        test_views_of_one_storage_travel_once_and_weights_stay,
        (activations, "_key", lambda tensor: (next(COUNT), 0)),
    ),
    "buffers that are not given back": (
        test_what_a_backward_pass_never_took_is_free_again,
        (HostBuffers, "give", lambda self, buffer: None),
    ),
    "buffers that are never freed": (
        test_buffers_follow_the_length_of_batches,
        (HostBuffers, "trim", lambda self: None),
    ),
    "nobody looks at versions": (
        test_what_is_written_over_is_refused_as_autograd_does,
        (SavedStorage, "check_version", lambda self: None),
    ),
    "all is fetched at once": (
        lambda: test_losses_and_weights_are_the_same_bits((ALL,)),
        (ActivationBytes, "arrived", lambda self, nbytes: setattr(self, "most_on_device", self.most_live)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    check, (owner, name, planted) = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
