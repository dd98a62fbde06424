"""Formulas are known by what they compute, however they are spelt, and nothing else is taken for them."""

import ast
import inspect
import textwrap

import pytest
import torch
import torch._decomp.decompositions
import torch._refs
import torch._refs.nn.functional
import torch.nn.functional as F

from shoestring.profile.analyses.formulas import KNOWN, KNOWN_OF_TWO, spelt_out
from shoestring.profile.analyses.statements import Text


def found(source):
    text = Text.of(textwrap.dedent(source))
    return [
        formula
        for scope in ast.walk(text.module)
        if isinstance(scope, ast.FunctionDef)
        for formula in spelt_out(text, scope)
    ]


def instead(source):
    return [formula.instead for formula in found(source)]


SPELT = {
    "swish": ("x / (1 + torch.exp(-x))", "F.silu"),
    "gate": ("torch.sigmoid(x) * x", "F.silu"),
    "gelu": ("x * 0.5 * (1 + torch.erf(x / 2 ** 0.5))", "F.gelu"),
    "gelu by tanh": (
        "x * (torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x.pow(3))) + 1) / 2",
        "F.gelu(x, approximate='tanh')",
    ),
    "elu": ("torch.where(x > 0, x, torch.exp(x) - 1)", "F.elu"),
    "elu by clamping": ("x.clamp(min=0) + x.clamp(max=0).expm1()", "F.elu"),
    "selu": ("1.0507 * torch.where(x > 0, x, 1.67326 * (x.exp() - 1))", "F.selu"),
    "leaky": ("torch.maximum(x, 0.2 * x)", "F.leaky_relu"),
    "leaky by mask": ("x * (x > 0) + 0.01 * x * (x <= 0)", "F.leaky_relu"),
    "stable softplus": ("torch.relu(x) + torch.log1p(torch.exp(-x.abs()))", "F.softplus"),
    "hard": ("x * F.relu6(x + 3) / 6", "F.hardswish"),
    "hard by clamping": ("x * torch.clamp(x + 3, 0, 6) / 6", "F.hardswish"),
    "softmax": ("torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)", "torch.softmax"),
    "log softmax": ("x - x.exp().sum(1, keepdim=True).log()", "F.cross_entropy or F.log_softmax"),
    "layer norm": (
        "(x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + self.eps).sqrt()",
        "F.layer_norm (or F.group_norm)",
    ),
    "layer norm by moments": (
        "(x - x.mean(-1)) * torch.rsqrt((x * x).mean(-1) - x.mean(-1) ** 2 + 1e-5)",
        "F.layer_norm (or F.group_norm)",
    ),
    "rms": ("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight", "F.rms_norm"),
    "rms by norm": ("x / (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5)", "F.rms_norm"),
    "logistic loss": ("torch.clamp(x, min=0) - x * y + torch.log1p(torch.exp(-torch.abs(x)))",
                      "F.binary_cross_entropy_with_logits"),
    "soft targets": ("-(y * F.log_softmax(x, dim=-1)).sum(-1).mean()", "F.cross_entropy"),
    "huber": (
        "torch.where((x - y).abs() < 1, 0.5 * (x - y) ** 2, (x - y).abs() - 0.5)", "F.huber_loss or F.smooth_l1_loss"
    ),
    "huber of 2": ("torch.where((x - y).abs() < 2, (x - y) ** 2 / 2, 2 * (x - y).abs() - 2)",
                   "F.huber_loss or F.smooth_l1_loss"),
    "smooth l1": ("torch.where((x - y).abs() < 0.5, (x - y) ** 2, (x - y).abs() - 0.25)",
                  "F.huber_loss or F.smooth_l1_loss"),
    "by zeros": ("torch.maximum(x, torch.zeros_like(x)) + 0.1 * torch.minimum(x, torch.zeros_like(x))", "F.leaky_relu"),
    "folded batch norm": (
        "x * (w := self.scale * (self.var + 1e-3).rsqrt()) + (self.shift - self.mean * w)", "F.batch_norm"
    ),
    "batch norm": ("(x - self.mean) / torch.sqrt(self.var + 1e-5) * self.scale + self.shift", "F.batch_norm"),
    "within what is not known": ("(x * x.sigmoid()).cumsum(0)", "F.silu"),
    # What looks like them and is not.
    "another gate": ("y * torch.sigmoid(x)", None),
    "quick gelu": ("x * torch.sigmoid(1.702 * x)", None),
    "another constant": ("0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * x ** 3)))", None),
    "unbiased spread": ("(x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)", None),
    "given statistics": ("(x - y) / z", None),
    "divided by its sum": ("x / x.sum(-1, keepdim=True)", None),
    "two dimensions": ("x.exp() / x.exp().sum(1, keepdim=True).mean(0, keepdim=True)", None),
    "squared error": ("0.5 * (x - y) ** 2", None),
    "limited to one": ("max(0, min(1, x + 3))", None),
    "absolute error": ("(x - y).abs() - 0.1", None),
    "limited norm": ("x * (1 / (x.norm() + 1e-6)).clamp(max=1)", None),
    "covariance": ("((x - x.mean(1, keepdim=True)) * (y - y.mean(1, keepdim=True))).sum(1)", None),
    "distances": ("(x - x.T).square().sum(-1).sqrt()", None),
    "unknown in between": ("x * torch.sigmoid(self.layer(x))", None),
}  # fmt: skip


@pytest.mark.parametrize(("expression", "name"), SPELT.values(), ids=SPELT)
def test_a_formula_is_known_by_what_it_computes(expression, name):
    assert instead(f"def f(self, x, y, z, eps=1e-6):\n    return {expression}\n") == [name] * (name is not None)


def test_statements_carry_a_formula_to_its_end():
    (formula,) = found("""
        EPS = 1e-5
        def norm(x, weight):
            n, c = x.shape
            grouped = x.view(n, 8, -1).float()
            centered = grouped - grouped.mean(2, keepdim=True)
            spread = centered.square().mean(2, keepdim=True)
            centered /= (spread + EPS).sqrt()
            return centered.view(n, c).to(x.dtype) * weight.view(1, -1)
    """)
    assert formula.instead.startswith("F.layer_norm")
    assert formula.lines == {6, 7, 8, 9}
    assert formula.has("mean", 6)
    assert not formula.has("mean", 9)


def test_what_a_loop_or_a_branch_may_have_changed_is_not_taken_for_known():
    source = """
        def f(x, y):
            gate = torch.sigmoid(x)
            {}
            return gate * x
    """
    assert instead(source.format("pass")) == ["F.silu"]
    assert instead(source.format("gate = gate.roll(1)")) == []
    assert instead(source.format("for _ in y: gate = gate.roll(1)")) == []
    assert instead(source.format("x = x + 1 if y else x")) == []


def test_names_take_several_values_and_new_ones_in_place_and_where_a_mask_says_so():
    assert instead("""
        def f(x, gate):
            mean, spread = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
            x = (x - mean) / (spread + 1e-5).sqrt()
            return x * gate.sigmoid()
    """) == ["F.layer_norm (or F.group_norm)"]
    assert instead("""
        def f(x):
            gate = torch.sigmoid(x)
            gate.mul_(x)
            return gate + 1
    """) == ["F.silu"]
    assert (
        instead("""
        class Gate:
            def active(self, x):
                return x * (1 + 10**400) * 0 + x.max(0)[0] / torch.max(torch.tensor(2.0), 2)
    """)
        == []
    )
    assert instead("def f(x):\n    y = x.clone()\n    y[x < 0] *= 0.1\n    return y\n") == ["F.leaky_relu"]
    for unknown in ("spread, mean = torch.var_mean(x, dim=-1)", "x[x < 0] = 0.1 * x[x < 0]"):
        assert instead(f"def f(x, mean, spread):\n    {unknown}\n    return (x - mean) * torch.rsqrt(spread)\n") == []
    assert instead("def f(x):\n    y = x.clone()\n    y[x < 0] = 0.1 * x[x < 1]\n    return y\n") == []
    assert instead("def f(x, i):\n    y = torch.sigmoid(x)\n    y[i] = 0.1\n    return y * x\n") == []


def test_what_a_class_sets_to_a_number_is_that_number():
    source = """
        class Activation(nn.Module):
            def __init__(self, alpha={}):
                super().__init__()
                self.alpha, self.layer = alpha, nn.Linear(2, 2)
            def forward(self, x):
                return torch.where(x > 0, x, self.alpha * (torch.exp(x) - 1))
    """
    assert instead(source.format("1.0")) == ["F.elu"]
    assert instead(source.format("2.0")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "expression", ["torch.clamp(input=x, min=0)", "clamp_all()", "x.sum({[]: 1})", " + ".join(["x"] * 600)]
)
def test_what_is_written_otherwise_is_no_formula_and_no_error(expression):
    assert instead(f"def f(x):\n    return {expression}\n") == []
    assert Text.of("+".join("x" * 5000)) is None


REAL = {
    torch._refs.nn.functional: {
        "elu": "F.elu", "hardsigmoid": "F.hardsigmoid", "leaky_relu": "F.leaky_relu", "mish": "F.mish",
        "selu": "F.selu", "softplus": "F.softplus", "smooth_l1_loss": "F.huber_loss or F.smooth_l1_loss",
        "huber_loss": "F.huber_loss or F.smooth_l1_loss", "gelu": "F.gelu",
    },
    torch._decomp.decompositions: {
        "hardsigmoid": "F.hardsigmoid", "hardswish": "F.hardswish", "silu": "F.silu", "mish_backward": "F.silu",
        "smooth_l1_loss": "F.huber_loss or F.smooth_l1_loss", "soft_margin_loss": "F.softplus",
        "_softmax": "torch.softmax", "_log_softmax": "F.cross_entropy or F.log_softmax",
        "log_sigmoid_forward": "F.logsigmoid", "binary_cross_entropy": "F.binary_cross_entropy",
        "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", REAL, ids=lambda module: module.__name__)
def test_in_torchs_own_references_formulas_are_found_under_their_names_and_no_others(module):
    text = Text.of(inspect.getsource(module))
    functions = [node for node in ast.walk(text.module) if isinstance(node, ast.FunctionDef)]
    names = {node.name: formula.instead for node in functions for formula in spelt_out(text, node)}
    assert {name: said.partition("(x")[0] for name, said in names.items()} == REAL[module]


TORCH = {
    "F.gelu(x, approximate='tanh')": lambda x: F.gelu(x, approximate="tanh"),
    "F.layer_norm (or F.group_norm)": lambda x: F.layer_norm(x, (7,), eps=0.0),
    "F.rms_norm": lambda x: F.rms_norm(x, (7,), eps=0.0),
    "torch.softmax": lambda x: x.softmax(-1),
    "F.cross_entropy or F.log_softmax": lambda x: x.log_softmax(-1),
    "torch.logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "torch.sigmoid": torch.sigmoid,
    "F.binary_cross_entropy_with_logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
    "F.binary_cross_entropy": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, reduction="none"),
    "F.cross_entropy": lambda x, t: F.cross_entropy(x, t, reduction="none")[:, None],
    "torch.softmax, after masked_fill": lambda x, t: x.masked_fill(t == 0, -torch.inf).softmax(-1),
}


@pytest.mark.parametrize(
    "known", [known for known in (*KNOWN, *KNOWN_OF_TWO) if not known.fits], ids=lambda k: k.instead
)
def test_what_a_formula_is_compared_with_is_what_torch_computes(known):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    wanted = (torch.rand(5, 7, dtype=torch.float64, generator=generator) < 0.5).double()
    given = (x,) if known in KNOWN else (x, wanted)
    if known in KNOWN_OF_TWO and known.instead in ("F.layer_norm (or F.group_norm)", "F.rms_norm"):
        theirs = TORCH[known.instead](x) * wanted
    else:
        theirs = TORCH.get(known.instead, getattr(F, known.instead.removeprefix("F."), None))(*given)
    arrays = [each.numpy() for each in given]
    if known.instead == "F.binary_cross_entropy":
        arrays[0] = x.sigmoid().numpy()
    mine = known.compute(*arrays, *([(1,)] if known.axes else []))
    torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss])
@pytest.mark.parametrize("constant", [0.3, 1.0, 2.0])
def test_the_constant_of_a_loss_is_what_its_values_have(loss, constant):
    x, target = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = loss(x, target, reduction="none", **{"delta" if loss is F.huber_loss else "beta": constant})
    (known,) = [known for known in KNOWN_OF_TWO if known.fits]
    mine = known.compute(x.numpy(), target.numpy(), theirs.numpy())
    torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-9, atol=1e-9)
