"""Products of several matrices are found where another order takes fewer operations, and only there."""

import importlib.util
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.profile import profiled
from shoestring.profile.analyses import association
from shoestring.profile.analyses.association import _cheapest, costly_orders
from shoestring.profile.analyses.reading import Reading

HEAD = "import torch\nimport torch.nn.functional as F\n\n\ndef work(a, x, q, k, v, w, u, d):\n"
LINE = HEAD.count("\n") + 1


def findings(folder, body):
    """Of a function with this body that is called four times."""
    source = HEAD + textwrap.indent(body, "    ") + "\n"
    path = folder / "program.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    torch.manual_seed(0)
    given = {
        "a": torch.randn(300, 300),
        "x": torch.randn(300, 8, requires_grad=True),
        "q": torch.randn(4, 256, 16),
        "k": torch.randn(4, 256, 16),
        "v": torch.randn(4, 256, 16),
        "w": torch.randn(400, 300),
        "u": torch.randn(400, 4, requires_grad=True),
        "d": torch.randn(4, 300, requires_grad=True),
    }

    with profiled() as recording:
        for _ in range(4):
            result = program.work(**given)
            if result.requires_grad:
                result.sum().backward()
    return [*costly_orders(Reading(recording.profile))]


@pytest.fixture(autouse=True)
def of_any_gain(monkeypatch):
    """The shares of such short programs' time are not the same each time."""
    monkeypatch.setattr(association, "SAVES", 0.0)


COSTLY = {
    "twice": ("return a @ a @ x", 1, "a @ (a @ x)"),
    "by functions": ("return torch.mm(torch.matmul(a, a), x)", 1, "a @ (a @ x)"),
    "by a method": ("return a.mm(a).mm(x)", 1, "a @ (a @ x)"),
    "kept": ("h = a @ a\ny = h @ x\nreturn y", 1, "a @ (a @ x)"),
    "transposed": ("return (a @ a).T @ x", 1, "a.mT @ (a.mT @ x)"),
    "from the left": ("return x.T @ (a @ a)", 1, "x.mT @ a) @ a"),
    "a vector": ("return a @ a @ x[:, 0]", 1, "a @ (a @ x[:, 0])"),
    "four factors": ("h = a @ a\ng = h @ a\nreturn g @ x", None, "a @ (a @ (a @ x))"),
    "linear attention": ("return (q @ k.mT) @ v", 1, "q @ (k.mT @ v)"),
    "scaled": ("return (q @ k.transpose(1, 2) / 256) @ v", 1, "order q @ (k.mT @ v)"),
    "low rank": ("return F.linear(x.T, u @ d)", 1, "x.mT @ d.mT) @ u.mT"),
    "a change": ("return F.linear(x.T, w + u @ d)", 1, "u @ d has a rank of 4"),
    "a change on one line": ("return x.T @ (w + u @ d).T", 1, "u @ d has a rank of 4"),
    "a scaled change, kept": ("m = w + 0.5 * (u @ d)\nreturn x.T @ m.T", 1, "has a rank of 4"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_order_is_found_with_one_that_is_cheaper(tmp_path, name):
    body, line, said = COSTLY[name]
    (finding,) = findings(tmp_path, body)
    assert line is None or finding.line == LINE + line - 1
    assert said in finding.advice
    assert finding.expected > 0


CHEAP = {
    "the other order": "return a @ (a @ x)",
    "a nonlinear function between": "return torch.softmax(q @ k.mT, -1) @ v",
    "a mask between": "mask = torch.ones(256, 256).tril()\nreturn (q @ k.mT * mask) @ v",
    "used twice": "h = a @ a\nreturn h @ x + h.sum()",
    "two products": "return (a @ x) + (a @ x)",
    "a change for many rows": "return F.linear(a, w + u @ d)",
    "equal sizes": "return a @ a @ a",
}


@pytest.mark.parametrize("name", CHEAP)
def test_other_products_are_left_alone(tmp_path, name):
    assert findings(tmp_path, CHEAP[name]) == []


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_no_order_is_cheaper_than_the_cheapest(dims):
    names = [f"m{number}" for number in range(len(dims) - 1)]
    operations, text = _cheapest(tuple(dims), tuple(names))
    assert operations == min(orders(dims))
    given = {name: np.random.default_rng(0).random(dims[at : at + 2]) for at, name in enumerate(names)}
    product = given[names[0]]
    for name in names[1:]:
        product = product @ given[name]
    assert np.allclose(eval(text, given), product)  # noqa: S307


def orders(dims):
    """Half the operations of each order in which two neighbours are multiplied until one matrix is left."""
    if len(dims) == 2:
        return {0}
    return {
        dims[at - 1] * dims[at] * dims[at + 1] + rest
        for at in range(1, len(dims) - 1)
        for rest in orders(dims[:at] + dims[at + 1 :])
    }
