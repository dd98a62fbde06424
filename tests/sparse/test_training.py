"""What sparse layers compute and learn, against the formulas of the papers in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.core.compose import attach
from shoestring.core.errors import ConfigError
from shoestring.core.feature import export_weights
from shoestring.core.job import attachments_of
from shoestring.optim import Clip
from shoestring.sparse import AST, SRSTE, SSTE, STE, TSRSTE, masks
from shoestring.sparse.mvue import draw_key, mvue
from shoestring.sparse.product import Product, pack, rounded, shrink, unpack
from shoestring.sparse.soft import least_squares_scale


class Net(nn.Module):
    def __init__(self, width=16, hidden=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)})])

    def forward(self, x):
        block = self.layers[0]
        return x + block["down"](torch.relu(block["up"](x)))


def net():
    torch.manual_seed(0)
    return Net().double()


def batch(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 16, dtype=torch.float64, generator=generator)


def squares(output, batch):
    return output.square().sum(), torch.tensor(output.numel())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def job(feature, *others, total=0, model=None):
    made = ss.Job(model or net(), forward=lambda model, batch: model(batch), loss=squares, optimizer=sgd, total=total)
    return ss.compose(made, [feature, *others])


def weights(job):
    return {name: tensor.detach().clone() for name, tensor in attachments_of(job).module.named_parameters()}


def leaving(job):
    kept = {name: each.state.state_dict() for name, each in job.kept.items()}
    return export_weights(attachments_of(job).features, weights(job), kept)


# -- S-STE ------------------------------------------------------------------------------------------------------------


def test_the_soft_threshold():
    shrunk = shrink(torch.tensor([[3.0, -1, 2, 0.5, 0, 0, 0, -4, 1, 1, 1, 1]]))
    assert shrunk.tolist() == [[2, 0, 1, 0, 0, 0, 0, -4, 0, 0, 0, 0]]


def test_what_is_left_is_2_4_and_of_the_two_largest():
    weight = torch.randn(64, 64, dtype=torch.float64)
    shrunk = masks.require_2_4(shrink(weight))
    assert torch.equal(shrunk != 0, masks.row_mask(weight))
    third = weight.abs().view(-1, 4).sort(1).values[:, 1:2]
    assert torch.equal(shrunk.view(-1, 4), weight.view(-1, 4).sign() * (weight.abs().view(-1, 4) - third).clamp_min(0))


def steepest(change, weight, direction, steps=4096):
    """The largest step of what `change` makes of weights on a line, over the length of the weights' step."""
    at = torch.linspace(-1, 1, steps, dtype=torch.float64)[:, None]
    values = change(weight + at * direction)
    return float((values.diff(dim=0).norm(dim=1) / (direction.norm() * (at[1] - at[0]))).max())


def test_it_is_continuous_where_the_hard_mask_jumps():
    """Along random lines, S-STE's step shrinks with the step of the weights (it is Lipschitz); the mask's does not."""
    for seed in range(32):
        weight, direction = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert steepest(shrink, weight, direction) < 3
        assert steepest(shrink, weight, direction, 65536) < 3
    hard = [
        steepest(lambda w: w * masks.row_mask(w), *torch.randn(2, 8, dtype=torch.float64, generator=generator), 65536)
        for generator in (torch.Generator().manual_seed(seed) for seed in range(32))
    ]
    assert max(hard) > 1000


def test_the_scale_is_the_least_squares_optimum():
    weight = torch.randn(1024, 1024, dtype=torch.float64)
    scale = least_squares_scale(weight)

    def error(scale):
        return float((weight - scale * shrink(weight)).square().sum())

    assert error(scale) < min(error(scale * 1.001), error(scale * 0.999))
    assert float(scale) == pytest.approx(1.484, abs=0.02)
    assert error(scale) / float(weight.square().sum()) == pytest.approx(0.258, abs=5e-3)
    assert least_squares_scale(torch.zeros(4, 4)) == 1


def test_s_ste_computes_and_learns_as_its_paper_says():
    with job(SSTE()) as made:
        before = weights(made)
        scale = {name: least_squares_scale(before[f"layers.0.{name}.weight"]) for name in ("up", "down")}
        used = {name: value.clone().requires_grad_() for name, value in before.items()}
        sparse = {
            name: (scale[name] * shrink(used[f"layers.0.{name}.weight"])).detach().requires_grad_()
            for name in ("up", "down")
        }
        x = batch()
        hidden = torch.relu(F.linear(x, sparse["up"], used["layers.0.up.bias"]))
        output = x + F.linear(hidden, sparse["down"], used["layers.0.down.bias"])
        loss = output.square().mean()
        loss.backward()
        torch.testing.assert_close(made.step(x).double(), loss, rtol=1e-6, atol=0)
        for name, layer in sparse.items():
            expected = before[f"layers.0.{name}.weight"] - 0.1 * layer.grad
            torch.testing.assert_close(weights(made)[f"layers.0.{name}.weight"], expected)
        made.step(x)
        for name in ("up", "down"):  # the scale stays that of the start
            expected = scale[name] * shrink(weights(made)[f"layers.0.{name}.weight"])
            torch.testing.assert_close(leaving(made)[f"layers.0.{name}.weight"], expected)


# -- products ---------------------------------------------------------------------------------------------------------


def test_draws_change_the_gradient_of_the_weight_alone():
    x, weight = torch.randn(12, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    grad = torch.randn(12, 4)
    key = draw_key(0, torch.tensor(1))
    Product.apply(x, weight, key, 3, False).backward(grad)
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(weight.grad, mvue(grad, key, first=3).t() @ x)


def test_every_forward_pass_draws_anew():
    """Also of the same batch and weights: else the noise of accumulated gradients would add up."""
    with job(SSTE(mvue=True)) as made:
        gradients = []
        for _ in range(2):
            made.model(batch()).square().sum().backward()
            gradients.append(attachments_of(made).module.layers[0]["down"].weight.grad.clone())
            made.optimizer.zero_grad()
        assert not torch.equal(*gradients)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("feature", [SSTE, TSRSTE, SRSTE, STE])
def test_a_token_that_alone_counts_among_four_is_kept_as_it_is(feature, place):
    """By a mask of the loss, on the answer of a chat for example; then nothing is left to chance."""
    gradients = []
    for draws in (False, True):
        with job(feature(mvue=draws)) as made:
            made.model(batch())[place::4].square().sum().backward()
            gradients.append([each.grad.clone() for each in attachments_of(made).module.parameters()])
    for exact, drawn in zip(*gradients, strict=True):
        torch.testing.assert_close(drawn, exact)


def test_rounding_to_8_bits():
    x = torch.randn(64, 64)
    for to, steps in ((torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)):
        error = (rounded(x, to) - x).abs() / x.abs().clamp_min(x.abs().max() / 448)
        assert 0 < float(error.max()) <= 2.0 ** -(steps + 1) * 1.001
    assert torch.equal(rounded(torch.zeros(4), torch.float8_e5m2), torch.zeros(4))
    assert rounded(x * 1e-30, torch.float8_e4m3fn).isfinite().all()


@pytest.mark.parametrize("columns", [4, 12, 64])
def test_packed_masks(columns):
    mask = torch.rand(8, columns) < 0.5
    packed = pack(mask)
    assert packed.shape == (8, -(-columns // 8))
    assert torch.equal(unpack(packed, columns), mask)


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "mask"),
    [
        (STE(), masks.row_mask),
        (STE(mask="transposable"), masks.transposable_mask),
        (STE(mask="greedy"), masks.greedy_mask),
        (STE(mask="torch_default"), masks.torch_default_mask),
        (SRSTE(), masks.row_mask),
        (TSRSTE(calibrate=0.0, tail=0.0), masks.transposable_mask),
        (TSRSTE(norm="l2"), lambda weight: masks.transposable_mask(weight, norm="l2")),
    ],
    ids=["rows", "transposable", "greedy", "torch_default", "srste", "tsrste", "tsrste-l2"],
)
def test_layers_compute_with_masked_weights(feature, mask):
    with job(feature) as made:
        expected = dict(weights(made))
        for name in ("layers.0.up.weight", "layers.0.down.weight"):
            expected[name] = masks.prune(expected[name], mask(expected[name]))
        plain = net()
        plain.load_state_dict(expected)
        assert torch.equal(made.model(batch()), plain(batch()))
        assert all(torch.equal(leaving(made)[name], expected[name]) for name in expected)


def decayed(feature, *others):
    """How far a first step moves the weight of `up` beyond what it moves without the decay; its mask; the weight."""
    moved = []
    for factor in (feature.masked_decay, 0.0):
        with job(type(feature)(**{**vars(feature), "masked_decay": factor}), *others) as made:
            before = weights(made)["layers.0.up.weight"]
            made.step(batch())
            moved.append(weights(made)["layers.0.up.weight"])
            mask = unpack(made.kept[feature.name].state.method.masks["layers.0.up"], 16)
    return moved[0] - moved[1], mask, before


@pytest.mark.parametrize(
    "feature", [SRSTE(masked_decay=0.5), TSRSTE(masked_decay=0.5, calibrate=0.0, tail=0.0)], ids=str
)
def test_masked_weights_decay_through_their_gradients(feature):
    """With SGD the step is -lr x decay x weight where the mask is false, and nothing where it is true."""
    extra, mask, before = decayed(feature)
    torch.testing.assert_close(extra, (-0.1 * 0.5 * before).masked_fill(mask, 0))


def test_decay_comes_after_clipping():
    """Clipping to a tiny norm leaves nothing of the gradients, and all of the decay."""
    extra, mask, before = decayed(SRSTE(masked_decay=0.5), Clip(max_norm=1e-9))
    torch.testing.assert_close(extra, (-0.1 * 0.5 * before).masked_fill(mask, 0))


def test_decay_is_of_gradients_not_of_weights():
    """Adam divides it by the root of the second moment with the gradient: a first step is of the size lr everywhere,
    where a decay of weights would be lr x decay x weight."""
    made = ss.Job(net(), forward=lambda model, batch: model(batch), loss=lambda y, _: (0 * y.sum(), torch.tensor(1.0)))
    attachments_of(made).build_optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-12)
    with ss.compose(made, [SRSTE(masked_decay=1e-3)]):
        before = weights(made)["layers.0.up.weight"]
        made.step(batch())
        moved = weights(made)["layers.0.up.weight"] - before
    mask = masks.row_mask(before)
    torch.testing.assert_close(moved, (-0.01 * before.sign()).masked_fill(mask, 0), rtol=1e-4, atol=1e-12)


def test_masks_are_refreshed_every_few_steps():
    with job(TSRSTE(refresh=3, calibrate=0.0, tail=0.0)) as made:
        method = made.kept["sparse.tsrste"].state.method
        seen = []
        for number in range(7):
            attachments_of(made).module.layers[0]["up"].weight.data = torch.randn(
                32, 16, dtype=torch.float64
            )  # the mask must move
            expected = pack(masks.transposable_mask(attachments_of(made).module.layers[0]["up"].weight))
            made.step(batch(number))
            seen.append(torch.equal(method.masks["layers.0.up"], expected))
        assert seen == [True, False, False, True, False, False, True]


def test_one_mask_serves_all_micro_batches():
    with job(STE()) as made, job(STE()) as whole:
        made.step(batch(0), batch(1))
        whole.step(torch.cat([batch(0), batch(1)]))
        torch.testing.assert_close(weights(made), weights(whole))


def test_the_tail_is_dense():
    with job(TSRSTE(calibrate=0.0, tail=0.25, refresh=1), total=8) as made:
        for number in range(8):
            made.step(batch(number))
            dense = number >= 6
            assert made.kept["sparse.tsrste"].state.method.dense == dense
            left = leaving(made)["layers.0.up.weight"]
            assert torch.equal(left, weights(made)["layers.0.up.weight"]) == dense
            assert (float(made.numbers["decay"]) == 0) == dense
        plain = net()
        plain.load_state_dict(weights(made))
        assert torch.equal(made.model(batch()), plain(batch()))


def test_a_run_that_is_made_longer_leaves_its_tail():
    with job(TSRSTE(calibrate=0.0, tail=0.5, refresh=40), total=4) as made:
        method = made.kept["sparse.tsrste"].state.method
        for number in range(4):
            made.step(batch(number))
        assert method.dense
        made.progress.total = 16
        made.step(batch())
        assert not method.dense
        masks.require_2_4(leaving(made)["layers.0.up.weight"])


# -- a loop of its own ------------------------------------------------------------------------------------------------


def test_one_line_in_a_loop_of_its_own():
    model = net()
    optimizer = sgd(model.parameters())
    made = attach(model, optimizer, TSRSTE(refresh=1))
    for number in range(4):
        model(batch(number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for value in leaving(made).values():
        if value.dim() == 2:
            masks.require_2_4(value)
            masks.require_2_4(value.t())
    made.close()
    assert "forward" not in vars(model.layers[0]["up"])


def test_attach_refuses_what_does_not_fit():
    model = nn.Linear(6, 6)
    with pytest.raises(ConfigError, match="matches no linear layer of Linear"):
        attach(model, sgd(model.parameters()), SSTE())


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    [
        SSTE(),
        SSTE(mvue=True),
        SSTE(simulate_fp8=True, mvue=True),
        STE(),
        TSRSTE(calibrate=0.5, tail=0.25, refresh=1, mvue=True),
        AST(metric="wanda", refresh=2, slorb=4, distillation=0.0),
    ],
    ids=str,
)
def test_compiled_without_a_break(feature):
    """The same losses and weights as uncompiled, in one graph (fullgraph), through masks, search and tail."""
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        with job(feature, total=8) as made:
            if compiled:
                attachments_of(made).module.compile(backend="aot_eager", fullgraph=True)
            losses.append([float(made.step(batch(number))) for number in range(8)])
            losses[-1].append(float(weights(made)["layers.0.up.weight"].sum()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_shows_layers_and_curves():
    with job(SSTE(layers=("*.up", "*.odd")), total=30) as made:
        for number in range(30):
            made.step(batch(number))
        feature = attachments_of(made).features[0]
        table, flips, _ = feature.report_items(made.trace)
        (row,) = table.rows
        assert row[0] == "layers.0.up"
        assert 0.75 < float(row[1]) < 0.95
        assert 0 < float(made.numbers["flip_rate"]) < 0.5
        assert flips.metrics == {"flip_rate": "flip rate"}
        cut = feature.reduction(made.trace)
        assert cut.without == 3 * 2 * 16 * 32
        assert cut.used == 3 * 2 * 16 * 32 - 16 * 32 / 2
        assert not cut.measured


def test_a_job_that_is_finished_early_counts_each_step_once():
    with job(SSTE()) as made:
        for number in range(3):
            made.step(batch(number))
        made.finish()
        assert made.trace.facts["steps with sparsity"] == made.trace.facts["sparse steps"] == 3


def test_what_is_explained_stays_the_same_once_it_is_attached():
    feature = TSRSTE()
    before = feature.explain(attachments_of(ss.Job(net())))
    with job(feature) as made:
        assert feature.explain(attachments_of(made)) == before
    assert "2 linear layers, 100%" in before
