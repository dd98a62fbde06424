"""[precision.graph] with fp8: products of rounded matrices, computed by a CPU, against doubles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring.graph.trace import trace
from shoestring.precision import Graph, eight_bits
from shoestring.precision.casts import CAST
from shoestring.precision.graph_pass import Rules, describe_bits, groups_of, narrow
from shoestring.testing.jobs import sgd, tiny

SCALED = torch.ops.aten._scaled_mm.default
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}
"""Bits of the mantissa, smallest exponent, largest number."""


class Layers(nn.Module):
    """Two layers whose sizes are multiples of 16, one with a bias, and one whose sizes are not."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(48, 64, bias=False), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, x, targets):
        return F.cross_entropy(self.head(F.silu(self.down(F.silu(self.up(x))))), targets)


@pytest.fixture(autouse=True)
def compiles():
    """Torch compiles a module's code eight times, and then runs it as it is: no test takes compilations of others."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr(eight_bits, "LEAST", 1)
    torch.manual_seed(0)
    model, inputs = Layers(), (torch.randn(80, 48), torch.randint(5, (80,)))
    return model, inputs, trace(model, *inputs)


def rounded(x, dtype):
    """Numbers rounded to an 8-bit type, in doubles, by the definition of its numbers."""
    mantissa, smallest, largest = FORMATS[dtype]
    x = x.double()
    exponent = torch.where(x == 0, 1.0, x.abs()).log2().floor().clamp(min=smallest)
    quantum = torch.exp2(exponent - mantissa)
    return ((x / quantum).round() * quantum).clamp(-largest, largest)


class Checked(fx.Interpreter):
    """Runs a graph; every rounded tensor and every product of such is compared with doubles."""

    def __init__(self, module):
        super().__init__(module)
        self.rounded, self.products = [], []

    def run_node(self, n):
        made = super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n) if n.op == "call_function" else ((), {})
        if n.target is CAST and args[1] in FORMATS:
            dtype = args[1]
            assert torch.equal(made.double(), rounded(args[0], dtype))
            assert args[0].abs().max() == pytest.approx(FORMATS[dtype][2])  # all of the type's range is used
            self.rounded.append((n.args[0], dtype))
        if n.target is SCALED:
            one, other, *scales, bias = args[:5]
            exact = (one.double() * scales[0].double()) @ (other.double() * scales[1].double())
            exact = exact if bias is None else exact + bias.double()
            assert made.dtype == torch.bfloat16 and made.shape == n.meta["val"].shape
            torch.testing.assert_close(made.double(), exact, rtol=2**-7, atol=1e-6 * float(exact.abs().max()))
            assert one.stride(1) == 1 and other.stride(0) == 1  # the only layout that Hopper multiplies
            self.products.append((one.dtype, other.dtype, bias is not None))
        return made


def run(step, model, inputs, module, interpreter=fx.Interpreter):
    own = dict(model.named_parameters())
    values = {node.name: own[name].detach() for name, node in step.nodes.parameters.items()}
    values |= {node.name: one for node, one in zip(step.nodes.inputs, inputs, strict=True)}
    values |= {node.name: torch.ones(()) for node in step.nodes.tangents}
    holders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    runner = interpreter(module)
    return runner, runner.run(*(values[name] for name in holders), enable_io_processing=False)


def test_products_of_rounded_matrices_are_those_of_doubles(step):
    model, inputs, traced = step
    plain = copy.deepcopy(traced.module)
    narrowing = narrow(traced.module, Rules(eight=True))
    traced.module.graph.lint()
    checked, after = run(traced, model, inputs, traced.module, Checked)
    _, before = run(traced, model, inputs, plain)
    e5 = torch.float8_e5m2
    ahead = [bias for one, other, bias in checked.products if e5 not in (one, other)]
    back = [{one, other} for one, other, _ in checked.products if e5 in (one, other)]
    # Backward two products of the second layer and one of the first, whose inputs have no gradient.
    assert sorted(ahead) == [False, True] and back == 3 * [{torch.float8_e4m3fn, e5}]
    assert narrowing.eight == len(checked.products) == 5
    assert len(checked.rounded) == len({*checked.rounded})  # each tensor is rounded once
    for new, old in zip(after, before, strict=True):
        if old is not None:
            assert new.dtype == old.dtype
            assert (new - old).norm() <= 0.15 * old.norm()


def test_which_products_have_8_bits_and_why_not(step, monkeypatch):
    graph = step[2].module.graph
    lines = "\n".join(describe_bits(graph, Rules(eight=True)))
    assert "8 bits: a large product" in lines
    assert "16 bits: a product whose sizes are no multiples of 16" in lines
    groups = groups_of(graph, Rules(eight=True))
    assert {(group.few, group.bits, group.other) for group in groups.values() if group.product} == {
        (8, 8, 16), (16, 16, 32),
    }  # fmt: skip
    chosen = {name: 16 for name, group in groups.items() if group.few == 8}
    assert narrow(copy.deepcopy(step[2].module), Rules(eight=True, chosen=chosen)).eight == 0
    assert "its measured error in 8 bits" in "\n".join(describe_bits(graph, Rules(eight=True, chosen=chosen)))
    monkeypatch.setattr(eight_bits, "LEAST", 1024)
    assert "a product too small for 8 bits" in "\n".join(describe_bits(graph, Rules(eight=True)))


def test_tensors_of_zeros_and_of_nan(step):
    model, inputs, traced = step
    narrow(traced.module, Rules(eight=True))
    with torch.no_grad():
        model.up.weight.zero_()
    _, outputs = run(traced, model, inputs, traced.module)
    assert all(one.isfinite().all() for one in outputs if one is not None)
    with torch.no_grad():
        model.up.weight[0, 0] = float("nan")
    _, outputs = run(traced, model, inputs, traced.module)
    assert not all(one.isfinite().all() for one in outputs if one is not None)


def test_a_device_without_8_bits_and_a_contradiction_are_refused():
    for settings, message in (
        (Graph(dtype="bf16", fp8=True), "this CPU has no units for products of 8-bit floats"),
        (Graph(dtype="bf16", fp8=True, wide=("mm", "addmm")), "keeps all of these products in 32 bits"),
        (Graph(dtype="fp32", fp8=True), "needs a 16-bit type"),
    ):
        with pytest.raises(ConfigError, match=message):
            ss.compose(ss.Job(tiny(), optimizer=sgd()), [settings])


@pytest.mark.slow
def test_a_job_multiplies_8_bits_and_says_so(monkeypatch):
    monkeypatch.setattr(eight_bits, "LEAST", 1)
    monkeypatch.setattr(eight_bits, "lacks_eight_bits", lambda device: "")
    from shoestring.testing.jobs import batch

    with ss.compose(ss.Job(tiny(), optimizer=sgd()), [settings := Graph(dtype="bf16", fp8=True)]) as job:
        losses = [job.step(batch(number)).item() for number in range(3)]
        assert job.trace.facts["narrowed_products"] > 0
        assert "multiply 8 bits" in settings.reduction(job.trace).cost
    with ss.compose(ss.Job(tiny(), optimizer=sgd()), []) as job:
        plain = [job.step(batch(number)).item() for number in range(3)]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.1)
