"""In models whose packed texts would see each other, each answer has a row of its own."""

import pytest
import torch

from benchmarks.models import zoo
from shoestring import run as runs
from shoestring.cli import main
from shoestring.core.task import IGNORED
from shoestring.core.world import World
from shoestring.training.data_loading import open_data
from shoestring.training.user_code import import_user_code
from tests.decode.small_server import CHATML, tokenizer
from tests.preference.test_runs import pairs, rows, write

pytest.importorskip("transformers")


@pytest.fixture
def see_each_other(tmp_path):
    """The folder of a BLOOM, in which packed texts see each other, with a chat template."""
    torch.manual_seed(0)
    zoo.build("bloom", dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer(CHATML).save(tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


def flags(see_each_other, tmp_path, form):
    if form == "preference":
        data = write(tmp_path / "pairs.jsonl", pairs(40))
    else:
        rated = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for number, pair in enumerate(pairs(40))
            for side in ("chosen", "rejected")[number % 2 : number % 2 + 1]
        ]
        data = write(tmp_path / "rated.jsonl", rated)
    return [
        "--model", f"hf:{see_each_other}", "--data", data, "--folder", str(tmp_path / "run"), "--data.form", form,
        "--data.sequence", "96", "--data.held_out", "0.3", "--epochs", "0", "--steps", "12", "--batch", "8",
        "--accumulate", "2", "--evaluate_every", "6", "--save_best", "false", "--optim.adamw.lr", "1e-2",
        "--memory.lora.rank", "4",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_learns_there_too_and_says_what_it_costs(see_each_other, tmp_path, capsys, caplog):
    arguments = flags(see_each_other, tmp_path, "preference")
    assert main(["check", "preference", *arguments]) == 0
    line = "each sample holds one preference, with one answer a row, because packed answers would see each other"
    assert (capsys.readouterr().err + caplog.text).count(line) == 1
    caplog.clear()
    assert main(["train", "preference", *arguments]) == 0
    assert (capsys.readouterr().err + caplog.text).count(line) == 1
    metrics = rows(tmp_path / "run")
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert metrics[-1]["held_out_reward_accuracy"] > 0.8 and metrics[-1]["held_out_kl_per_token"] > 0


@pytest.mark.parametrize("form", ["preference", "rated"])
def test_rows_hold_the_answers_that_packed_samples_hold(see_each_other, tmp_path, form):
    _, document = runs.read("preference")
    words = flags(see_each_other, tmp_path, form)
    document["run"] |= {"model": words[1], "data": words[3], "folder": words[5]}
    document["data"] |= {"form": form, "sequence": 96, "held_out": 0.3}
    if form == "rated":
        document["preference"] = {"kto": {}}
    run = runs.parse(document, name="rows")
    data = open_data(run, World(), tmp_path / "prepared", import_user_code(run))

    def answers(part):
        """(prompt and answer, labels, kind) of each answer of each record."""
        found = set()
        for sample in (part[index] for index in range(len(part))):
            if part.packed:
                values = sample["answers"]
                cuts = [values == number for number in values.unique().tolist() if number >= 0]
                group = [(sample["input_ids"][cut], sample["labels"][cut], int(values[cut][0]) % 3) for cut in cuts]
            else:
                assert len(sample["input_ids"]) == 2 and "position_ids" not in sample
                group = []
                for inputs, labels, values in zip(
                    *(sample[n] for n in ("input_ids", "labels", "answers")), strict=True
                ):
                    own = values >= 0
                    assert not inputs[~own].any() and (labels[~own] == IGNORED).all()
                    group.append((inputs[own], labels[own], int(values[0])))
            found |= {(tuple(inputs.tolist()), tuple(labels.tolist()), kind) for inputs, labels, kind in group}
        return found

    for part in (data.train, data.held_out):
        assert not part.packed and len(part) == part.documents
        with pytest.raises(IndexError):
            part[len(part)]
        whole = type(part)(part.path, 256)
        assert answers(part) == answers(whole) != set()
        assert part.fingerprint != whole.fingerprint
        assert " ".join(part.notes).count("one row of") == 1


def test_an_answer_alone_has_the_whole_sequence(see_each_other, tmp_path):
    """A pair that would not fit into a packed sample fits in rows; what is longer is left out, and never cut."""
    _, document = runs.read("preference")
    long = {"prompt": "a", "chosen": "x " * 25, "rejected": "y " * 25}
    document["run"] |= {"model": f"hf:{see_each_other}", "folder": str(tmp_path / "run")}
    document["run"]["data"] = write(tmp_path / "pairs.jsonl", [*pairs(10), long, long | {"chosen": "x " * 99}])
    document["data"] |= {"sequence": 96, "held_out": 0.3}
    run = runs.parse(document, name="rows")
    data = open_data(run, World(), tmp_path / "prepared", import_user_code(run))
    parts = data.train, data.held_out
    assert sum(part.left_out for part in parts) == 1
    assert sum(type(part)(part.path, 96).left_out for part in parts) > 1
