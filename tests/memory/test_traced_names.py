"""What blocks are said to be: the names of what is known to lie there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.memory import traced
from shoestring.memory.tracing.labels import STEPPED, optimizer_state
from shoestring.testing.held_resources import fresh_garbage
from tests.memory.observed import needs_compiler

pytestmark = needs_compiler
WIDTH, ROWS = 64, 96


@pytest.fixture(autouse=True)
def alone():
    """Models that earlier tests left are not looked at: they would be parameters of this process, too."""
    with fresh_garbage():
        yield


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(2)), again

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def train(model, steps=2, rows=ROWS):
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(rows, WIDTH)
    for _ in range(steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, batch


def names(window, kind, event=None):
    found = {}
    for held in window.held(event):
        if held.name.kind == kind:
            found[held.name.name] = found.get(held.name.name, 0) + held.nbytes
    return found


def of_one_model(found):
    """Without those of models that other tests of this process may keep."""
    return {name: nbytes for name, nbytes in found.items() if ": " not in name}


def test_parameters_gradients_and_optimizer_state_have_full_names():
    with traced() as before:
        torch.ones(1)
    left = before.profile.main.by_kind().get("unnamed", 0)  # by other tests
    model = Model()
    with traced() as memory:
        train(model, rows=2)  # few activations: the peak is in the optimizer's step
    window = memory.profile.main
    parameters = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert of_one_model(names(window, "parameter")) == parameters
    assert names(window, "gradient") == parameters
    state = names(window, "optimizer state")
    assert {f"{name}.{key}" for name in parameters for key in ("exp_avg", "exp_avg_sq", "step")} == set(state)
    assert state["blocks.1.up.weight.exp_avg"] == parameters["blocks.1.up.weight"]
    assert window.by_kind().get("unnamed", 0) - left < 0.02 * window.peak  # other threads of this process may allocate


def test_activations_have_their_module_and_operator():
    model = Model()
    with traced() as memory:
        kept = train(model, rows=4096)
    window = memory.profile.main
    held = {
        (each.name.name, each.name.operator): each.nbytes for each in window.held() if each.name.kind == "activation"
    }
    for block in range(2):
        assert held[f"blocks.{block}.up", "aten::linear (aten::addmm)"] == 4096 * 3 * WIDTH * 4
        assert held[f"blocks.{block}", "aten::gelu"] == 4096 * 3 * WIDTH * 4
    assert names(window, "input") == {"argument 0 of the model": 4096 * WIDTH * 4}
    del kept


def test_what_the_backward_pass_makes_is_named_by_its_forward_module():
    with traced() as memory:
        train(Model(), rows=4096)
    window = memory.profile.main
    temporary = {name for _, name, _ in (n for n in window.names if n.kind == "temporary")}
    assert {"backward of blocks.0.down", "backward of blocks.0", "backward of blocks.1.up"} <= temporary


def test_recomputed_activations_are_told_apart():
    with traced() as memory:
        train(Model(again=True), rows=4096)
    window = memory.profile.main
    again = names(window, "activation")
    assert any(name.startswith("recomputed: blocks.1") for name in again), again
    assert not any(name.startswith("recomputed: blocks.0") for name in again), again


def test_the_loss_outside_of_modules_has_its_line():
    with traced() as memory:
        model = nn.Linear(8, 4096)
        loss = F.cross_entropy(model(torch.ones(64, 8)), torch.zeros(64, dtype=torch.int64))
        loss.backward()
    lines = names(memory.profile.main, "activation")
    (line,) = [name for name in lines if name.startswith("memory/test_traced_names.py:")]
    assert lines[line] >= 64 * 4096 * 4


def test_a_temporary_is_what_does_not_outlive_its_operator():
    x = torch.randn(512, 512)
    with traced() as memory:
        torch.linalg.matrix_exp(x)  # needs room for several matrices
    held = [each.name for each in memory.profile.main.held()]
    assert any(name.kind == "temporary" and name.operator.startswith("aten::linalg_matrix_exp") for name in held), held


def test_tied_and_frozen_parameters_count_once():
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    model["b"].weight = model["a"].weight
    with traced() as memory:
        model["a"](torch.ones(1, 64))
    assert of_one_model(names(memory.profile.main, "parameter")) == {"a.weight": 64 * 64 * 4}


def test_a_second_model_has_its_type_before_its_names():
    teacher, student, idle = Model(), nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(3, 3))
    with traced() as memory:
        teacher(student(torch.ones(8, WIDTH)))
    found = names(memory.profile.main, "parameter")
    assert {"0.weight", "Model: blocks.0.up.weight", "Sequential: 0.weight"} <= set(found)
    assert found["0.weight"] == WIDTH * WIDTH * 4
    del idle


def test_a_part_of_a_model_that_runs_alone_has_its_full_name():
    model = Model()
    with traced() as memory:
        held = model.blocks[1](torch.ones(8, WIDTH))
    assert any(each.name.startswith("blocks.1.") for each in memory.profile.main.names)
    del held


def test_gradients_in_one_buffer_are_taken_apart():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    with traced() as memory:
        flat, at = torch.zeros(sum(sizes.values()) + 16), 0
        for name, parameter in model.named_parameters():
            parameter.grad = flat[at : at + sizes[name]].view_as(parameter)
            at += sizes[name]
        model(torch.ones(1, WIDTH))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    window = memory.profile.main
    assert names(window, "gradient") == {name: 4 * size for name, size in sizes.items()}
    assert sum(names(window, "other").values()) >= 64  # the rest of the buffer
    assert window.peak == sum(each.nbytes for each in window.held())


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_are_the_same_bits_with_it(compiled):
    def losses(watch):
        torch.manual_seed(3)
        model = Model()
        called = torch.compile(model, backend="eager") if compiled else model
        optimizer, found = torch.optim.AdamW(model.parameters()), []
        for _ in range(3):
            loss = called(torch.ones(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses(False)
    with traced() as memory:
        assert losses(True) == plain
    if not compiled:
        assert any(name.name.startswith("blocks.1") for name in memory.profile.main.names)


def test_state_of_what_is_stepped_in_place_of_a_parameter_has_the_parameters_name():
    """So a comparison of a run with offload and one without does not list all state twice."""
    model = nn.Linear(3, 2)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(masters)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    names = {id(master): f"{name} ({STEPPED})" for name, master in zip(("weight", "bias"), masters, strict=True)}
    found = {name for _, name, _ in optimizer_state([optimizer], names)}
    assert found == {f"{name}.{key}" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq", "step")}
