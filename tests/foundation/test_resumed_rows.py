"""What a run that is resumed writes and says: no evaluation twice, what becomes of the rate, and which keys changed."""

import json
import os
from collections import Counter
from threading import Thread

import pytest

from shoestring.cli import main
from shoestring.training.evaluation import Best
from tests.small_runs import write_run_file, write_texts


def write_run(place, **run):
    given = {"data": write_texts(place / "texts"), "folder": str(place / "run"), "resume": "auto", "steps": 4}
    tables = {"run": given | {"evaluate_every": 2} | run, "optim": {"schedule": {"warmup": 1, "shape": "cosine"}}}
    return write_run_file(place / "run.toml", tables | {"checkpoint": {"plain": {"every": 2}}})


def evaluations(folder):
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return Counter(row["step"] for row in rows if "loss" not in row)


def losses(folder):
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "loss" in row]


def scalars(folder):
    """(tag, step) of what TensorBoard has."""
    reservoir = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reservoir.EventAccumulator(str(folder / "run/tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return Counter((tag, event.step) for tag in found.Tags()["scalars"] for event in found.Scalars(tag))


def test_a_finished_run_that_is_started_again_and_trained_for_longer_says_each_thing_once(tmp_path, caplog):
    file = str(write_run(tmp_path))
    for _ in range(2):
        assert main(["train", file]) == 0
        assert evaluations(tmp_path) == {2: 1, 4: 1}
        assert "learning rate goes" not in caplog.text
    assert main(["train", file, "--run.steps", "8"]) == 0
    assert evaluations(tmp_path) == {2: 1, 4: 1, 6: 1, 8: 1} and losses(tmp_path) == list(range(1, 9))
    rates = [json.loads(line).get("lr") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    _, _, _, last, after, *_ = [rate for rate in rates if rate is not None]
    (line,) = [record.message for record in caplog.records if "learning rate goes" in record.message]
    assert line == (
        f"the schedule was for 4 steps and is now for 8: the learning rate goes from {last:.3g} at step 4 "
        f"to {after:.3g} at the next"
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"save_best": True}, {"patience": 9}], ids=["plain", "best", "patience"])
def test_no_row_is_written_twice_by_any_sink(more, tmp_path, monkeypatch):
    """The run is killed after each evaluation in turn, is resumed, and is started again when it is finished."""
    file = str(write_run(tmp_path, sinks=["tensorboard"], **more))
    real = Best.take

    class Killed(BaseException):
        pass

    def dies_at(killed_at):
        """Right after the evaluation of a step was written, and before any checkpoint knows of it."""

        def take(best, step, loss):
            if step == killed_at:
                raise Killed
            return real(best, step, loss)

        return take

    for at in (2, 4, 4):
        if more:
            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(Best, "take", dies_at(at))
                main(["train", file])
        else:
            assert main(["train", file, "--run.steps", str(at)]) == 0
    for _ in range(2):
        assert main(["train", file]) == 0
    assert evaluations(tmp_path) == {2: 1, 4: 1} and losses(tmp_path) == [1, 2, 3, 4]
    assert set(scalars(tmp_path).values()) == {1}


def test_changed_settings_are_told_key_by_key(tmp_path, capsys):
    file = str(write_run(tmp_path))
    assert main(["train", file]) == 0
    capsys.readouterr()
    assert main(["train", file, "--data.sequence", "8", "--data.held_out", "0.2"]) == 2
    message = capsys.readouterr().err
    assert "its `data.held_out` is 0.3, this one's is 0.2; its `data.sequence` is 16, this one's is 8" in message
    assert "{" not in message


def test_pipes_are_refused_for_what_they_are(tmp_path, capsys):
    os.mkfifo(tmp_path / "run.toml")
    os.mkfifo(tmp_path / "text.txt")
    assert main(["check", str(tmp_path / "run.toml")]) == 2
    assert "is a pipe or a device, not a file" in capsys.readouterr().err
    for source in (f"{tmp_path}/text.txt,{tmp_path}/text.txt", "/dev/null"):
        file = write_run_file(tmp_path / "good.toml", {"run": {"data": source}})
        assert main(["check", str(file)]) == 2
        assert "is a pipe or a device, not a file" in capsys.readouterr().err


def test_a_run_reads_a_pipe_once_and_is_resumed_without_it(tmp_path, caplog):
    pipe = tmp_path / "texts.jsonl"
    os.mkfifo(pipe)
    file = str(write_run(tmp_path, data=str(pipe)))
    assert main(["check", file]) == 0  # which does not open it
    lines = "".join(json.dumps({"text": f"text {number}: {'some text ' * 9}"}) + "\n" for number in range(40))
    writer = Thread(target=pipe.write_text, args=(lines,))
    writer.start()
    assert main(["train", file]) == 0
    writer.join()
    pipe.unlink()
    os.mkfifo(pipe)  # nobody writes to it
    assert main(["train", file, "--run.steps", "6"]) == 0
    assert losses(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert f"is what {pipe} gave when it was first read" in caplog.text


def test_a_working_folder_that_was_removed_is_one_line(tmp_path, capsys, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check", "quickstart"]) == 2
    assert capsys.readouterr().err.startswith("error: the working folder has been removed\n")


@pytest.mark.slow
def test_names_that_are_not_utf8_are_names(tmp_path, monkeypatch, capfdbinary):
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    file = write_run(folder, folder="run", data=str(tmp_path / "texts/*.txt"))
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / os.fsdecode(b"\xfe.txt")).write_text("a text like others " * 20)
    monkeypatch.chdir(folder)
    for command in (
        ["train", file.name], ["train", file.name, "--run.steps", "6"], ["checkpoint", "ls", "run"],
        ["checkpoint", "verify", "run"], ["report", "run"], ["quantize", "run", "--out", "q"],
        ["checkpoint", "export", "run", "--as", "hf", "--to", "e"],
    ):  # fmt: skip
        assert main(command) == 0, command
    assert b"Traceback" not in capfdbinary.readouterr().err
