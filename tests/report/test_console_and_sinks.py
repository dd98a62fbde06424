"""What a step looks like on a terminal, and the files metrics go to."""

import io
import json
import math

import pytest

from shoestring.report.console import Console
from shoestring.report.sinks import JsonLines, newest_step
from shoestring.training.start import repeated

VALUES = {
    "loss": 2.1341,
    "bits_per_byte": 1.98,
    "lr": 9.8e-4,
    "tokens_per_second": 14_200.0,
    "mfu": 0.31,
    "memory_gib": 0.42,
    "data_wait": 0.03,
}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def lines(steps, *, total, seconds, evaluate=0, **options):
    """The printed lines when each step takes `seconds`."""
    stream, now = io.StringIO(), [0.0]
    console = Console(lambda: total, stream=stream, clock=lambda: now[0], **options)
    for step in steps:
        now[0] += seconds
        console.write(step, VALUES | ({"held_out_loss": 2.0} if evaluate and step % evaluate == 0 else {}))
    console.close()
    return stream.getvalue().splitlines()


def test_a_step_is_one_dense_line():
    line = lines(range(1, 121), total=400, seconds=130 / 280)[-1]
    facts = ["loss 2.134", "bpb 1.98", "lr 9.8e-4", "14.2k tok/s", "mfu 31%", "430 MiB", "waits for data 3%"]
    assert line == " | ".join(["step 120/400", *facts, "eta 2:10"])


def test_a_long_run_prints_at_most_a_line_a_second():
    steps = [int(line.split()[1].split("/")[0]) for line in lines(range(1, 10_001), total=10_000, seconds=0.01)]
    assert steps[0] == 1 and steps[-1] == 10_000
    assert len(steps) <= 102  # 100 seconds, the first and the last


def test_slow_steps_evaluations_and_the_last_step_are_all_shown():
    assert len(lines(range(1, 11), total=10, seconds=2)) == 10
    assert len(lines(range(1, 11), total=10, seconds=2, every=5)) == 3
    shown = lines(range(1, 21), total=20, seconds=0.001, evaluate=10)
    assert [line.split(" |")[0] for line in shown] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "held-out loss 2.000" in shown[1]


def test_a_run_that_stops_early_shows_its_last_step():
    assert lines(range(1, 8), total=100, seconds=0.001)[-1].startswith("step 7/100")


def test_a_resumed_run_reckons_with_its_own_steps():
    assert lines(range(301, 311), total=400, seconds=1)[-1].endswith("eta 1:30")


def test_values_that_are_not_finite_are_shown():
    stream = io.StringIO()
    Console(lambda: 2, stream=stream).write(1, {"loss": math.nan, "tokens_per_second": math.inf, "lr": math.nan})
    assert stream.getvalue() == "step 1/2 | loss nan | lr NaN | ∞ tok/s\n"


@pytest.mark.parametrize("plain", [True, False])
def test_a_terminal_gets_a_bar_with_the_same_facts(monkeypatch, plain):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1") if plain else monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = Console(lambda: 4, stream=stream)
    console.write(1, VALUES)
    console.write(2, VALUES | {"held_out_loss": 2.0})
    console.close()
    text = stream.getvalue()
    for fact in ("2/4", "loss 2.134", "bpb 1.98", "lr 9.8e-4", "14.2k tok/s", "mfu 31%", "430 MiB", "data 3%"):
        assert fact in text
    assert "step 2/4 | loss 2.134 | bpb 1.98 | held-out loss 2.000" in text
    assert ("\x1b[3" in text or "\x1b[9" in text) != plain


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Console(lambda: 4, stream=stream).write(1, VALUES)
    assert stream.getvalue().startswith("step 1/4 | ") and "\x1b" not in stream.getvalue()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_line_is_in_the_file_when_write_returns(tmp_path):
    sink = JsonLines(tmp_path / "new" / "metrics.jsonl")
    sink.write(1, {"loss": 2, "time": 5.0})
    assert json.loads(sink.path.read_text()) == {"step": 1, "time": 5.0, "loss": 2.0}
    sink.write(2, {"loss": math.nan})
    assert math.isnan(json.loads(sink.path.read_text().splitlines()[1])["loss"])
    sink.close()


def test_a_line_cut_short_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    sink = JsonLines(path)
    sink.write(2, {})
    sink.close()
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 2


def test_a_resume_drops_what_it_will_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    sink = JsonLines(path)
    sink.truncate_after(2)
    sink.write(3, {"loss": 1.0})
    sink.close()
    assert steps_in(path) == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_newest_step_is_that_of_the_last_whole_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert newest_step(path) == 0
    path.write_text("")
    assert newest_step(path) == 0
    rows = [f'{{"step": {step}, "loss": 1.0, "note": "{"x" * 100}"}}' for step in range(1, 2000)]
    path.write_text("\n".join(rows) + '\n{"step": 20')
    assert newest_step(path) == 1999


@pytest.mark.parametrize(
    ("resumed", "reached", "said"),
    [
        (None, 0, []),
        (10, 0, ["resumed from step 10"]),
        (10, 10, ["resumed from step 10"]),
        (10, 11, ["resumed from step 10; 1 step is repeated, up to 11"]),
        (10, 13, ["resumed from step 10; 3 steps are repeated, up to 13"]),
        (None, 3, ["there was no checkpoint: 3 steps are repeated, up to 3"]),
    ],
)
def test_a_restart_says_what_is_repeated(resumed, reached, said):
    assert list(repeated(resumed, reached)) == said
