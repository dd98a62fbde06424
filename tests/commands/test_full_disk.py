"""A full disk ends a verb with one line, whichever write it meets; nothing is left, and the next attempt succeeds."""

import io
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from shoestring.cli import main
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from tests.small_disk import needs_root, on_small_disk, resize
from tests.small_runs import write_run_file, write_texts

pytestmark = needs_root
SHAPE = GPTConfig(vocab_size=257, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
PAGE = os.sysconf("SC_PAGE_SIZE")
ENOUGH = 64 << 20
FILLER = "filler"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a model, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "model").mkdir()
    torch.manual_seed(0)
    save_pretrained(GPT(SHAPE), folder / "model")
    byte_tokenizer().save(folder / "model/tokenizer.json")
    assert main(["checkpoint", "import", str(folder / "model"), "--to", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of that model's kind, with all that a run writes."""
    folder = tmp_path_factory.mktemp("trained")
    tables = {"run": {"data": write_texts(folder / "texts"), "steps": 3, "folder": str(folder / "run")}}
    assert main(["train", str(write_run_file(folder / "run.toml", tables))]) == 0
    shutil.copytree(folder / "run", folder / "again")
    return folder / "run"


def names(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def check_full(place, command, sizes):
    """Run a command on disks of these sizes, beside a page that is used, then on one that has room."""
    errors = 0
    (place / FILLER).write_bytes(bytes(PAGE))
    for size in sizes:
        resize(place, size)
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            code = main(command)
        if code:
            message = said.getvalue()
            assert code == 2 and message.count("error: ") == 1 and "No space left on device" in message, message
            assert len(message.strip().splitlines()) == 3 and "hint: " in message, message
            assert names(place) == [FILLER], (size, names(place))
            errors += 1
        else:
            break
    assert errors > 0
    resize(place, ENOUGH)
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        assert not code or main(command) == 0
    assert len(names(place)) > 1


COMMANDS = {
    "quantize": ["quantize", "{model}", "--out", "{place}/out"],
    "gguf": ["quantize", "{model}", "--format", "gguf", "--out", "{place}/deep/out.gguf"],
    "prune": ["prune", "{model}", "--out", "{place}/out"],
    "packed": ["prune", "{model}", "--format", "packed", "--out", "{place}/deep/out"],
    "safetensors": ["checkpoint", "export", "{run}", "--as", "safetensors", "--to", "{place}/out"],
    "dcp": ["checkpoint", "export", "{run}", "--as", "dcp", "--to", "{place}/out"],
    "import": ["checkpoint", "import", "{model}", "--to", "{place}/run"],
}


def filled(command, sources, place):
    return [part.format(model=sources / "model", run=sources / "run", place=place) for part in command]


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_full_disk_is_one_line_and_nothing_is_left(verb, sources, tmp_path):
    command = filled(COMMANDS[verb], sources, tmp_path)
    assert on_small_disk(tmp_path, PAGE, lambda: check_full(tmp_path, command, [4 * PAGE, 10 * PAGE])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_whichever_write_meets_a_full_disk(verb, sources, tmp_path):
    command = filled(COMMANDS[verb], sources, tmp_path)
    sizes = range(PAGE, 200 * PAGE, PAGE)
    assert on_small_disk(tmp_path, PAGE, lambda: check_full(tmp_path, command, sizes)) == 0


OF_RUNS = {
    "hf": ["checkpoint", "export", "{run}", "--as", "hf", "--to", "{place}/out"],
    "wanda": ["prune", "{run}", "--method", "wanda", "--samples", "2", "--sequence", "16", "--out", "{place}/out"],
    "skip": ["skip", "{run}", "--share", "0.1", "--out", "{place}/plan.json"],
    "trace": ["report", "{run}", "--trace", "{place}/trace.json"],
    "compare": ["compare", "{run}", "{run}/../again", "--out", "{place}/compare.html"],
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", OF_RUNS)
def test_whichever_write_of_a_run_meets_a_full_disk(verb, trained, tmp_path):
    command = [part.format(run=trained, place=tmp_path) for part in OF_RUNS[verb]]
    sizes = range(PAGE, 100 * PAGE, PAGE)
    assert on_small_disk(tmp_path, PAGE, lambda: check_full(tmp_path, command, sizes)) == 0


@pytest.mark.slow
def test_a_run_on_a_full_disk_is_resumed_once_there_is_room(trained, tmp_path):
    more = ["--run.folder", str(tmp_path / "run"), "--checkpoint.tiered.memory_folder", str(tmp_path / "memory")]
    command = ["train", str(trained), *more, "--run.resume", "auto"]

    def work():
        for size in range(2 * PAGE, 100 * PAGE, 2 * PAGE):
            resize(tmp_path, size)
            said = io.StringIO()
            with redirect_stderr(said), redirect_stdout(io.StringIO()):
                if not main(command):
                    return
            assert said.getvalue().count("error: ") == 1 and "No space left on device" in said.getvalue()
        resize(tmp_path, ENOUGH)
        assert main(command) == 0

    assert on_small_disk(tmp_path, PAGE, work) == 0
