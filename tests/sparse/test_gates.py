"""Fused activations are what torch computes, forward and backward, in both layouts; and where they are put in."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoestring._torch import fake_tensors
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.sparse.feed_forward import find, recognise
from shoestring.sparse.gates import ACTIVATIONS, FORMS, by_columns, gated, reference
from shoestring.sparse.layers import choose

OPERATOR = torch.ops.shoestring.gated.default


def given(form, rows=3, columns=2, dtype=torch.float64, columns_first=False):
    draw = torch.Generator().manual_seed(0)

    def tensor(width):
        x = torch.randn(rows, width, generator=draw, dtype=torch.float64).to(dtype)
        return (x.t().contiguous().t() if columns_first else x).requires_grad_()

    return tensor(2 * columns if form.startswith("gate") else columns), tensor(columns) if form == "apart" else None


def expected(x, other, activation, form):
    if form in ("alone", "apart"):
        return reference(x, activation) * (1 if other is None else other)
    gate, up = x.chunk(2, dim=1) if form == "gate_first" else reversed(x.chunk(2, dim=1))
    return reference(gate, activation) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(activation):
    for form in FORMS:
        for columns_first in (False, True):
            x, other = given(form, columns_first=columns_first)
            inputs = [x] if other is None else [x, other]
            y = gated(x, other, activation, form)
            assert by_columns(y) == columns_first
            torch.testing.assert_close(y, expected(x, other, activation, form), rtol=1e-13, atol=1e-14)
            assert torch.autograd.gradcheck(lambda x, o=None, f=form: gated(x, o, activation, f), inputs)
            of_x = torch.autograd.grad(y, x, torch.randn_like(y))[0]
            assert by_columns(of_x) == columns_first


@pytest.mark.parametrize("form", FORMS)
def test_the_operator_keeps_torchs_contract(form):
    for columns_first in (False, True):
        arguments = (*given(form, columns_first=columns_first), "silu", form)
        torch.library.opcheck(OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))


def test_bf16_is_rounded_once():
    x, other = given("apart", rows=64, columns=33, dtype=torch.bfloat16)
    y = gated(x, other, "gelu", "apart")
    wide = expected(x.double(), other.double(), "gelu", "apart")
    assert y.dtype == torch.bfloat16
    assert ((y.double() - wide).abs() <= 2**-8 * wide.abs() + 1e-12).all()


def test_any_number_of_dimensions():
    x, _ = given("gate_last", rows=6)
    y = gated(x.unflatten(0, (2, 3)), None, "silu", "gate_last")
    torch.testing.assert_close(y.flatten(0, 1), gated(x, None, "silu", "gate_last"))


class FeedForward(nn.Module):
    """With whatever is between its layers."""

    def __init__(self, between, first=1, width=8):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, width) for _ in range(first))
        self.last, self.between, self.dropout = nn.Linear(8, 8), between, nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.between(self, *(layer(x) for layer in self.first)))


def swiglu_halves(self, y):
    up, gate = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def scaled_in_place(self, y):
    y = F.silu(y)
    y.mul_(2)
    return y


KNOWN = {
    "squared relu": (FeedForward(lambda self, y: F.relu(y) ** 2), ("relu2", "alone", ("first.0",))),
    "another squared relu": (FeedForward(lambda self, y: F.relu(y).square()), ("relu2", "alone", ("first.0",))),
    "silu by parts": (FeedForward(lambda self, y: y * torch.sigmoid(y)), ("silu", "alone", ("first.0",))),
    "geglu": (FeedForward(lambda self, a, b: F.gelu(a) * b, 2), ("gelu", "apart", ("first.0", "first.1"))),
    "gate last": (FeedForward(lambda self, a, b: a * F.silu(b), 2), ("silu", "apart", ("first.1", "first.0"))),
    "halves": (FeedForward(swiglu_halves, width=16), ("silu", "gate_last", ("first.0",))),
    "dropout module": (FeedForward(lambda self, y: self.dropout(F.relu(y))), None),
    "dropout": (FeedForward(lambda self, y: F.dropout(F.relu(y), 0.1, self.training)), None),
    "clamp": (FeedForward(lambda self, y: F.silu(y.clamp(max=50))), None),
    "scale": (FeedForward(lambda self, y: F.silu(y) / 2), None),
    "sum": (FeedForward(lambda self, a, b: F.silu(a) * b + b, 2), None),
    "in place": (FeedForward(scaled_in_place), None),
    "branch": (FeedForward(lambda self, y: F.silu(y) if y.sum() > 0 else y), None),
    "layer between": (FeedForward(lambda self, y: self.first[0](y)), None),
    "linear": (nn.Linear(8, 8), None),
}


@pytest.mark.parametrize(("module", "found"), KNOWN.values(), ids=KNOWN)
def test_feed_forward_layers_are_known_by_what_they_compute(module, found):
    state = torch.get_rng_state()
    for training in (True, False):
        module.train(training)
        known = recognise(module)
        assert (known and (known.activation, known.form, known.first)) == found
        assert all(each.training == training for each in module.modules())
        if known:
            x = torch.linspace(-3, 3, 48).view(2, 3, 8)
            torch.testing.assert_close(known.forward()(x), module(x))
    assert torch.equal(state, torch.get_rng_state())


def test_of_our_gpt_all_are_found_and_none_with_a_dense_layer():
    model = GPT(GPTConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, context=16))
    layers = choose(model, (), rows_too=True).sparse
    names = ["blocks.0.mlp", "blocks.1.mlp"]
    assert {name: each.form for name, each in find(model, layers)} == dict.fromkeys(names, "gate_first")
    del layers["blocks.0.mlp.down"]
    assert [name for name, _ in find(model, layers)] == names[1:]


def test_they_are_found_among_fake_tensors_too():
    """The memory of a run is predicted without numbers, of which any would agree with any."""
    with fake_tensors():
        clamped = FeedForward(lambda self, a, b: F.silu(a.clamp(max=50)) * b, 2)
        plain = FeedForward(lambda self, a, b: F.silu(a) * b, 2)
        assert recognise(clamped) is None and recognise(plain).activation == "silu"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "activation", "form"), [
    ("Llama", "silu", "apart"), ("Gemma2", "gelu_tanh", "apart"), ("Phi3", "silu", "gate_first"),
    ("GPTNeoX", "gelu", "alone"),
])  # fmt: skip
def test_of_hugging_faces(model, activation, form):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = getattr(transformers, f"{model}Config")(**shape, num_attention_heads=4, pad_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        built = getattr(transformers, f"{model}ForCausalLM")(config)
    (found,) = find(built, choose(built, (), rows_too=True).sparse)
    assert (found[1].activation, found[1].form) == (activation, form)
