"""What features take of a job: one owner each, by name and at its seam; contexts, passes, and what is trained."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from shoestring import checkpoint, graph, optim, precision
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import LOCAL, Feature, Phase, Seam
from shoestring.core.job import attachments_of
from tests.small_jobs import batch, does
from tests.small_jobs import small_job as job

ONE_OWNER = {
    "restore": (Seam.STEP, lambda attachments: attachments.restore_with(lambda where: None)),
    "refuse": (Seam.STEP, lambda attachments: attachments.refuse_with(lambda error: None)),
    "shard": (Seam.SHARD, lambda attachments: attachments.shard(over=[LOCAL])),
    "exchange": (Seam.WIRE, lambda attachments: attachments.exchange([LOCAL])),
    "scaler": (Seam.MODEL, lambda attachments: attachments.scale_with(torch.amp.GradScaler("cpu"))),
    "backend": (Seam.GRAPH, lambda attachments: attachments.compile_with("eager")),
    "optimizer": (Seam.OPTIM, lambda attachments: attachments.build_with(torch.optim.SGD)),
}


@pytest.mark.parametrize("slot", ONE_OWNER)
def test_what_has_one_owner_is_refused_to_a_second_by_name_and_released(slot):
    seam, take = ONE_OWNER[slot]
    made = job()
    # `check_owners` finds two owners of SHARD, WIRE and OPTIM before; here `over` differs from what they take.
    one, two = does(seam, take, "one"), does(seam, take, "two")
    with pytest.raises(ConflictError, match=r"`test.one` and `test.two` both own") as caught:
        compose(made, [one, two])
    if seam not in (Seam.SHARD, Seam.WIRE, Seam.OPTIM):
        assert caught.value.hint == "remove the table [test.one] or [test.two]"


@pytest.mark.parametrize("slot", ONE_OWNER)
def test_what_belongs_to_a_seam_is_taken_there_only(slot):
    seam, take = ONE_OWNER[slot]
    other = Seam.LOSS
    with pytest.raises(ConfigError, match=f"`test.does` takes .* at LOSS, but .* belongs to {seam.name}"):
        compose(job(), [does(other, take)])


def test_evaluation_is_of_the_tasks_loss():
    def halve(attachments):
        inner = attachments.loss
        attachments.loss = lambda output, batch: (inner(output, batch)[0] * 0.5, inner(output, batch)[1])

    plain = compose(job())
    halved = compose(job(), [does(Seam.LOSS, halve)])
    assert halved.evaluate([batch()]) == plain.evaluate([batch()])
    assert float(halved.step(batch())) == pytest.approx(float(plain.step(batch())) / 2)


def test_what_surrounds_holds_for_forward_and_loss_also_of_features_at_loss_and_in_evaluation():
    seen = []

    def teach(attachments):
        teacher, inner = nn.Linear(3, 4), attachments.loss

        def loss(output, batch):
            seen.append(teacher(batch[0]).dtype)
            return inner(output, batch)

        attachments.loss = loss

    made = compose(job(), [does(Seam.LOSS, teach), precision.Autocast(dtype="bf16")])
    made.step(batch())
    assert seen == [torch.bfloat16]
    outside: list[bool] = []

    @contextmanager
    def swapped():
        outside.append(True)
        yield
        outside.append(False)

    attachments_of(made).surround_evaluation(swapped)
    made.evaluate([batch(), batch()])
    assert outside == [True, False] and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("first", ["pass", "compile"])
def test_passes_compose_around_one_backend_whatever_their_order(first):
    seen = []

    def add(attachments):
        attachments.add_pass(lambda module: seen.append(("forward", len(module.graph.nodes))))
        attachments.add_pass(lambda module: seen.append(("joint", len(module.graph.nodes))), on="joint")

    features = [does(Seam.GRAPH, add), graph.Compile(backend="aot_eager")]
    made = compose(job(), features if first == "pass" else features[::-1])
    assert attachments_of(made).graph.backend == "aot_eager"
    eager = compose(job())
    for _ in range(2):
        assert float(made.step(batch())) == pytest.approx(float(eager.step(batch())))
    (one, forward), (two, joint) = seen
    assert (one, two) == ("forward", "joint") and joint > forward > 3


def test_a_pass_without_a_backend_runs_interpreted_and_changes_what_is_computed():
    def negate(module):
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        (result,) = output.args[0]
        with module.graph.inserting_before(output):
            negated = module.graph.call_function(torch.neg, (result,))
        output.args = ((negated,),)

    made = compose(job(), [does(Seam.GRAPH, lambda attachments: attachments.add_pass(negate))])
    assert torch.equal(attachments_of(made).module(batch()[0]), -attachments_of(job()).module(batch()[0]))


def test_a_joint_pass_is_refused_by_a_backend_without_a_joint_graph():
    add = does(Seam.GRAPH, lambda attachments: attachments.add_pass(lambda module: None, on="joint"))
    with pytest.raises(ConfigError, match="the backend `eager` builds no joint graph"):
        compose(job(), [add, graph.Compile(backend="eager")])


def test_a_feature_carries_state_from_one_apply_to_the_next():
    found = []

    @dataclass(frozen=True, kw_only=True)
    class Two(Feature):
        seams: ClassVar = (Seam.STEP, Seam.MODEL)

        def apply(self, attachments, seam):
            found.append(attachments.carry(self, object))

    compose(job(), [Two(), Two()])
    first, second, third, fourth = found
    assert first is third and second is fourth and first is not second


class Masters:
    """fp32 masters of bf16 parameters, as an owner of SHARD sets them."""

    def __init__(self, attachments):
        self.parameters = dict(attachments.module.named_parameters())
        self.masters = {name: p.detach().float().requires_grad_() for name, p in self.parameters.items()}
        attachments.shard(over=[], trained=self.masters, refresh=self.refresh)
        attachments.at(Phase.PROJECT, self.refresh)
        for name, parameter in self.parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(self.hand_over, self.masters[name]))
            attachments.exits.callback(hook.remove)

    def hand_over(self, master, parameter):
        master.grad, parameter.grad = parameter.grad.float() + (0 if master.grad is None else master.grad), None

    @torch.no_grad()
    def refresh(self):
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])


def masters():
    made = job(optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))
    attachments_of(made).module.bfloat16()
    return made, does(Seam.SHARD, Masters)


def in_bf16(batch):
    return batch[0].bfloat16(), batch[1]


def test_the_optimizer_clipping_and_checkpoints_see_what_is_trained_in_the_parameters_place(tmp_path):
    def run(steps, resume=False):
        made, feature = masters()
        plain = checkpoint.Plain(folder=str(tmp_path), every=2, keep=9)
        compose(made, [feature, optim.Clip(max_norm=1e-3), plain])
        if resume:
            assert made.restore("auto") == 2
        while made.progress.step < steps:
            made.step(in_bf16(batch()))
        return made

    whole = run(4)
    for path in tmp_path.glob("step-*4*"):
        path.unlink()
    again = run(4, resume=True)
    assert all(tensor.dtype == torch.float32 for tensor in whole.kept["model"].state.state_dict().values())
    assert float(whole.numbers["grad_norm"]) > 1e-3
    for one, other in zip(attachments_of(whole).parameters, attachments_of(again).parameters, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        attachments_of(whole).module.parameters(), attachments_of(again).module.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_what_is_trained_must_stand_for_parameters_of_the_model():
    for trained, said in (
        ({"other": torch.zeros(3)}, "`other`, which is no parameter"),
        ({"up.bias": torch.zeros(3)}, "3 elements for `up.bias`, which has 5"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose(job(), [does(Seam.SHARD, lambda attachments, t=trained: attachments.shard(over=[], trained=t))])


def test_a_step_without_gradients_for_what_is_trained_is_refused():
    def lose(attachments):
        attachments.shard(over=[], trained={n: p.detach().clone() for n, p in attachments.module.named_parameters()})

    with pytest.raises(ConfigError, match=r"no tensor that `test.does` gives"):
        compose(job(), [does(Seam.SHARD, lose)]).step(batch())


def test_schedules_follow_the_position_which_a_feature_may_advance_faster():
    made = compose(job(), [optim.Schedule(shape="trapezoid", warmup=0, cooldown=1.0, final=0.0)])
    made.progress.total = 4
    made.progress.gain = 2.0
    rates = []
    attachments_of(made).at(Phase.GRAD, lambda: rates.append(made.optimizer.param_groups[0]["lr"]))
    while not made.progress.done:
        made.step(batch())
    assert made.progress.step == 2 and rates == pytest.approx([0.1, 0.05])


def test_work_before_the_forward_pass_runs_once_a_step_in_a_foreign_loop_too():
    counted = []
    made = job()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    count = does(Seam.STEP, lambda attachments: attachments.at(Phase.FORWARD, lambda: counted.append(1)))
    attached = attach(made.model, optimizer, count)
    for _ in range(2):
        for _ in range(3):
            made.model(batch()[0]).sum().backward()
        optimizer.step()
    made.model.eval()
    made.model(batch()[0])
    assert len(counted) == 2
    attached.close()
    made.model.train()
    made.model(batch()[0])
    assert len(counted) == 2
