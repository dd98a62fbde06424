"""What users get wrong, through the command line: one clear line, code 2, nothing left half-written."""

import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from shoestring.cli import main
from shoestring.data.tokenizer import byte_tokenizer

RUN = """
[run]
data = "text/*.txt"
steps = 3
batch = 4
folder = "out"
[data]
tokenizer = "bytes"
sequence = 16
held_out = 0.2
[model]
dim = 16
layers = 1
heads = 2
kv_heads = 1
hidden = 16
"""
TOY = """
[run]
model = "toy:model"
data = "toy:samples"
loss = "toy:recorded"
steps = 4
batch = 8
folder = "out"
[checkpoint.plain]
every = 1
keep = 1
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with run files and a small corpus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ranks.HERE)])
    draw = random.Random(0)
    (tmp_path / "text").mkdir()
    for number in range(5):
        words = ["".join(draw.choices("abcdef", k=4)) for _ in range(40)]
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(words))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "toy.toml").write_text(TOY)
    lower = json.loads(byte_tokenizer().engine.to_str()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "lower.json").write_text(json.dumps(lower))
    (tmp_path / "not.toml").write_text("[run\nsteps = ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short-a.txt").write_text("short")
    (tmp_path / "short-b.txt").write_text("brief")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "file").write_text("")
    return tmp_path


def without_free(text):
    """A message without how much memory is free, which differs from one moment to the next."""
    return re.sub(r"[\d.]+ \S+ free", "… free", text)


def refused(capsys, *arguments):
    """The error's line and hint, after the checks that hold for all of them; `check` says the same."""
    code = main(["train", *arguments])
    said = capsys.readouterr().err
    assert main(["check", *arguments]) == code
    assert without_free(capsys.readouterr().err) == without_free(said)
    assert code == 2, said
    line, _, hint = said.partition("\n\nhint: ")
    assert line.startswith("error: ") and "\n" not in line.strip(), said
    assert "Traceback" not in said
    left = [path.as_posix() for path in Path().rglob("*") if path.name in ("run.toml", "environment.json")]
    assert left == ["run.toml"], left
    assert not [path for path in Path().rglob("*") if path.name.endswith(".tmp") or path.name.endswith(".part")]
    return line.strip(), hint.strip()


CASES = {
    "unknown table": (["--optimizer.adamw.lr", "1"], r"unknown table \[optimizer\]", "did you mean `optim`"),
    "unknown technique": (["--optim.adamv.lr", "1"], r"unknown technique \[optim.adamv\]", "did you mean `adamw`"),
    "removed technique": (
        ["--comm.oktopk.density", "0.1"],
        "`comm.oktopk` is no longer a setting",
        "write [comm.topk]",
    ),
    "unknown key": (["--run.stpes", "3"], r"unknown key `stpes` in \[run\]", "did you mean `steps`"),
    "unknown key of a feature": (["--optim.adamw.rl", "1"], r"unknown key `rl` in \[optim.adamw\]", "lr"),
    "wrong type": (["--run.steps", "many"], "`run.steps` must be a whole number, got 'many'", ""),
    "wrong choice": (["--optim.schedule.shape", "cosin"], "`optim.schedule.shape` cannot be 'cosin'", "`cosine`"),
    "value for a table": (["--optim", "3"], "unknown key `optim` in", ""),
    "a string for a list": (["--run.sinks", "tensorboard"], "`run.sinks` must be a list of strings", ""),
    "no value": (["--run.steps"], "`--run.steps` needs a value", ""),
    "no flag": (["steps"], "unexpected argument `steps`", "--area.technique.field value"),
    "zero steps": (["--run.steps", "0"], "`run.steps` must be at least 1, got 0", ""),
    "negative batch": (["--run.batch", "-4"], "`run.batch` must be at least 1, got -4", ""),
    "zero micro-batches": (["--run.accumulate", "0"], "`run.accumulate` must be at least 1", ""),
    "negative minutes": (["--run.minutes", "-1"], "`run.minutes` must be zero or a positive number", ""),
    "minutes that are no number": (["--run.minutes", "nan"], "`run.minutes` must be a finite number, got nan", ""),
    "endless": (["--run.minutes", "inf"], "`run.minutes` must be a finite number, got inf", ""),
    "endless timeout": (["--run.timeout", "inf"], "`run.timeout` must be a finite number, got inf", ""),
    "endless rate": (["--optim.adamw.lr", "inf"], "`optim.adamw.lr` must be a finite number, got inf", ""),
    "unbounded to the other side": (["--optim.clip.max_norm", "-inf"], "`optim.clip.max_norm` must be a finite", ""),
    "batch beyond memory": (["--run.batch", str(10**12)], "B on this host, which has", "lower run.batch"),
    "negative seed": (["--run.seed", "-1"], "`run.seed` must be zero or a positive number", ""),
    "huge seed": (["--run.seed", str(2**70)], "`run.seed` must be zero or a positive number", ""),
    "zero rate": (["--optim.adamw.lr", "0"], "`optim.adamw.lr` must be a positive number", ""),
    "long warm-up": (["--optim.schedule.warmup", "9"], "`optim.schedule.warmup` of 9 steps", "set it to"),
    "negative every": (["--checkpoint.plain.every", "-1"], "`checkpoint.plain.every` must not be negative", ""),
    "negative sequence": (["--data.sequence", "-1"], "data.sequence is -1", ""),
    "all held out": (["--data.held_out", "1.0"], "data.held_out is 1.0", ""),
    "negative loader workers": (["--data.workers", "-1"], "data.workers is -1", ""),
    "missing file": (["--run.data", "missing.txt"], "no file 'missing.txt'", ""),
    "no match": (["--run.data", "missing/*.txt"], "no file matches", ""),
    "a folder": (["--run.data", "text"], "is a folder", "text/**/*.txt"),
    "empty corpus": (["--run.data", "empty.txt"], "the corpus is empty", ""),
    "one document": (["--run.data", "text/0.txt"], "one document", "more documents"),
    "short corpus": (["--run.data", "short-*.txt"], "fewer than one sample of 16", "data.sequence"),
    "binary file": (["--run.data", "binary.txt,text/*.txt"], "binary.txt is not text", ""),
    "missing tokenizer": (["--data.tokenizer", "missing.json"], "missing.json", ""),
    "tokenizer that loses text": (["--data.tokenizer", "lower.json"], "lower.json loses text", "byte-level"),
    "no such module": (["--run.model", "no.such:model"], "`run.model`: cannot import `no.such`", ""),
    "module that fails": (["--run.model", "broken:model"], "cannot import `broken`: ModuleNotFoundError", ""),
    "no such callable": (["--run.model", "shoestring.models.gpt:tny"], "has no callable `tny`", "tiny"),
    "no callable": (["--run.model", "shoestring.models.gpt"], "not of the form `package.module:callable`", ""),
    "not a model": (["--run.model", "builtins:dict"], "not an nn.Module", ""),
    "unknown model argument": (["--model.dimm", "16"], "unknown model setting `dimm`", "did you mean `dim`"),
    "wrong model argument": (["--model.dim", "wide"], "GPTConfig.dim is 'wide'", ""),
    "dim by heads": (["--model.heads", "3"], "is not a multiple of heads", ""),
    "batch by micro-batches": (["--run.accumulate", "3"], "a batch of 4 is not divisible", "nearest batch"),
    "context": (["--model.context", "8"], "exceed the model's context of 8", ""),
    "unwritable folder": (["--run.folder", "file/run"], "cannot write the run folder `file/run`", "--run.folder"),
    "nothing to resume": (["--run.resume", "true"], "`out` holds no run to resume", "--run.resume auto"),
    "no model": (
        ["--run.model", "no-such-folder", "--data.tokenizer", "model"],
        "there is no model `no-such-folder`: it is no folder",
        "hf:NAME",
    ),
    "profile after the end": (["--profile.callpaths.after", "9"], "and the run ends after 3 steps", "2 or"),
    "trace after the end": (["--memory.tracing.after", "9"], "and the run ends after 3 steps", "2 or less"),
    "resume from nowhere": (["--run.resume", "missing"], "`missing` holds no checkpoint", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case, here, capsys):
    flags, message, hint = CASES[case]
    said, hinted = refused(capsys, "run.toml", *flags)
    assert re.search(message, said), said
    assert hint in hinted


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("not.toml", "`not.toml` is not TOML"),
        ("binary.toml", "`binary.toml` is not TOML"),
        ("missing.toml", "there is no run file `missing.toml`"),
        ("quikstart", "there is no run file or recipe `quikstart`"),
    ],
)
def test_a_source_that_is_no_run_file(source, message, here, capsys):
    assert message in refused(capsys, source)[0]


REFUSED_BEFORE = (
    "endless rate", "endless timeout", "missing file", "no match", "a folder", "missing tokenizer",
    "tokenizer that loses text", "no such module", "unknown model argument", "dim by heads",
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_BEFORE)
def test_check_refuses_what_training_would(case, here, capsys):
    flags, message, hint = CASES[case]
    assert main(["check", "run.toml", *flags]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and hint in said and "Traceback" not in said
    assert not Path("out").exists()


def test_check_counts_the_parameters_that_training_has(here, capsys):
    """Byte tokenizers have 257 tokens, whatever `data.vocabulary` is."""
    assert main(["check", "run.toml"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters: "))
    assert main(["train", "run.toml"]) == 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert line == f"parameters: {summary['parameters']:,}"


ADDS = """
from dataclasses import dataclass
from tests.features.newcomer import lora

@dataclass(frozen=True, kw_only=True)
class LoRA(lora.LoRA):
    pass
"""


def test_parameters_that_a_feature_adds_are_counted_or_named(here, capsys, caplog):
    caplog.set_level(logging.INFO, "shoestring")
    (here / "adds.py").write_text(ADDS)
    (here / "run.toml").write_text(RUN.replace("[run]", '[adds.lora]\nlayers = ["down"]\n[run]\npackages = ["adds"]'))
    assert main(["trust", "run.toml"]) == 0
    assert main(["check", "run.toml"]) == 0
    line = re.search(r"parameters: ([\d,]+), without those that adds.lora will add", capsys.readouterr().out)
    assert line
    assert main(["train", "run.toml"]) == 0
    added, frozen = 4 * (16 + 16), 16 * 16  # a product of two matrices of rank 4 beside the frozen weight
    total = int(line[1].replace(",", "")) + added
    assert f", {total:,} parameters, {total - frozen:,} of them trained" in caplog.text


def test_arguments_of_a_function_that_takes_no_others(here, capsys):
    said, hint = refused(capsys, "toy.toml", "--model.widht", "8")
    assert "`toy:model` takes no argument `widht`" in said and hint == "did you mean `width`?"
    said, _ = refused(capsys, "toy.toml", "--run.model", "toy:weightless")
    assert "`toy:weightless` has no trainable parameters" in said


def test_a_refused_run_can_be_mended_in_its_folder(here, capsys):
    refused(capsys, "run.toml", "--model.heads", "3")
    assert main(["train", "run.toml"]) == 0
    assert json.loads(Path("out/summary.json").read_text())["status"] == "finished"


def test_the_folder_of_another_run_is_not_touched(here, capsys):
    assert main(["train", "toy.toml"]) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    cases = {
        (): "`out` holds a run already",
        (
            "--run.resume",
            "auto",
            "--run.seed",
            "5",
        ): "another run: its `run.seed` is 0, this one's is 5",
        ("--run.resume", "true", "--model.width", "8"): "`out` belongs to another run: its `model` is {}",
    }
    for flags, message in cases.items():
        capsys.readouterr()
        assert main(["train", "toy.toml", *flags]) == 2
        said = capsys.readouterr().err
        assert message in said and "hint: " in said
        assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_a_loss_that_is_not_a_number_says_where_and_keeps_the_last_good_state(here, capsys):
    assert main(["train", "toy.toml", "--run.loss", "toy:poisoned", "--run.steps", "6"]) == 2
    said = capsys.readouterr().err
    step = int(said.split("the loss became nan at step ")[1].split("\n")[0])
    saves = [path.name for path in Path("out/checkpoints").iterdir()]
    assert 1 < step <= 6 and saves == [f"step-{step - 1:08d}.safetensors"]
    assert "Traceback" not in said and "hint: the last checkpoint is good" in said
    assert main(["train", "toy.toml", "--run.steps", "6", "--run.resume", "auto"]) == 0


@pytest.fixture
def small_disk(here):
    folder = here / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("saves", ["disk/out/checkpoints", "elsewhere"])
@pytest.mark.parametrize("free", [0, 8192, 49_152, 131_072])
def test_a_full_disk_is_one_line_and_leaves_what_is_whole(small_disk, free, saves, capsys):
    """Whichever file it is that finds no room: the run file, the metrics, a checkpoint, the model, the report."""
    usage = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"0" * (usage.f_bavail * usage.f_bsize - free))
    flags = ["--run.folder", "disk/out", "--checkpoint.plain.folder", str(Path(saves).absolute())]
    flags += ["--model.width", "32"]
    assert main(["train", "toy.toml", *flags]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and "No space left on device" in said and "disk/out" in said
    assert not [path for path in small_disk.rglob("*") if path.name.endswith((".tmp", ".part"))]
    (small_disk / "filler").unlink()
    assert main(["train", "toy.toml", *flags, "--run.resume", "auto"]) == 0


def two_workers(*flags):
    command = [sys.executable, "-m", "shoestring", "train", *flags, "--workers", "2"]
    return subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["run.toml", "--run.batch", "3"], "error: a batch of 3 is not divisible by 2 ranks"),
        pytest.param(["toy.toml", "--run.loss", "toy:poisoned"], "the loss became nan at step", marks=pytest.mark.slow),
    ],
)
def test_two_workers_say_it_once_and_without_a_table(flags, message, here):
    done = two_workers(*flags)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1 and message in done.stderr
    for noise in ("Traceback", "====", "FAILED", "torch", "{'message'"):
        assert noise not in done.stderr, done.stderr
