"""Products on sparse units: on the CPU others stand in for cuSPARSELt's operators; all around them runs as it is."""

import itertools

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.precision import Autocast
from shoestring.sparse import SSTE, TSRSTE, semi_structured
from shoestring.sparse.masks import prune, row_mask, transposable_mask
from shoestring.sparse.mvue import draw_key, mvue
from shoestring.sparse.product import product

ALGORITHM = 7  # what the search finds here


class CuSparseLt:
    """Values and places in one matrix, as compressed operands are opaque; counts what it does."""

    def __init__(self, library):
        self.compressed, self.products, self.wrong = 0, 0, False
        library.impl("_cslt_compress", self.compress, "CPU")
        library.impl("_cslt_sparse_mm", self.multiply, "CPU")
        library.impl("_cslt_sparse_mm_search", self.search, "CPU")

    def compress(self, sparse):
        assert sparse.is_contiguous() and sparse.shape[0] % 16 == sparse.shape[1] % 16 == 0
        groups = sparse.unflatten(1, (-1, 4))
        assert (groups != 0).sum(-1).max() <= 2, "not 2:4"
        places = torch.sort((groups != 0).to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :2]
        self.compressed += 1
        return torch.cat([groups.gather(-1, places).flatten(1), places.flatten(1).to(sparse.dtype)], 1)

    def search(self, packed, other, bias=None, alpha=None, out_dtype=None, transpose_result=False):
        return ALGORITHM

    def multiply(
        self, packed, other, bias=None, alpha=None, out_dtype=None, transpose_result=False,
        alg_id=0, split_k=1, split_k_mode=-1,
    ):  # fmt: skip
        assert alg_id == ALGORITHM and other.shape[1] % 16 == 0
        values, places = packed.unflatten(1, (2, -1, 2)).unbind(1)
        groups = values.new_zeros(*values.shape[:2], 4).scatter_(-1, places.long(), values)
        result = groups.flatten(1) @ other * (1.5 if self.wrong else 1.0)
        self.products += 1
        return result.t().contiguous() if transpose_result else result


@pytest.fixture
def units(monkeypatch):
    monkeypatch.setattr(semi_structured, "available", lambda device: True)
    monkeypatch.setattr(semi_structured, "WORTHWHILE", 0.0)
    monkeypatch.setattr(semi_structured, "RUNS", 1)
    monkeypatch.setattr(semi_structured, "trials", {})
    library = torch.library.Library("aten", "IMPL")
    yield CuSparseLt(library)
    library._destroy()


def operands(tokens=32, rows=48, columns=64, dtype=torch.bfloat16, mask=transposable_mask):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens // 2, columns, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(rows, columns, generator=draw).to(dtype)
    weight = prune(weight, mask(weight)).requires_grad_()
    return x, weight, torch.randn(2, tokens // 2, rows, generator=draw).to(dtype)


def results(along, key, given, compiled=False):
    x, weight, grad = given
    layer = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    y = layer(x, weight, None, key, sparse_along=along)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def near(one, other):
    return (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("along", "draws"), [(1, False), (2, False), (1, True), (2, True)])
def test_as_many_products_are_sparse_as_operands_are_and_give_what_dense_ones_give(units, along, draws, compiled):
    given = operands(mask=row_mask if along == 1 else transposable_mask)
    key = draw_key(0, torch.tensor(1)) if draws else None
    x, weight, grad = given
    results(along, key, given, compiled)  # in which the trials are made
    before = units.products
    found = results(along, key, given, compiled)
    assert units.products - before == along + draws
    wanted = grad.flatten(0, 1)
    of_weight = (mvue(wanted, key) if draws else wanted).t() @ x.flatten(0, 1)
    for one, other in zip(found, [x @ weight.t(), grad @ weight, of_weight], strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and near(one, other)


def test_a_shape_is_tried_once(units):
    for _ in range(3):
        results(2, None, operands())
    assert [trial.algorithm for trial in semi_structured.trials.values()] == [ALGORITHM] * 2
    results(2, None, operands(tokens=64))
    assert len(semi_structured.trials) == 4


def test_where_dense_products_are_faster_they_are_taken(units, monkeypatch):
    monkeypatch.setattr(semi_structured, "WORTHWHILE", float("inf"))
    results(2, None, operands())
    before = units.products
    results(2, None, operands())
    assert units.products == before
    assert all(trial.speedup > 0 and not trial.faster for trial in semi_structured.trials.values())


def test_a_result_that_differs_from_the_dense_one_is_not_taken(units, caplog):
    units.wrong = True
    x, weight, _ = given = operands()
    assert near(results(1, None, given)[0], x @ weight.t())
    assert "products with a weight of 48 x 64 stay dense: cuSPARSELt's result differs" in caplog.text


def test_an_operand_that_is_not_two_of_four_is_noticed_in_its_trial(units):
    x, weight, _ = operands()
    with pytest.raises(AssertionError, match="not 2:4"):
        product(x, torch.ones_like(weight), None, sparse_along=1)


@pytest.mark.parametrize(("given", "sparse"), [
    (operands(tokens=24), 0),
    (operands(dtype=torch.float32), 0),
    (operands(rows=40), 0),
    (operands(columns=40), 0),
], ids=["tokens", "fp32", "rows", "columns"])  # fmt: skip
def test_sizes_and_types_that_the_units_do_not_take_are_dense(units, given, sparse):
    x, weight, grad = given
    key = draw_key(0, torch.tensor(1))
    results(2, key, given)
    before = units.products
    found = results(2, key, given)
    assert near(found[0], x @ weight.t()) and near(found[1], grad @ weight)
    assert units.products - before == sparse


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})])

    def forward(self, x):
        return x + self.layers[0]["down"](torch.relu(self.layers[0]["up"](x)))


def squares(output, batch):
    return output.float().square().sum(), torch.tensor(output.numel())


@pytest.mark.parametrize(("feature", "products"), [
    (SSTE(), 2), (SSTE(mvue=True), 4), (TSRSTE(refresh=1, calibrate=0.0, tail=0.0), 4),
], ids=["sste", "sste-mvue", "tsrste"])  # fmt: skip
def test_a_job_computes_with_them_under_autocast(units, feature, products):
    job = ss.Job(Net(), forward=lambda model, batch: model(batch), loss=squares, optimizer=sgd, total=4)
    with ss.compose(job, [feature, Autocast(dtype="bf16")]) as job:
        counts = []
        for _ in range(3):
            job.step(torch.randn(32, 16))
            counts.append(units.products)
    assert [after - before for before, after in itertools.pairwise(counts)] == [products] * 2


def test_while_rows_train_dense_and_in_the_tail_no_product_is_sparse(units):
    feature = TSRSTE(refresh=1, calibrate=0.4, tail=0.2)
    job = ss.Job(Net(), forward=lambda model, batch: model(batch), loss=squares, optimizer=sgd, total=10)
    with ss.compose(job, [feature, Autocast(dtype="bf16")]) as job:
        counts = [0]
        for _ in range(10):
            job.step(torch.randn(32, 16))
            counts.append(units.products)
    sparse = [after > before for before, after in itertools.pairwise(counts)]
    assert sparse == [False] * 4 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("name", ["times_transposed_24", "times_24"])
def test_the_operators_keep_torchs_contract(units, name):
    x, weight, _ = operands()
    given = (x.detach().flatten(0, 1), weight.detach())
    if name == "times_24":
        given = (weight.detach(), x.detach().flatten(0, 1).t().contiguous())
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.shoestring, name).default, given, test_utils=tests)
