"""Chats: what is trained of them, how they share samples, and which records are refused."""

import json
import pickle
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import IGNORED, call_model, cross_entropy
from shoestring.data import Data
from shoestring.data.chat_template import chat_template
from shoestring.data.chats import pack
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.corpus import prepare_source
from shoestring.data.loader import Loader, sweep
from shoestring.models.gpt import GPT, GPTConfig
from tests.decode.small_server import CHATML, tokenizer

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
FORGETS = (  # the reasoning of all answers but the last, as Qwen3 does
    "{% for m in messages %}{% set c = m.content if loop.last else m.content.split('</think>')[-1] %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (  # asks for reasoning that answers in the data may lack, as R1 does
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "hm</think>1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "so</think>2"},
]


def learnt(template, messages, **arguments):
    """Of each sample, the runs of text that are trained."""
    tokens = tokenizer(template)
    found = []
    for ids, trained in chat_template(tokens).samples(messages, arguments):
        runs, before = [], False
        for token, now in zip(ids, trained, strict=True):
            if now and not before:
                runs.append([])
            if now:
                runs[-1].append(token)
            before = now
        found.append([tokens.engine.decode(run, skip_special_tokens=False) for run in runs])
    return found


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["compared", "tagged"])
def test_answers_of_all_turns_are_trained_with_the_token_that_ends_them(template):
    assert learnt(template, TALK) == [["hm</think>1<|im_end|>", "so</think>2<|im_end|>"]]
    (sample,) = chat_template(tokenizer(template)).samples(TALK)
    text = tokenizer(template).engine.decode(sample[0], skip_special_tokens=False)
    assert text == chat_template(tokenizer(template)).render(TALK, {}, ask=False)


def test_a_template_that_forgets_gives_each_answer_a_sample_in_which_it_is_what_generation_would_see():
    assert learnt(FORGETS, TALK) == [["hm</think>1<|im_end|>"], ["so</think>2<|im_end|>"]]
    made = chat_template(tokenizer(FORGETS))
    first, second = made.samples(TALK)
    for (tokens, trained), turns in ((first, 2), (second, 4)):
        assert tokens[: trained.index(True)] == made.encode(TALK[:turns])


def test_what_asks_for_an_answer_and_is_not_in_it_is_not_required():
    assert learnt(THINKS, TALK) == [["hm</think>1<|im_end|>", "so</think>2<|im_end|>"]]


def test_an_answer_without_an_end_gets_one():
    assert learnt(ENDLESS, TALK) == [["hm</think>1\n<|im_end|>"], ["so</think>2\n<|im_end|>"]]


def test_messages_of_no_weight_are_not_trained():
    muted = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert learnt(CHATML, muted) == learnt(TAGGED, muted) == [["so</think>2<|im_end|>"]]


def test_text_that_spells_a_special_token_stays_text():
    talk = [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "<|im_end|>!"}]
    for template in (CHATML, TAGGED):
        assert learnt(template, talk) == [["<|im_end|>!<|im_end|>"]]
        ((tokens, trained),) = chat_template(tokenizer(template)).samples(talk)
        end = tokenizer(template).engine.token_to_id("<|im_end|>")
        assert [token for token in tokens if token == end] == [end] * 2
        assert [token for token, each in zip(tokens, trained, strict=True) if each and token == end] == [end]


def test_the_prompt_has_the_tokens_that_generation_gives_it():
    made = chat_template(tokenizer(CHATML))
    ((tokens, trained),) = made.samples(TALK[:3])
    assert tokens[: trained.index(True)] == made.encode(TALK[:2])


def test_masks_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = tokenizer(TAGGED)
    ours.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TAGGED})
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    ((tokens, trained),) = chat_template(ours).samples(TALK)
    assert tokens == wanted["input_ids"]
    assert [int(each) for each in trained] == wanted["assistant_masks"]


def test_a_template_that_rewrites_the_question_is_refused():
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="changes the text before message 3"):
        chat_template(tokenizer(rewriting)).samples(TALK)


# -- packing -----------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_packing_takes_each_once_within_the_room_and_leaves_no_two_samples_that_fit_into_one(lengths):
    packed = pack(lengths, 20)
    assert sorted(item for sample in packed for item in sample) == list(range(len(lengths)))
    sums = sorted(sum(lengths[item] for item in sample) for sample in packed)
    assert all(total <= 20 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 20


def records(count=30, seed=0):
    draws = np.random.default_rng(seed)
    for number in range(count):
        turns = []
        for turn in range(draws.integers(1, 4)):
            turns.append({"role": "user", "content": f"{number}.{turn}?"})
            turns.append({"role": "assistant", "content": "a" * int(draws.integers(1, 12))})
        yield {"messages": turns}


def prepared(folder, lines=None, template=CHATML, **settings):
    folder.mkdir(exist_ok=True)
    tokenizer(template).save(folder / "tokenizer.json")
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (lines if lines is not None else records())))
    data = Data(form="chat", tokenizer=str(folder / "tokenizer.json"), **{"sequence": 128, "held_out": 0.2} | settings)
    return prepare_source(str(path), data, folder / "prepared")


def model(context=128):
    torch.manual_seed(0)
    shape = {"vocab_size": 259, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 24, "init_std": 0.3}
    return GPT(GPTConfig(context=context, **shape)).double()


def hf_model(kind="Llama"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=128, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config).double().eval()
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def alone(model, sample):
    """The loss of each chat of a sample by itself, summed."""
    starts = [*np.flatnonzero(sample["position_ids"].numpy() == 0), len(sample["input_ids"])]
    total, count = 0.0, 0
    for first, last in pairwise(starts):
        output = model(sample["input_ids"][None, first:last])
        logits = getattr(output, "logits", output)[0, :-1]
        labels = sample["labels"][first + 1 : last]
        total += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
    return total, count


@pytest.mark.parametrize("make", [model, hf_model, lambda: hf_model("GPT2")], ids=["gpt", "llama", "gpt2"])
@torch.no_grad()
def test_a_packed_sample_has_the_loss_of_its_chats_alone(tmp_path, make):
    train, built, apart = prepared(tmp_path).train, make(), []
    for index in range(len(train)):
        sample = train[index]
        batch = {name: value[None] for name, value in sample.items()}
        total, count = cross_entropy(call_model(built, batch), batch)
        wanted, counted = alone(built, sample)
        assert counted == int(count) > 0
        assert float(total) == pytest.approx(wanted, abs=1e-9)
        leaking = {name: value for name, value in batch.items() if name != "position_ids"}
        apart.append(abs(float(cross_entropy(call_model(built, leaking), leaking)[0]) - wanted))
    assert max(apart) > 1e-4


def test_every_answer_is_a_target_once(tmp_path):
    corpus = prepared(tmp_path)
    messages = [message for record in records() for message in record["messages"]]
    answers = sorted(message["content"] for message in messages if message["role"] == "assistant")
    found, end = [], corpus.tokenizer.engine.token_to_id("<|im_end|>")
    for part in (corpus.train, corpus.held_out):
        for index in range(len(part)):
            kept = part[index]["labels"]
            text = corpus.tokenizer.engine.decode(kept[kept != IGNORED].tolist(), skip_special_tokens=False)
            found += text.split("<|im_end|>")[:-1]
            assert kept[kept != IGNORED][-1] == end
    assert sorted(found) == answers
    assert corpus.documents == 30 and corpus.train.documents == 24
    assert corpus.train.bytes + corpus.held_out.bytes == sum(map(len, answers))


BARE = (  # a chat may begin with an answer, and with nothing before it
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("sequence", [16, 64])
def test_the_first_token_of_a_chat_is_no_target_and_all_others_of_its_answers_are(tmp_path, sequence):
    """In a packed sample it would be told from the chat before it."""
    lines = [
        {"messages": [{"role": "assistant", "content": f"{number:02d}abc"}, {"role": "user", "content": "?"}]}
        for number in range(20)
    ]
    corpus = prepared(tmp_path, lines, template=BARE, sequence=sequence)
    chats = 0
    for part in (corpus.train, corpus.held_out):
        for index in range(len(part)):
            sample = part[index]
            within = sample["position_ids"].tolist()
            labels = sample["labels"].tolist()
            for at, position in enumerate(within):
                if sample["input_ids"][at:].any() or labels[at] != IGNORED:
                    chats += position == 0
                    assert (labels[at] == IGNORED) == (position == 0 or position > 5)
    assert chats == 20


def test_samples_load_in_batches_and_workers_and_evaluations(tmp_path):
    train = prepared(tmp_path).train
    again = pickle.loads(pickle.dumps(train))  # noqa: S301
    assert torch.equal(again[0]["input_ids"], train[0]["input_ids"]) and again.fingerprint == train.fingerprint
    (batch,) = next(iter(Loader(train, batch=2)))
    assert batch["position_ids"].shape == (2, 128) and "ids" in batch
    counted = sum(int((batch["labels"] != IGNORED).sum()) for batch in sweep(train, batch=4))
    assert counted == train.targets


@pytest.mark.slow
def test_prepared_chats_are_used_again_until_something_changes(tmp_path):
    corpus = prepared(tmp_path)
    times = (tmp_path / "prepared" / "train.chats").stat().st_mtime_ns
    assert prepared(tmp_path).fingerprint == corpus.fingerprint
    lines = list(records())
    (tmp_path / "chats.jsonl").unlink()
    assert prepared(tmp_path, lines[:-1]).fingerprint != corpus.fingerprint
    assert (tmp_path / "prepared" / "train.chats").stat().st_mtime_ns != times
    (tmp_path / "prepared" / "train.chats").write_bytes(b"damaged")
    assert len(prepared(tmp_path, lines[:-1]).train)
    assert prepared(tmp_path, lines[:-1], template=FORGETS).fingerprint != corpus.fingerprint


@pytest.mark.slow
def test_long_chats_are_cut_and_those_without_an_answer_then_are_left_out(tmp_path):
    long = {"messages": [{"role": "user", "content": "?" * 200}, {"role": "assistant", "content": "!"}]}
    cut = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!" * 200}]}
    train = prepared(tmp_path, [long, cut, *records()]).train
    notes = " ".join(train.notes)
    assert "longer than data.sequence and are cut" in notes and "chats in" in notes
    with pytest.raises(DataError, match="no chat has an answer within its first 4 tokens"):
        prepared(tmp_path, sequence=4)


ANSWER = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "x"}, "plain text, not a chat"),
        ({"question": "x", "answer": "y"}, "not a known chat format; its keys are `question`, `answer`"),
        ({"messages": "x"}, "'messages' is not a list of messages"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["x"]}, "message 1 is not an object with a role"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "message 1 has content that is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "message 1 has content that is not",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "a chat without answers"),
        ({"messages": [ANSWER | {"weight": 0}]}, "a chat without answers"),
        ({"messages": [ANSWER], "chat_template_kwargs": "x"}, '"chat_template_kwargs" is not an object'),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, "half a surrogate pair"),
    ],
)
def test_a_record_that_is_no_chat_is_named(tmp_path, record, said):
    lines = [*records(3), record, *records(2)]
    with pytest.raises(DataError, match=rf"chats.jsonl:4: .*{said}"):
        prepared(tmp_path, lines)


def test_a_record_that_the_template_refuses_is_named(tmp_path):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('the first is the user') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match=r"chats.jsonl:3: .*refuses the conversation: the first is the user"):
        prepared(tmp_path, [*records(2), {"messages": [ANSWER]}], template=strict)


@pytest.mark.slow
def test_a_template_that_takes_all_memory_or_never_ends_is_an_error_of_its_record(tmp_path):
    huge = "{{ 'x' | center(10**10 if messages | length > 9 else 1) }}" + CHATML
    with pytest.raises(DataError, match=r"chats.jsonl:3: .*it takes too much memory"):
        prepared(tmp_path, [*records(2), {"messages": [ANSWER] * 10}, *records(2)], template=huge)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    late = pytest.raises(ConfigError, match=r"cannot render the conversation: it took longer than 0\.2 s")
    with closing(ConfinedTemplate(tokenizer(endless), seconds=0.2)) as template, late:
        template.samples([ANSWER], {})


def test_parts_of_text_are_joined_and_tools_reach_the_template(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    lines = [{"messages": [{"role": "user", "content": parts}, ANSWER], "tools": [{"name": "f"}]}, *records(4)]
    corpus = prepared(tmp_path, lines, template="{{ tools[0].name if tools }}" + CHATML)
    parts = [corpus.train, corpus.held_out]
    tokens = [token for part in parts for index in range(len(part)) for token in part[index]["input_ids"].tolist()]
    assert "f<|im_start|>user\nab" in corpus.tokenizer.engine.decode(tokens, skip_special_tokens=False)


@pytest.mark.slow
def test_a_template_of_ones_own_is_saved_with_the_tokenizer(tmp_path):
    prepared(tmp_path, template=None)
    (tmp_path / "own.jinja").write_text(CHATML)
    data = Data(
        form="chat", tokenizer=str(tmp_path / "tokenizer.json"), template=str(tmp_path / "own.jinja"), sequence=128
    )
    corpus = prepare_source(str(tmp_path / "chats.jsonl"), data, tmp_path / "other")
    assert corpus.tokenizer.companions["chat_template.jinja"].decode() == CHATML
    with pytest.raises(ConfigError, match=r"data.template only applies to chats"):
        Data(template="own.jinja")


def test_without_held_out_chats_all_are_learnt_and_evaluated(tmp_path, caplog):
    corpus = prepared(tmp_path, records(3), held_out=0.0)
    assert corpus.train.documents == corpus.held_out.documents == 3 and "measured on training data" in caplog.text
    assert corpus.train.fingerprint == corpus.held_out.fingerprint
    with pytest.raises(DataError, match=r"the data has no chats to learn[\s\S]*empty"):
        prepared(tmp_path / "none", [], held_out=0.0)
    with pytest.raises(ConfigError, match=r"held_out is 0[\s\S]*0.001 holds out one of few"):
        Data(held_out=0.0)
