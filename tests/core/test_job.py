"""How features attach: order, conflicts, phases, exits; and what a step does with its loss."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from shoestring import checkpoint, comm, optim, parallel
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError, ConflictError, NonFiniteError
from shoestring.core.feature import HOSTS, Feature, Phase, Seam, check_owners, order_of_application
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World


@dataclass(frozen=True, kw_only=True)
class Spy(Feature):
    """Writes down what happens to it."""

    seams: ClassVar = (Seam.STEP, Seam.MODEL)
    label: str
    log: list
    fail_check: bool = False
    fail_apply: bool = False

    def resolve(self, world):
        self.log.append(f"resolve {self.label}")
        return self

    def check(self, attachments):
        self.log.append(f"check {self.label}")
        if self.fail_check:
            raise ConfigError("does not fit")

    def apply(self, attachments, seam):
        self.log.append(f"{seam.name} {self.label}")
        attachments.exits.callback(lambda: self.log.append(f"exit {seam.name} {self.label}"))
        if self.fail_apply and seam is Seam.STEP:
            raise RuntimeError("broken")
        if seam is Seam.STEP:
            for phase in reversed(Phase):
                attachments.at(phase, lambda phase=phase: self.log.append(f"{phase.name} {self.label}"))


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def job(**arguments):
    return Job(linear(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), world=World(), **arguments)


def batch(value=1.0):
    return torch.full((2, 3), value), torch.tensor([0, 1])


ORDER = ["FORWARD", "CLIP", "RATE", "GRAD", "WAIT", "PROJECT", "OUTER", "CAPTURE"]


def test_a_programs_author_sees_a_small_job():
    public = {name for name in dir(job()) if not name.startswith("_")}
    assert public == {
        *("model", "optimizer", "progress", "world", "trace", "numbers", "kept", "done"),
        *("step", "evaluate", "keep", "restore", "stop", "finish", "close"),
    }
    assert len(public) <= 15


def test_resolve_check_and_apply_come_in_order_and_each_for_all_features():
    log: list[str] = []
    compose(job(), [Spy(label="a", log=log), Spy(label="b", log=log)])
    expected = ["resolve a", "resolve b", "check a", "check b", "MODEL a", "MODEL b", "STEP a", "STEP b"]
    assert log == expected


def test_phases_run_in_order_around_the_optimizer_step():
    log: list[str] = []
    made = compose(job(), [Spy(label="a", log=log), Spy(label="b", log=log)])
    made.optimizer.register_step_post_hook(lambda *_: log.append("end"))
    weight = attachments_of(made).module.weight
    seen = []
    attachments_of(made).at(Phase.WAIT, lambda: seen.append((weight.clone(), made.progress.step)))
    attachments_of(made).at(Phase.PROJECT, lambda: seen.append((weight.clone(), made.progress.step)))
    attachments_of(made).at(Phase.CAPTURE, lambda: seen.append((weight.clone(), made.progress.step)))
    log.clear()
    made.step(batch())
    assert log == [f"{phase} {label}" for phase in ORDER for label in "ab"] + ["end"]
    (before, first), (after, second), (captured, third) = seen
    assert not torch.equal(before, after) and torch.equal(after, captured)
    assert (first, second, third) == (0, 0, 1)  # CAPTURE sees the counters of the step that is done


def test_phases_run_in_a_foreign_loop_until_the_job_is_closed():
    log: list[str] = []
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = attach(model, optimizer, Spy(label="a", log=log))
    for closed in (False, True):
        log.clear()
        model(batch()[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert log == ([] if closed else [f"{phase} a" for phase in ORDER])
        assert made.progress.step == made.trace.step == 1
        made.close()


def test_a_failed_check_changes_and_allocates_nothing():
    log: list[str] = []
    made = job()
    with pytest.raises(ConfigError, match="does not fit"):
        compose(made, [Spy(label="a", log=log), Spy(label="b", log=log, fail_check=True)])
    assert log == ["resolve a", "resolve b", "check a", "check b"]
    assert not made.kept and not hasattr(made, "optimizer")


def test_conflicts_come_before_any_check():
    log: list[str] = []
    features = [Spy(label="a", log=log), optim.AdamW(lr=-1.0), optim.SGD()]
    with pytest.raises(ConflictError, match=r"`optim\.adamw` and `optim\.sgd` both own OPTIM") as caught:
        compose(job(), features)
    assert caught.value.hint == "remove the table [optim.adamw] or [optim.sgd]"
    assert log == ["resolve a"]


def test_two_owners_of_a_mesh_dimension_conflict_and_of_two_dimensions_do_not():
    with pytest.raises(ConflictError, match="both own SHARD over hosts and local"):
        check_owners([parallel.DDP(), parallel.FSDP()])
    with pytest.raises(ConflictError, match="both own SHARD over local"):
        check_owners([parallel.DDP(), parallel.FSDP(hosts="leave")])

    class AcrossHosts(parallel.DDP):
        over = (HOSTS,)

    check_owners([AcrossHosts(), parallel.FSDP(hosts="leave")])
    check_owners([optim.Clip(), optim.Clip(), optim.Schedule()])


def test_ordered_by_seam_and_stable_inside_one():
    a, b = Spy(label="a", log=[]), Spy(label="b", log=[])
    pairs = order_of_application([a, optim.AdamW(), b])
    assert [seam for seam, _ in pairs] == [Seam.MODEL, Seam.MODEL, Seam.OPTIM, Seam.STEP, Seam.STEP]
    assert [one for _, one in pairs] == [a, b, optim.AdamW(), a, b]


def test_ranks_that_nothing_keeps_equal_are_refused():
    world = World(rank=0, size=4, local_rank=0, local_size=2)
    for features, dimension in (([], HOSTS), ([parallel.FSDP(hosts="leave")], HOSTS)):
        with pytest.raises(ConfigError, match=f"2 ranks over {dimension}, but nothing keeps their models equal"):
            compose(Job(linear(), world=world), features)


def test_a_setting_that_is_none_of_its_choices_is_refused_in_a_program_too():
    with pytest.raises(ConfigError, match=r"`comm.quantize.bits` cannot be 3 \(hint: valid: \(8, 4\)\)"):
        compose(Job(linear()), [comm.Quantize(bits=3), optim.AdamW()])


@pytest.mark.parametrize("inside", [False, True], ids=["while composing", "while training"])
def test_exits_are_released_after_an_exception(inside):
    log: list[str] = []
    with pytest.raises(RuntimeError, match="broken"):
        made = compose(job(), [Spy(label="a", log=log), Spy(label="b", log=log, fail_apply=not inside)])
        with made:
            attachments_of(made).at(Phase.GRAD, lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made.step(batch())
            raise RuntimeError("broken")
    taken = [line for line in log if line in ("MODEL a", "MODEL b", "STEP a", "STEP b")]
    released = [line for line in log if line.startswith("exit")]
    assert released == [f"exit {line}" for line in reversed(taken)]
    assert len(taken) == 4


def test_kept_names_are_unique():
    made = compose(job())
    with pytest.raises(ConfigError, match="two features keep state under the name `model`"):
        made.keep("model", made.progress)
    assert list(made.kept) == ["model", "optimizer", "scaler", "progress", "random"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_the_weights_and_no_gradients(value):
    made = compose(job(), [optim.SGD(lr=0.1)])
    made.step(batch())
    before = [parameter.clone() for parameter in attachments_of(made).parameters]
    for micro_batches in ([batch(value)], [batch(), batch(value)]):
        with pytest.raises(NonFiniteError, match="the loss became nan at step 2"):
            made.step(*micro_batches)
    assert made.progress.step == 1 and made.progress.tokens == 2
    assert all(torch.equal(one, other) for one, other in zip(before, attachments_of(made).parameters, strict=True))
    assert not attachments_of(made).gradients
    made.step(batch())  # and it can continue
    assert all(parameter.isfinite().all() for parameter in attachments_of(made).parameters)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_without_targets_is_an_error_and_leaves_the_weights(count):
    made = compose(job())
    inputs = batch()[0]
    nothing = inputs, torch.tensor([-100, -100])
    for _ in range(2):
        before = attachments_of(made).module.weight.clone()
        with pytest.raises(NonFiniteError, match="none of its targets count"):
            made.step(*[nothing] * count)
        assert torch.equal(before, attachments_of(made).module.weight)
        made.step(batch(), nothing)
        assert attachments_of(made).module.weight.isfinite().all()


def test_micro_batches_of_unequal_counts_are_one_batch():
    one, other = compose(job()), compose(job())
    inputs, targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 0, -100])
    for _ in range(5):
        whole = one.step((inputs, targets))
        parts = other.step((inputs[:1], targets[:1]), (inputs[1:], targets[1:]))
        assert torch.allclose(whole, parts, rtol=1e-6)
    assert torch.allclose(attachments_of(one).module.weight, attachments_of(other).module.weight, rtol=1e-6)
    assert one.progress.tokens == other.progress.tokens == 25


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigError, match="ReLU has no trainable parameters"):
        compose(Job(nn.ReLU(), world=World()))


def test_loading_makes_no_step(tmp_path):
    """Torch lays out a fresh optimizer's state by a step of its own; it must not count, clip, or save."""
    plain = checkpoint.Plain(folder=str(tmp_path), every=1, keep=9)
    first = compose(job(), [optim.AdamW(lr=0.5), plain])
    first.step(batch())
    first.step(batch())
    saved = sorted(path.name for path in tmp_path.iterdir())
    again = compose(job(), [optim.AdamW(lr=0.25), plain])
    weights = attachments_of(again).module.weight
    assert again.restore("auto") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == saved
    assert again.progress.step == 2 and torch.equal(weights, attachments_of(first).module.weight)
    assert {group["lr"] for group in again.optimizer.param_groups} == {0.25}
    assert int(again.optimizer.state[weights]["step"]) == 2


def test_tokens_of_a_step_that_is_not_read_yet_are_in_what_is_kept():
    """As on a GPU, where the numbers of a step are read after the next one: a checkpoint between them lacks none."""

    def kept(made):
        progress = Progress()
        progress.load_state_dict(made.progress.state_dict())
        return progress

    made = compose(job())
    attachments_of(made).defers = True
    for step in range(1, 4):
        made.step(batch())
        assert made.progress.tokens == 2 * (step - 1)
        assert kept(made) == Progress(step=step, position=step, tokens=2 * step)
    attachments_of(made).verify()
    assert made.progress.tokens == 6 and kept(made) == Progress(step=3, position=3, tokens=6)
