"""Products on sparse units: on the CPU others stand in for cuSPARSELt's operators; all around them runs as it is."""

import itertools

import pytest
import torch
from stand_ins import ALGORITHM, sparse_units
from torch import nn

import shoestring as ss
from shoestring.core.job import attachments_of
from shoestring.core.task import cross_entropy
from shoestring.memory.predicted import predict
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import AdamW
from shoestring.precision import Autocast
from shoestring.sparse import SRSTE, SSTE, TSRSTE, operands, semi_structured
from shoestring.sparse.masked import pruned_forms
from shoestring.sparse.masks import prune, row_mask, transposable_mask
from shoestring.sparse.mvue import draw_key, mvue
from shoestring.sparse.operands import SparseOperand
from shoestring.sparse.product import SparseUnits, pack, product


@pytest.fixture
def units():
    with sparse_units() as units:
        yield units


def operands_of(tokens=32, rows=48, columns=64, dtype=torch.bfloat16, mask=transposable_mask):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens // 2, columns, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(rows, columns, generator=draw).to(dtype)
    weight = prune(weight, mask(weight)).requires_grad_()
    return x, weight, torch.randn(2, tokens // 2, rows, generator=draw).to(dtype)


def as_it_is(weight, dtype, *, straight, transposed):
    return weight.to(dtype) if straight else None, weight.t().to(dtype).contiguous() if transposed else None


def results(along, key, given, compiled=False, operand=None, **layouts):
    x, weight, grad = given
    operand = operand or SparseOperand(as_it_is, both=along == 2)
    layer = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    y = layer(x, weight, None, key, units=SparseUnits(operand.number, **layouts))
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def near(one, other):
    return (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("along", "draws"), [(1, False), (2, False), (1, True), (2, True)])
def test_as_many_products_are_sparse_as_operands_are_and_give_what_dense_ones_give(units, along, draws, compiled):
    given = operands_of(mask=row_mask if along == 1 else transposable_mask)
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


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_results_come_by_columns_where_that_is_asked_for(units, monkeypatch, dense):
    monkeypatch.setattr(semi_structured, "WORTHWHILE", float("inf") if dense else 0.0)
    x, weight, grad = given = operands_of()
    y, of_x, _ = results(2, None, given, outputs_by_columns=True, inputs_by_columns=True)
    assert y.flatten(0, 1).stride() == of_x.flatten(0, 1).stride() == (1, 32)
    assert near(y, x @ weight.t()) and near(of_x, grad @ weight)


@pytest.mark.parametrize("name", ["expanded", "sliced", "by columns"])
def test_operands_of_any_layout_are_read_as_they_are(units, name):
    x, weight, grad = operands_of()
    if name == "expanded":  # as the gradient of a sum is
        grad = torch.ones((), dtype=grad.dtype).expand_as(grad)
    elif name == "sliced":
        grad, x = torch.cat([grad, grad], -1)[..., : grad.shape[-1]], torch.cat([x, x], -1)[..., : x.shape[-1]]
    else:
        grad, x = (each.flatten(0, 1).t().contiguous().t().unflatten(0, each.shape[:2]) for each in (grad, x))
    key = draw_key(0, torch.tensor(1))
    found = results(2, key, (x, weight, grad))
    assert all(trial.faster for trial in semi_structured.trials.values()) and len(semi_structured.trials) == 3
    of_weight = mvue(grad.flatten(0, 1), key).t() @ x.flatten(0, 1)
    for one, other in zip(found, [x @ weight.t(), grad @ weight, of_weight], strict=True):
        assert near(one, other)


def test_a_shape_is_tried_once(units):
    for _ in range(3):
        results(2, None, operands_of())
    assert len(semi_structured.trials) == 2
    assert {trial.algorithm for trial in semi_structured.trials.values()} <= {0, ALGORITHM}
    results(2, None, operands_of(tokens=64))
    assert len(semi_structured.trials) == 4


def test_where_dense_products_are_faster_they_are_taken(units, monkeypatch):
    monkeypatch.setattr(semi_structured, "WORTHWHILE", float("inf"))
    results(2, None, operands_of())
    before = units.products
    results(2, None, operands_of())
    assert units.products == before
    assert all(trial.speedup > 0 and not trial.faster for trial in semi_structured.trials.values())


def test_a_result_that_differs_from_the_dense_one_is_not_taken(units, caplog):
    units.wrong = True
    x, weight, _ = given = operands_of()
    assert near(results(1, None, given)[0], x @ weight.t())
    assert "products with a weight of 48 x 64 stay dense: cuSPARSELt's result differs" in caplog.text


def test_an_operand_that_is_not_two_of_four_is_noticed_in_its_trial(units):
    x, weight, grad = operands_of()
    with pytest.raises(AssertionError, match="not 2:4"):
        results(1, None, (x, torch.ones_like(weight).requires_grad_(), grad))


@pytest.mark.parametrize(("given", "fits"), [
    (operands_of(tokens=24), True), (operands_of(dtype=torch.float32), False), (operands_of(rows=40), False),
    (operands_of(columns=40), False),
], ids=["tokens", "fp32", "rows", "columns"])  # fmt: skip
def test_sizes_and_types_that_the_units_do_not_take_are_dense(units, given, fits):
    from shoestring.sparse.product import on_units

    x, weight, grad = given
    assert on_units(x, weight) == fits
    if fits:  # tokens are known when it runs
        found = results(2, draw_key(0, torch.tensor(1)), given)
        assert near(found[0], x @ weight.t()) and near(found[1], grad @ weight)
    assert not units.products


def step(operand, given, backward=True):
    x, weight, grad = given
    y = product(x, weight, None, units=SparseUnits(operand.number))
    if backward:
        y.backward(grad)
    return y.detach()


@pytest.mark.parametrize("size", [64, 128])
def test_a_weight_is_packed_once_after_each_change(units, size):
    x, weight, _ = given = operands_of(rows=size, columns=size)
    mask = pack(transposable_mask(weight.detach()))
    made = []

    def prune_counted(weight, dtype, **wanted):
        made.append(wanted)
        return pruned_forms(weight, mask, dtype, **wanted)

    operand = SparseOperand(prune_counted, both=True)
    step(operand, given)  # in which the trials are made
    operand.forget()
    made.clear()
    units.compressed = units.tiled = 0
    for _ in range(3):  # micro-batches
        step(operand, given)
    assert (units.tiled, units.compressed) == ((1, 0) if size == 128 else (0, 2))
    assert made == [{"straight": True, "transposed": size != 128}]
    with torch.no_grad():
        weight.mul_(2)  # an optimizer's step, or another's weights for an evaluation
        assert near(step(operand, given, backward=False), x @ weight.t())
    assert len(made) == 2


def test_a_layer_that_multiplies_densely_prunes_once(units, monkeypatch):
    monkeypatch.setattr(semi_structured, "WORTHWHILE", float("inf"))
    made = []

    def prune_counted(weight, dtype, **wanted):
        made.append(wanted)
        return as_it_is(weight, dtype, **wanted)

    operand = SparseOperand(prune_counted, both=True)
    step(operand, operands_of())
    operand.forget()
    made.clear()
    step(operand, operands_of())
    assert made == [{"straight": True, "transposed": False}]


def test_what_may_not_be_remembered_is_not(units):
    operand = SparseOperand(as_it_is, both=True, remembered=False)
    x, weight, _ = given = operands_of()
    step(operand, given)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)  # as FSDP gathers
    assert near(step(operand, given), x @ weight.t())


def test_operands_end_with_their_layers():
    number = SparseOperand(as_it_is, both=True).number
    assert number not in operands.operands


def test_torchs_tile_kernel_is_taken_where_it_packs_as_the_units_read(units):
    x, weight, grad = given = operands_of(rows=128, columns=128)
    units.wrong_tiles = True
    found = results(2, None, given)
    assert list(semi_structured.tiled.values()) == [False]
    assert near(found[0], x @ weight.t()) and near(found[1], grad @ weight)
    assert all(trial.faster for trial in semi_structured.trials.values())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})])

    def forward(self, x):
        return x + self.layers[0]["down"](torch.relu(self.layers[0]["up"](x)))


def squares(output, batch):
    return output.float().square().sum(), torch.tensor(output.numel())


@pytest.mark.parametrize(("feature", "products"), [
    (SSTE(), 2), (SSTE(mvue=True), 4), (SRSTE(), 2),
    (TSRSTE(refresh=1, calibrate=0.0, tail=0.0), 3),  # nobody asks for the gradient of the model's input
], ids=["sste", "sste-mvue", "srste", "tsrste"])  # fmt: skip
def test_a_job_computes_with_them_under_autocast(units, feature, products):
    job = ss.Job(Net(), forward=lambda model, batch: model(batch), loss=squares, optimizer=sgd, total=4)
    with ss.compose(job, [feature, Autocast(dtype="bf16")]) as job:
        counts = []
        for _ in range(3):
            job.step(torch.randn(32, 16))
            counts.append(units.products)
    assert [after - before for before, after in itertools.pairwise(counts)] == [products] * 2


def test_the_report_says_which_products_are_sparse_and_what_is_fused(units):
    job = ss.Job(Net(), forward=lambda model, batch: model(batch), loss=squares, optimizer=sgd, total=26)
    with ss.compose(job, [SRSTE(), Autocast(dtype="bf16")]) as job:
        for _ in range(26):
            job.step(torch.randn(32, 16) / 8)
        tables = {item.title: item for item in SRSTE().report_items(job.trace)}
    rows = tables["Products on sparse units"].rows
    assert sorted(row[0] for row in rows) == ["16 x 32, 32 columns", "32 x 16, 32 columns"]
    trials = {f"{trial.speedup:.2f}x" for trial in semi_structured.trials.values()}
    assert all(row[1] in trials and row[2] == "sparse" for row in rows)
    assert "of 0 feed-forward layers are fused" in tables["Products on sparse units"].note


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


def trained(feature, *others, steps=3, micro=2):
    """Losses and weights of a small GPT in bf16 by autocast, with its feed-forward layers sparse."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, hidden=48, context=16))
    job = ss.Job(model, optimizer=sgd, total=steps)
    with ss.compose(job, [feature, Autocast(dtype="bf16"), *others]) as job:
        losses = []
        for number in range(steps):
            draw = torch.Generator().manual_seed(number)
            tokens = torch.randint(64, (micro, 2, 16), generator=draw)
            batches = [{"inputs": each, "targets": each.roll(-1, 1)} for each in tokens]
            losses.append(float(job.step(*batches)))
        return losses, torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("feature", [
    TSRSTE(refresh=2, calibrate=0.0, tail=0.0, mvue=True), SSTE(), SSTE(simulate_fp8=True),
], ids=["tsrste-mvue", "sste", "sste-fp8"])  # fmt: skip
def test_a_model_learns_what_it_learns_by_dense_products(request, feature):
    expected_losses, expected = trained(feature)
    units = request.getfixturevalue("units")
    losses, weights = trained(feature)
    assert units.products > units.by_columns > 0
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    assert (weights - expected).norm() <= 2e-3 * expected.norm()


def test_a_weight_is_packed_once_a_step_of_several_micro_batches(units):
    feature = TSRSTE(refresh=2, calibrate=0.0, tail=0.0)
    trained(feature, steps=1)  # in which the trials are made
    counts = []
    for steps in (2, 3):
        units.compressed = 0
        trained(feature, steps=steps, micro=3)
        counts.append(units.compressed)
    assert counts[1] - counts[0] == 2 * 2 * 2  # W and Wᵀ of two layers in two blocks


@pytest.mark.parametrize(("feature", "bytes_a_weight"), [
    (TSRSTE(calibrate=0.0, tail=0.0), 2 * 9 / 8), (SRSTE(), 9 / 8 + 2),
], ids=["tsrste", "srste"])  # fmt: skip
def test_a_predicted_peak_counts_what_is_packed(units, monkeypatch, feature, bytes_a_weight):
    peaks = []
    for imagine in (SparseOperand.imagine, lambda *_: None):
        monkeypatch.setattr(SparseOperand, "imagine", imagine)
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=512, dim=64, layers=1, heads=2, kv_heads=2, hidden=128, context=16))
        features = [feature, AdamW(), Autocast(dtype="bf16")]
        peaks.append(predict(model, features, cross_entropy, (64, 16), ranks=1).peak)  # of activations, most of all
    assert peaks[0] - peaks[1] == pytest.approx(3 * 64 * 128 * bytes_a_weight, abs=128)


def gradients(compiled, tokens):
    """Loss and gradients of a small GPT whose feed-forward layers are sparse."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, hidden=48, context=16))
    feature = TSRSTE(refresh=2, calibrate=0.0, tail=0.0, mvue=True)
    with ss.compose(ss.Job(model, optimizer=sgd, total=4), [feature]) as job, torch.autocast("cpu", torch.bfloat16):
        forward = (
            torch.compile(attachments_of(job).module, backend="aot_eager", fullgraph=True)
            if compiled
            else attachments_of(job).module
        )
        loss = forward(tokens).float().square().mean()
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters())]


@pytest.mark.slow
def test_a_compiled_model_has_no_break(units):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = gradients(False, tokens)
    before = units.by_columns
    found = gradients(True, tokens)
    assert units.by_columns > before
    assert all(near(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["times_weight_24", "times_24", "mvue_by_columns"])
def test_the_operators_keep_torchs_contract(units, name):
    x, weight, grad = operands_of()
    x, weight, grad = x.detach().flatten(0, 1), weight.detach(), grad.flatten(0, 1)
    operand = SparseOperand(as_it_is, both=True)
    given = {
        "times_weight_24": [
            (grad if transposed else x, weight, operand.number, transposed, by_columns)
            for transposed in (False, True)
            for by_columns in (False, True)
        ],
        "times_24": [(weight, x.t().contiguous()), (weight, x.t())],
        "mvue_by_columns": [(x, draw_key(0, torch.tensor(1)), 0), (x.t(), draw_key(0, torch.tensor(1)), 3)],
    }
    for arguments in given[name]:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.shoestring, name).default, arguments, test_utils=tests)
