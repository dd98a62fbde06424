"""Runs that learn from preferences, from the command line and from files."""

import json
import random

import pytest
import tomli_w
import torch

from shoestring.cli import main
from shoestring.core.errors import DataError
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.data.preferences import KINDS
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.saving import save_model
from shoestring.run import read
from tests.decode.small_server import CHATML, tokenizer

WORDS = ["red", "blue", "green", "one", "two", "three", "cat", "dog", "sun", "sea"]


def pairs(count, seed=0):
    """Questions whose better answer is the longer one of two drawn texts, known to whoever draws them."""
    drawn = random.Random(seed)
    text = lambda most: " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))  # noqa: E731
    records = []
    for number in range(count):
        chosen = f"{text(3)} yes"
        records.append({"prompt": f"{number} {text(4)}?", "chosen": chosen, "rejected": f"{text(3)} no"})
    return records


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small model with a chat template."""
    folder, words = tmp_path_factory.mktemp("base"), tokenizer(CHATML)
    torch.manual_seed(0)
    shape = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 64}
    net = GPT(GPTConfig(vocab_size=words.vocab_size, context=256, **shape))
    origin = {"model": "shoestring.models.gpt:tiny", "arguments": {}, "offered": {"context": 256}}
    save_model(net, words, folder, origin)
    return folder


def train(base, data, folder, *flags, steps=20):
    return main(
        [
            "train", "preference", "--model", str(base), "--data", data, "--folder", str(folder),
            "--data.sequence", "128", "--epochs", "0", "--steps", str(steps), "--batch", "8", "--accumulate", "1",
            "--evaluate_every", "0", "--save_best", "false", "--optim.adamw.lr", "1e-2",
            "--memory.lora.rank", "4", *flags,
        ]
    )  # fmt: skip


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_recipe_learns_which_answer_is_better(base, tmp_path):
    data = write(tmp_path / "pairs.jsonl", pairs(200))
    assert train(base, data, tmp_path / "run", steps=30) == 0
    metrics = rows(tmp_path / "run")
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are the same at first
    assert metrics[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    (last,) = (row for row in metrics[-1:])
    assert last["held_out_reward_accuracy"] > 0.9 and last["held_out_loss"] < 0.6
    assert "held_out_bits_per_byte" not in last


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simpo", "orpo", "kto"])
def test_other_objectives_learn_it_too(base, tmp_path, name):
    data, form = write(tmp_path / "pairs.jsonl", pairs(60)), "rated" if name == "kto" else "preference"
    run = tmp_path / "run.toml"
    _, document = read("preference")
    document["preference"] = {name: {}}
    document["data"]["form"] = form
    run.write_text(tomli_w.dumps(document))
    flags = ["--model", str(base), "--data", data, "--folder", str(tmp_path / "run"), "--data.sequence", "256"]
    flags += ["--epochs", "0", "--steps", "15", "--batch", "8", "--accumulate", "1", "--evaluate_every", "0"]
    flags += ["--save_best", "false", "--optim.adamw.lr", "1e-2"]
    assert main(["train", str(run), *flags]) == 0
    assert rows(tmp_path / "run")[-1]["held_out_reward_accuracy"] > 0.8


def test_answers_of_a_record_share_a_sample_and_none_is_cut(tmp_path):
    records = [*pairs(30), {"prompt": "long", "chosen": "x " * 200, "rejected": "y"}]
    template = tmp_path / "t.jinja"
    template.write_text(CHATML)
    tokenizer(CHATML).save(tmp_path / "tokenizer.json")
    settings = Data(form="preference", tokenizer=str(tmp_path / "tokenizer.json"), sequence=128, held_out=0.2)
    corpus = prepare_source(write(tmp_path / "p.jsonl", records), settings, tmp_path / "prepared")
    assert corpus.train.left_out + corpus.held_out.left_out == 1
    texts = set()
    for part in (corpus.train, corpus.held_out):
        for sample in (part[index] for index in range(len(part))):
            learnt = sample["labels"] >= 0
            for number in range(int(sample["answers"].max()) // KINDS + 1):
                sides = []
                for kind in (0, 1):
                    own = sample["answers"] == KINDS * number + kind
                    assert sample["position_ids"][own].tolist() == list(range(int(own.sum())))
                    sides.append(
                        corpus.tokenizer.engine.decode(
                            sample["labels"][own & learnt].tolist(), skip_special_tokens=False
                        )
                    )
                texts.add(tuple(sides))
    assert texts == {(f"{r['chosen']}<|im_end|>", f"{r['rejected']}<|im_end|>") for r in records[:-1]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ":3: the chosen and the rejected answer are identical"),
        ({"prompt": "a", "completion": "b", "label": True}, ":3: a rated answer, but pairs are needed"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            ":3: not a preference, but a record of the format messages",
        ),
        ({"prompt": "a", "chosen": "b"}, ":3: "),
        ({"prompt": "", "chosen": "b", "rejected": 1}, ":3: "),
    ],
)
def test_records_that_hold_no_pair_are_refused_by_their_line(record, message, tmp_path):
    tokenizer(CHATML).save(tmp_path / "tokenizer.json")
    settings = Data(form="preference", tokenizer=str(tmp_path / "tokenizer.json"), sequence=128, held_out=0.2)
    with pytest.raises(DataError, match=message):
        prepare_source(write(tmp_path / "p.jsonl", [*pairs(2), record]), settings, tmp_path / "prepared")


def test_forms_and_objectives_that_do_not_fit_are_refused(base, tmp_path, capsys):
    data = write(tmp_path / "pairs.jsonl", pairs(20))
    assert train(base, data, tmp_path / "run", "--data.form", "chat") == 2
    assert '`preference.dpo` does not learn from data.form "chat"' in capsys.readouterr().err
    assert main(["check", "finetune", "--model", str(base), "--data", data, "--data.form", "preference"]) == 2
    assert "no feature learns from it" in capsys.readouterr().err


def test_check_and_report_know_it(base, tmp_path, capsys):
    data = write(tmp_path / "pairs.jsonl", pairs(20))
    flags = ["--model", str(base), "--data", data, "--data.sequence", "128", "--batch", "4", "--accumulate", "1"]
    assert main(["check", "preference", *flags]) == 0
    said = capsys.readouterr().out
    assert "preference.dpo" in said and "memory" in said.lower() and "not predicted" not in said
