"""Fine-tuning a dense model to 2:4, against the formulas of AST in double precision; and models of transformers."""

import pytest
import torch
import torch.nn.functional as F
from test_training import Net, batch, leaving, squares, weights

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import attachments_of
from shoestring.models import slorb
from shoestring.models.blocks import is_in_block
from shoestring.models.loading import load_model
from shoestring.optim import Clip
from shoestring.sparse import AST, SRSTE, masks
from shoestring.sparse.product import unpack
from shoestring.testing import jobs

UP, DOWN = "layers.0.up", "layers.0.down"
PLAIN = {"distillation": 0.0, "slorb": 0}
PAPER = PLAIN | {"masked_decay_scale": "none"}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def job(feature, *others, total=0, model=None, optimizer=sgd):
    torch.manual_seed(0)
    made = ss.Job(model or Net().double(), forward=lambda model, batch: model(batch), loss=squares, optimizer=optimizer)
    made.progress.total = total
    return ss.compose(made, [feature, *others])


def method(made):
    return made.kept["sparse.ast"].state.method


# -- the forward pass --------------------------------------------------------------------------------------------------


def test_a_layer_computes_the_masked_product_and_the_adapter():
    with job(AST(distillation=0.0, slorb=4)) as made:
        before = weights(made)
        x, hidden = batch(), None
        for name in (UP, DOWN):
            weight, bias = before[f"{name}.weight"], before[f"{name}.bias"]
            kept = masks.row_mask(weight)
            means = (weight * ~kept).view(len(weight), -1, 4).mean(-1)
            assert torch.equal(before[f"{name}.slorb"], means)
            whole = weight * kept + means.repeat_interleave(4, 1)  # B P as a matrix
            hidden = F.linear(x if hidden is None else hidden, whole, bias)
            hidden = torch.relu(hidden) if name == UP else hidden
        torch.testing.assert_close(made.model(x), x + hidden)


def test_adapters_learn_and_gradients_pass_straight_through():
    with job(AST(distillation=0.0, slorb=4, masked_decay=0.0)) as made:
        before = weights(made)
        used = {name: value.clone().requires_grad_() for name, value in before.items()}
        for name in (UP, DOWN):
            used[f"{name}.weight"] = (
                before[f"{name}.weight"] * masks.row_mask(before[f"{name}.weight"])
            ).requires_grad_()
        x = batch()

        def layer(name, x):
            sums = x.view(*x.shape[:-1], -1, 4).sum(-1)
            return F.linear(x, used[f"{name}.weight"], used[f"{name}.bias"]) + sums @ used[f"{name}.slorb"].T

        (x + layer(DOWN, torch.relu(layer(UP, x)))).square().mean().backward()
        made.step(x)
        for name, value in weights(made).items():
            torch.testing.assert_close(value, before[name] - 0.1 * used[name].grad)


# -- the decay ---------------------------------------------------------------------------------------------------------


def test_the_decay_grows_to_its_largest_value_and_stays():
    with job(AST(masked_decay=0.5, masked_decay_warmup=0.5, **PAPER), total=8) as made:
        factors = []
        for number in range(8):
            made.step(batch(number))
            factors.append(float(made.numbers["decay"]))
    assert factors == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5])
    for changes, total in (({"masked_decay_warmup": 0.0}, 8), ({}, 0)):  # at once; and where the end is open
        with job(AST(masked_decay=0.5, **PAPER, **changes), total=total) as made:
            made.step(batch())
            assert float(made.numbers["decay"]) == 0.5


def moved_by_the_decay(*others, optimizer=sgd, decay=0.5):
    """How far a step moves the weight of `up` beyond what it moves without the decay; its mask; the weight."""
    moved = []
    for factor in (decay, 0.0):
        with job(AST(masked_decay=factor, masked_decay_warmup=0.0, **PAPER), *others, optimizer=optimizer) as made:
            before = weights(made)[f"{UP}.weight"]
            made.step(batch())
            moved.append(weights(made)[f"{UP}.weight"])
            mask = unpack(method(made).masks[UP], 16)
    return moved[0] - moved[1], mask, before


@pytest.mark.parametrize("others", [(), (Clip(max_norm=1e-9),)], ids=["alone", "after clipping"])
def test_masked_weights_decay_towards_zero_and_no_others(others):
    """AST's code for GPT-2 inverts a mask of integers by `~`, which gives -1 and -2: its decay has the wrong sign and
    moves the weights that are kept, too. Those of bool alone are right."""
    extra, mask, before = moved_by_the_decay(*others)
    torch.testing.assert_close(extra, (-0.1 * 0.5 * before).masked_fill(mask, 0))
    inverted = ~mask.int()
    assert not torch.allclose(extra, -0.1 * 0.5 * before * inverted)  # what that code does
    with pytest.raises(ConfigError, match=r"a mask of torch\.int32"):
        masks.prune(before, mask.int())


def test_the_scale_of_the_gradient_makes_one_factor_suit_all():
    """decay x ‖g‖ / ‖W‖ x W where the mask is false, of the gradient that the loss alone gives."""
    with job(AST(masked_decay=0.0, **PLAIN)) as made:
        before = weights(made)
        made.step(batch())
        gradients = {name: (before[name] - after) / 0.1 for name, after in weights(made).items()}
    with job(AST(masked_decay=2.0, masked_decay_warmup=0.0, **PLAIN)) as made:
        made.step(batch())
        for name in (UP, DOWN):
            weight, gradient = before[f"{name}.weight"], gradients[f"{name}.weight"]
            out = weight.masked_fill(unpack(method(made).masks[name], weight.shape[1]), 0)
            expected = weight - 0.1 * (gradient + 2.0 * gradient.norm() / weight.norm() * out)
            torch.testing.assert_close(weights(made)[f"{name}.weight"], expected)


def test_the_decay_is_of_gradients_not_of_weights():
    """With Adam, a first step is of the size lr wherever there is a gradient: a decay of weights would be far less."""
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-12)  # noqa: E731
    made = ss.Job(Net().double(), forward=lambda model, x: model(x), loss=lambda y, _: (0 * y.sum(), torch.tensor(1.0)))
    attachments_of(made).build_optimizer = adam
    with ss.compose(made, [AST(masked_decay=1e-3, masked_decay_warmup=0.0, **PAPER)]):
        before = weights(made)[f"{UP}.weight"]
        made.step(batch())
        moved = weights(made)[f"{UP}.weight"] - before
    mask = masks.row_mask(before)
    torch.testing.assert_close(moved, (-0.01 * before.sign()).masked_fill(mask, 0), rtol=1e-4, atol=1e-12)


# -- masks -------------------------------------------------------------------------------------------------------------


def test_masks_are_refreshed_every_few_steps_and_the_last_ones_leave_the_run():
    with job(AST(refresh=3, **PLAIN), total=5) as made:
        for number in range(5):
            attachments_of(made).module.layers[0]["up"].weight.data = torch.randn(
                32, 16, dtype=torch.float64
            )  # the mask must move
            expected = masks.row_mask(attachments_of(made).module.layers[0]["up"].weight)
            made.step(batch(number))
            mask = unpack(method(made).masks[UP], 16)
            assert torch.equal(mask, expected) == (number in (0, 3))
        left = leaving(made)[f"{UP}.weight"]
        assert torch.equal(left != 0, mask)
        masks.require_2_4(left)
        plain = Net().double()
        plain.load_state_dict(leaving(made))
        assert torch.equal(plain(batch()), made.model(batch()))  # exactly what was computed with


def test_wandas_metric_weighs_by_the_norms_of_inputs():
    """The mean squares of the inputs in the last step before each refresh, of which later ones are a moving mean."""
    scale = torch.logspace(-1, 1, 16, dtype=torch.float64).flip(0)
    with job(AST(metric="wanda", refresh=2, masked_decay=0.0, **PLAIN)) as made:
        assert torch.equal(unpack(method(made).masks[UP], 16), masks.row_mask(weights(made)[f"{UP}.weight"]))
        seen = []
        for number in range(5):
            weight = weights(made)[f"{UP}.weight"]
            made.step(batch(number) * scale, batch(number + 100) * scale)
            if number % 2 == 1:
                squares_ = torch.cat([batch(number), batch(number + 100)]).mul(scale).square().sum(0)
                seen.append(squares_ / squares_.mean())
            if number in (2, 4):
                norms = torch.stack(seen).mean(0).sqrt()
                expected = masks.row_mask(weight * norms)
                assert torch.equal(unpack(method(made).masks[UP], 16), expected)
                assert not torch.equal(expected, masks.row_mask(weight))
        masks.require_2_4(leaving(made)[f"{UP}.weight"])


def test_what_is_evaluated_is_not_measured():
    """Whether it is one by its mode, or because no gradients are recorded."""
    norms = []
    for evaluating in ("no", "without gradients", "in evaluation mode"):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = sgd(model.parameters())
        made = ss.attach(model, optimizer, AST(metric="wanda", refresh=1, **PLAIN))
        output = model(batch())
        if evaluating != "no":
            with torch.set_grad_enabled(evaluating == "in evaluation mode"):
                model.train(evaluating == "without gradients")(batch(1) * torch.arange(16))
            model.train()
        output.square().sum().backward()
        optimizer.step()
        norms.append(method(made).squares[UP].clone())
        made.close()
    assert torch.equal(*norms[:2]) and torch.equal(*norms[1:]) and not torch.equal(norms[0], torch.ones_like(norms[0]))


# -- distillation ------------------------------------------------------------------------------------------------------


def test_the_teacher_is_the_dense_model_that_training_starts_from():
    with ss.compose(ss.Job(jobs.tiny(), optimizer=jobs.sgd()), [AST(slorb=0)]) as made:
        teacher, tokens = attachments_of(made).frozen_modules["sparse.ast.teacher"], jobs.batch(0)["inputs"]
        for number in range(3):
            made.step(jobs.batch(number))
        assert torch.equal(teacher(tokens), jobs.tiny()(tokens))
        assert float(made.numbers["distillation"]) > 0
        assert "sparse.ast.teacher" not in "".join(attachments_of(made).weights())
    assert all(
        parameter.requires_grad for name, parameter in attachments_of(made).module.named_parameters() if name != "scale"
    )


def test_another_teacher_is_opened_by_its_name():
    with ss.compose(ss.Job(jobs.tiny()), [AST(teacher="shoestring.testing.jobs:tiny")]) as made:
        source = made.kept["frozen.sparse.ast.teacher"].state.state_dict()["source"]
        assert source == "shoestring.testing.jobs:tiny"


def test_without_a_teacher_it_attaches_to_any_loop():
    model = Net().double()
    optimizer = sgd(model.parameters())
    made = ss.attach(model, optimizer, AST(**PLAIN))
    for number in range(3):
        model(batch(number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masks.require_2_4(leaving(made)[f"{UP}.weight"])
    made.close()
    with pytest.raises(ConfigError, match=r"`sparse\.ast` changes the loss"):
        ss.attach(Net(), optimizer, AST())


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.mlp.gate_proj", True),
        ("blocks.3.attention.qkv", True),
        ("lm_head", False),
        ("embed.proj", False),
        ("layers.0.router", False),
    ],
)
def test_all_linear_layers_of_blocks_are_asked_for(name, inside):
    assert is_in_block(name) == inside


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (AST(masked_decay_warmup=2.0), "`sparse.ast.masked_decay_warmup` is a share in [0, 1], got 2.0"),
        (AST(distillation=-1.0), "`sparse.ast.distillation` is a share in [0, 1]"),
        (AST(temperature=0.0), "`sparse.ast.temperature` must be positive"),
        (AST(masked_decay=1.0, masked_decay_scale="none"), "`sparse.ast.masked_decay` must lie in [0, 1), got 1.0"),
        (AST(slorb=6), "`sparse.ast.slorb` must be a multiple of four, or 0, got 6"),
        (AST(refresh=0), "`sparse.ast.refresh` must be at least 1 step"),
    ],
)
def test_bad_settings_in_one_line(feature, message):
    with pytest.raises(ConfigError, match="`sparse") as error:
        job(feature)
    assert message in str(error.value)


def test_no_other_way_of_sparse_training_beside_it():
    with pytest.raises(ConflictError, match=r"which `sparse\.srste` makes sparse too"):
        job(AST(layers=("*.up",)), SRSTE(layers=("*.down",)))


def test_it_says_what_it_does():
    made = ss.Job(jobs.tiny())
    assert "learns from the model that it starts from; SLoRB adds 1/16 of the weights" in AST().explain(
        attachments_of(made)
    )
    assert "teacher" not in AST(**PLAIN).explain(attachments_of(made))
    with job(AST(slorb=4, distillation=0.0), total=30) as made:
        for number in range(30):
            made.step(batch(number))
        cut, whole = attachments_of(made).features[0].reduction(made.trace), 2 * 16 * 32
        assert cut.without - cut.used == whole / 2 - 3 * whole / 4  # half of one product, and the adapter's three
        assert [row[0] for row in attachments_of(made).features[0].report_items(made.trace)[0].rows] == [UP, DOWN]


# -- models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_of_transformers_is_fine_tuned_in_a_run_and_generates(tmp_path):
    transformers = pytest.importorskip("transformers")
    from shoestring.core.world import World
    from shoestring.data.together import prepare
    from shoestring.models.saving import save_like
    from shoestring.run import parse
    from shoestring.training.loop import train

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} lazy dogs jump over {n * n} foxes" for n in range(400)))
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    data = ss.Data(vocabulary=300, sequence=16, held_out=0.5)
    prepare(str(text), tmp_path, data).tokenizer.save_pretrained(tmp_path / "dense", 16)
    document = {
        "run": {"model": f"hf:{tmp_path / 'dense'}", "data": str(text), "steps": 3, "batch": 2},
        "data": {"tokenizer": "model", "sequence": 16, "held_out": 0.5},
        "optim": {"sgd": {"lr": 0.1}},
        "sparse": {"ast": {"slorb": 4}},
    }
    document["run"]["folder"] = str(tmp_path / "run")
    train(parse(document), World())
    opened, tokenizer = load_model(tmp_path / "run")
    assert tokenizer is not None and len(slorb.adapted(opened)) == 7  # of the attention and of the feed-forward part
    for name in slorb.adapted(opened):
        masks.require_2_4(opened.get_submodule(name).weight)
    document["run"]["folder"], document["sparse"]["ast"]["slorb"] = str(tmp_path / "plain"), 0
    train(parse(document), World())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "model")  # any program opens it
    masks.require_2_4(plain.model.layers[0].self_attn.q_proj.weight)
    save_like(opened, tmp_path / "run" / "model", tmp_path / "again")
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "again")[0](tokens).logits, opened(tokens).logits)
