"""Jobs that learn from preferences against a loop by hand, which reads each answer alone."""

import pytest
import torch
from torch.nn import functional as F

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import attachments_of
from shoestring.core.task import IGNORED
from shoestring.memory import ChunkedLoss, LoRA
from shoestring.models.adapters import adapters_off
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import SGD
from shoestring.preference import DPO, KTO, ORPO, SimPO

LENGTH = 48
RECORDS = (  # of each row: prompt, and the answers of the kinds chosen, rejected, mismatched
    [((1, 2, 3), ((4, 5), (6,), (7, 8))), ((9,), ((2, 2, 2), (3, 4), (5,)))],
    [((5, 6), ((1,), (1, 2, 3, 4), (9, 9)))],
)


def batch(records=RECORDS, kinds=(0, 1, 2)):
    """Answers packed into rows, each behind its prompt, with positions that restart."""
    shape = len(records), LENGTH
    inputs, positions = torch.zeros(shape, dtype=torch.int64), torch.arange(LENGTH).repeat(len(records), 1)
    labels, answers = torch.full(shape, IGNORED), torch.full(shape, -1)
    for row, rest in enumerate(records):
        at = 0
        for number, (prompt, sides) in enumerate(rest):
            for kind in kinds:
                text = (*prompt, *sides[kind])
                end, start = at + len(text), at + len(prompt)
                inputs[row, at:end] = torch.tensor(text)
                positions[row, at:] = torch.arange(LENGTH - at)
                labels[row, start:end] = torch.tensor(sides[kind])
                answers[row, at:end] = 3 * number + kind
                at = end
        positions[row, at:] = torch.arange(LENGTH - at)
    return {"input_ids": inputs, "labels": labels, "position_ids": positions, "answers": answers}


def model(seed=0, **changes):
    torch.manual_seed(seed)
    config = {
        "vocab_size": 11,
        "context": LENGTH,
        "dim": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "hidden": 32,
    } | changes
    return GPT(GPTConfig(**config)).double()


def alone(net, prompt, answer):
    """log π(answer | prompt), read in a pass of its own."""
    logits = net(torch.tensor([[*prompt, *answer]]))[0].log_softmax(-1)
    return sum(logits[len(prompt) - 1 + place, token] for place, token in enumerate(answer))


def by_hand(net, base, feature):
    """The mean loss over the records, written out."""
    losses = []
    with torch.no_grad():
        mismatch = [alone(net, p, s[2]) - alone(base, p, s[2]) for rest in RECORDS for p, s in rest]
    z = max(0.0, float(sum(mismatch) / len(mismatch)))
    for prompt, (good, bad, _) in (record for rest in RECORDS for record in rest):
        w, l_ = alone(net, prompt, good), alone(net, prompt, bad)
        rw, rl = alone(base, prompt, good).detach(), alone(base, prompt, bad).detach()
        m, n = len(good), len(bad)
        match feature:
            case DPO(variant="sigmoid"):
                losses.append(-F.logsigmoid(feature.beta * ((w - rw) - (l_ - rl))))
            case DPO(variant="ipo"):
                losses.append(((w - rw) / m - (l_ - rl) / n - 1 / (2 * feature.beta)) ** 2)
            case SimPO():
                losses.append(-F.logsigmoid(feature.beta * (w / m - l_ / n) - feature.margin))
            case ORPO():
                odds = [torch.log(x.exp() / (1 - x.exp())) for x in (w / m, l_ / n)]
                losses.append(-w / m - feature.weight * F.logsigmoid(odds[0] - odds[1]))
            case KTO():  # a record is rated one way only: here its chosen answer
                losses.append(1 - torch.sigmoid(feature.beta * ((w - rw) - z)))
    return sum(losses) / len(losses)


FEATURES = {
    "dpo": DPO(beta=0.3, tokens=5, cache_folder=""),
    "ipo": DPO(variant="ipo", cache_folder=""),
    "simpo": SimPO(),
    "orpo": ORPO(weight=0.5),
    "kto": KTO(beta=0.4, cache_folder=""),
}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_packed_answers_learn_what_each_alone_would(name, adapters):
    feature, net = FEATURES[name], model()
    kinds = (0, 2) if name == "kto" else (0, 1, 2)
    features = [LoRA(rank=2), feature] if adapters else [feature]
    with ss.compose(ss.Job(net), [*features, SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
        base = Off(net) if adapters else model()
        for _ in range(3):
            expected = by_hand(net, base, feature)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            wanted = torch.autograd.grad(expected, trained, allow_unused=True)
            before = [parameter.detach().clone() for parameter in trained]
            found = job.step(batch(kinds=kinds))
            torch.testing.assert_close(torch.as_tensor(found).double(), expected.detach(), rtol=1e-6, atol=1e-7)
            for parameter, old, gradient in zip(trained, before, wanted, strict=True):
                moved = torch.zeros_like(old) if gradient is None else gradient
                torch.testing.assert_close(old - parameter.detach(), 0.5 * moved, rtol=1e-7, atol=1e-12)
        assert 0 <= float(job.numbers["reward_accuracy"]) <= 1


class Off:
    """A model with its adapters switched off, for one pass."""

    def __init__(self, net):
        self.net = net

    def __call__(self, tokens):
        with adapters_off(self.net), torch.no_grad():
            return self.net(tokens)


def test_dropout_is_off_in_the_reference_and_on_in_training():
    net = model()
    with ss.compose(
        ss.Job(net), [LoRA(rank=2, dropout=0.5), DPO(cache_folder=""), SGD(lr=0.5, momentum=0.0, nesterov=False)]
    ) as job:
        net.train()
        objective = attachments_of(job).loss.__self__
        for _ in range(2):
            job.step(batch())
        first = objective.reference_sums.clone()
        job.step(batch())
        assert torch.equal(objective.reference_sums, first)
        assert any(module.training for module in net.modules())


def test_the_reference_is_computed_once_and_read_from_disk_by_a_later_start(tmp_path):
    def losses(steps):
        net, calls = model(), []
        with ss.compose(
            ss.Job(net), [DPO(cache_folder=str(tmp_path / "reference")), SGD(lr=0.5, momentum=0.0, nesterov=False)]
        ) as job:
            objective = attachments_of(job).loss.__self__
            objective.frozen.register_forward_hook(lambda *_: calls.append(1))
            result = [float(job.step(batch())) for _ in range(steps)]
        return result, len(calls)

    first, calls = losses(3)
    assert calls == 1
    again, calls = losses(3)
    assert (again, calls) == (first, 0)


def test_evaluation_has_the_loss_of_the_objective():
    net = model()
    with ss.compose(ss.Job(net), [DPO(cache_folder=""), SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
        job.step(batch())
        total, count = job.evaluate([batch()])
        assert count == 3
        expected = by_hand(net, model(), DPO(cache_folder=""))
        assert total / count == pytest.approx(float(expected.detach()), rel=1e-9)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (DPO(beta=0.0), "beta` must be positive"),
        (DPO(beta=float("nan")), "beta` must be positive"),
        (DPO(smoothing=0.5), r"smoothing` must lie in \[0, 0.5\)"),
        (DPO(smoothing=0.1, variant="ipo"), "not defined for the variant ipo"),
        (DPO(tokens=0), "tokens` must be at least 1"),
        (ORPO(weight=-1.0), "weight` must be positive"),
        (KTO(undesirable_weight=0.0), "undesirable_weight` must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(feature, message):
    with pytest.raises(ConfigError, match=message):
        ss.compose(ss.Job(model()), [feature])


def test_two_losses_are_refused():
    with pytest.raises(ConflictError, match="loss"):
        ss.compose(ss.Job(model()), [DPO(), SimPO()])
    with pytest.raises(ConfigError, match="loss"):
        ss.compose(ss.Job(model()), [DPO(), ChunkedLoss()])


def test_a_reference_that_training_would_change_is_refused():
    with pytest.raises(ConfigError, match="is the model without adapters, and"):
        ss.compose(ss.Job(model()), [LoRA(rank=2, modules_to_train=("embed",)), DPO(cache_folder="")])


def test_batches_without_preferences_are_refused():
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with ss.compose(ss.Job(model()), [SimPO()]) as job, pytest.raises(ConfigError, match="learns from preferences"):
        job.step({"input_ids": tokens, "labels": tokens})
