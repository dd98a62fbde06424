"""Answers that share their prompt in a sample give the losses and gradients of answers with a prompt each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import shoestring as ss
from benchmarks.models import zoo
from shoestring.core.job import attachments_of
from shoestring.core.task import IGNORED, call_model
from shoestring.data import preferences
from shoestring.data.preferences import KINDS, EncodedAnswer, EncodedRecord, PreferenceDataset
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.behaviour import sharing_fault
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import SGD
from shoestring.preference import DPO, ORPO, SimPO

SEQUENCE = 64


@st.composite
def records(draw):
    """Records of one to three answers; empty and long prompts, answers that begin alike, and some that do not fit."""
    token = st.integers(3, 9)
    drawn = []
    for number in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(token, min_size=1, max_size=30))
        alike = draw(st.lists(token, max_size=3))
        answers = []
        for kind in draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (0,), (0, 1, 2)])):
            text = [*alike, *draw(st.lists(token, min_size=1, max_size=20))]
            own = prompt if draw(st.booleans()) else [*prompt, draw(token)]  # a template may write it otherwise
            answers.append(EncodedAnswer(kind, [*own, *text], [False] * len(own) + [True] * len(text)))
        drawn.append(EncodedRecord(number, answers))
    return drawn


def datasets(folder, drawn):
    """The same records, sharing their prompts and packed."""
    path = folder / "records.chats"
    preferences._write_file(path, drawn, byte_tokenizer(), "test")
    return PreferenceDataset(path, SEQUENCE, shared=True), PreferenceDataset(path, SEQUENCE)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(records())
def test_each_answer_sees_its_prompt_and_itself(tmp_path_factory, drawn):
    shared, packed = datasets(tmp_path_factory.mktemp("records"), drawn)
    fitting = [record for record in drawn if sum(len(answer.tokens) for answer in record.answers) <= SEQUENCE]
    assert shared.left_out <= packed.left_out == len(drawn) - len(fitting)
    assert shared.tokens - packed.tokens >= 0 or shared.left_out == packed.left_out
    seen = []
    for sample in (shared[index] for index in range(len(shared))):
        mask = sample["attention_mask"]
        assert mask.shape == (1, SEQUENCE, SEQUENCE) and mask.dtype is torch.bool
        assert mask.diagonal(dim1=1, dim2=2).all()  # also padding attends to something: a softmax of nothing is NaN
        for number in sample["answers"].unique().tolist():
            if number >= 0:
                last = int((sample["answers"] == number).nonzero().max())
                places = mask[0, last].nonzero()[:, 0]
                assert sample["position_ids"][places].tolist() == list(range(len(places)))
                for count, place in enumerate(places.tolist()):
                    assert mask[0, place].nonzero()[:, 0].tolist() == places[: count + 1].tolist()
                labels = sample["labels"][places]
                assert not (labels != IGNORED)[sample["answers"][places] < 0].any()
                seen.append((number % KINDS, sample["input_ids"][places].tolist(), (labels != IGNORED).tolist()))
        # A first token is predicted by a token that belongs to its answer alone.
        first = sample["labels"].ne(IGNORED) & sample["labels"].roll(1).eq(IGNORED)
        assert (sample["answers"][first] == sample["answers"].roll(1)[first]).all()
    texts = [text for _, text, _ in seen]
    kept = [record for record in drawn if record.answers[0].tokens in texts]
    wanted = [(answer.kind, answer.tokens, answer.trained) for record in kept for answer in record.answers]
    assert sorted(seen) == sorted(wanted) and len(kept) == len(drawn) - shared.left_out


def gpt():
    torch.manual_seed(0)
    shape = {"vocab_size": 12, "context": SEQUENCE, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 32}
    return GPT(GPTConfig(**shape)).double()


def loss_and_gradients(data, feature):
    network = gpt()
    with ss.compose(ss.Job(network), [feature, SGD(lr=0.1)]) as job:
        with torch.no_grad():
            for parameter in network.parameters():  # otherwise policy and reference are the same
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter)))
        attachments, total, count = attachments_of(job), torch.zeros((), dtype=torch.float64), 0
        for index in range(len(data)):
            batch = default_collate([data[index]])
            own, pairs = attachments.loss(attachments.forward(attachments.module, batch), batch)
            total, count = total + own, count + int(pairs)
        (total / count).backward()
        return total.detach() / count, {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("feature", [DPO(cache_folder=""), SimPO(), ORPO()], ids=lambda feature: feature.name)
def test_losses_and_gradients_are_those_of_packed_answers(tmp_path, feature):
    draw = torch.Generator().manual_seed(3)

    def text(least, most):
        count = int(torch.randint(least, most, (), generator=draw))
        return torch.randint(3, 10, (count,), generator=draw).tolist()

    drawn = []
    for number in range(12):
        prompt, answers = text(1, 20), [text(1, 10), text(1, 10)]
        flags = ([False] * len(prompt) + [True] * len(own) for own in answers)
        sides = [
            EncodedAnswer(kind, prompt + own, trained)
            for kind, (own, trained) in enumerate(zip(answers, flags, strict=True))
        ]
        drawn.append(EncodedRecord(number, sides))
    shared, packed = datasets(tmp_path, drawn)
    assert len(shared) < len(packed) and not packed.left_out
    (loss, gradients), (wanted, others) = loss_and_gradients(shared, feature), loss_and_gradients(packed, feature)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-10, atol=1e-12)


CASES = [name for name in zoo.CASES if name not in zoo.missing()]
QUICK = ("llama", "gpt2", "mistral", "bloom")


@torch.no_grad()
def check_model(name):
    """What a model says of sharing holds for it beyond its windows, which the observation's copy has reached."""
    network = zoo.build(name)
    network.config.use_cache = False
    if sharing_fault(network, zoo.VOCABULARY):
        return False
    begins, draw = 45, torch.Generator().manual_seed(1)
    beginning, *answers = (torch.randint(3, 250, (count,), generator=draw) for count in (begins, 20, 31))
    text = torch.cat([torch.full((begins,), -1), *(torch.full((len(own),), n) for n, own in enumerate(answers))])
    positions = torch.cat([torch.arange(begins), *(torch.arange(begins, begins + len(own)) for own in answers)])
    batch = {
        "input_ids": torch.cat([beginning, *answers])[None],
        "position_ids": positions[None],
        "attention_mask": (((text[:, None] == text) | (text < 0)).tril())[None, None],
    }
    logits = call_model(network, batch).logits[0]
    for number, own in enumerate(answers):
        alone = call_model(network, {"input_ids": torch.cat([beginning, own])[None]}).logits[0]
        torch.testing.assert_close(
            logits[(text < 0) | (text == number)], alone, rtol=1e-3, atol=1e-3 * float(alone.std())
        )
    return True


@pytest.mark.parametrize("name", QUICK)
def test_models_share_prompts_or_say_why_not(name):
    pytest.importorskip("transformers")
    assert check_model(name) is (name in ("llama", "gpt2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_every_model_shares_prompts_or_says_why_not(name):
    check_model(name)
