"""`shoestring checkpoint` as a user types it."""

import json
import shutil
import subprocess
import sys
from contextlib import closing

import pytest
import saving_ranks
import torch
from safetensors.torch import load_file

from shoestring.checkpoint import Plain, Tiered, attach
from shoestring.checkpoint.tiers import file_acts
from shoestring.checkpoint.tiers.claim import LOCK
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.models.loading import load_model
from shoestring.testing import jobs
from shoestring.verbs.archive import COMPLETE, Archive
from shoestring.verbs.trim import users
from tests.small_runs import write_run_file, write_texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run of a small Llama."""
    root = tmp_path_factory.mktemp("archive")
    folder = root / "run"
    run = {"data": write_texts(root), "steps": 4, "folder": str(folder)}
    tiered = {"memory_folder": str(root / "memory"), "memory_every": 0, "disk_every": 2}
    file = write_run_file(root / "run.toml", {"run": run, "checkpoint": {"tiered": tiered}})
    assert main(["train", str(file)]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that folder, which a test may damage."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("*.tokens"))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """The folder of a run that has died: step 1 is on disk, and step 2 in memory."""
    folder = tmp_path_factory.mktemp("dead") / "run"
    saving_ranks.train(folder=str(folder), steps=1, total=1)
    settings = {"memory_every": 2, "disk_every": 0}
    saving_ranks.train(folder=str(folder), steps=2, total=9, resume=True, settings=settings)
    text = '[run]\nmodel = "shoestring.testing.jobs:tiny"\n[checkpoint.tiered]\nmemory = "{}"\n'
    (folder / "run.toml").write_text(text.format(folder / "memory"))
    return folder


def told(capsys, *arguments, code=0):
    """What a verb prints as JSON."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["checkpoint", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    return err


def steps(rows):
    return [(row["step"], row["level"], row["state"]) for row in rows]


def flip(path, at=-100):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def of(run, step):
    return next((run / "checkpoints").glob(f"step-{step:08d}-*"))


def test_ls_lists_what_is_there_in_whatever_state(run, capsys):
    rows = told(capsys, "ls", run)
    for row in rows:
        assert row["ranks"] == 1 and row["bytes"] > 10_000 and row["time"].startswith("20")
    assert steps(rows) == [(4, "disk", COMPLETE), (2, "disk", COMPLETE)]
    assert told(capsys, "ls", run / "checkpoints") == rows
    assert told(capsys, "ls", of(run, 2)) == rows[1:]
    flip(of(run, 4) / "manifest.json", 60)
    (run / "checkpoints/.step-00000006-0000-abc.tmp").mkdir()
    (of(run, 2) / "private-0.safetensors").unlink()
    states = [state for _, _, state in steps(told(capsys, "ls", run))]
    assert states[0] == "not committed" and states[1].startswith("damaged: ") and "No such file" in states[2]
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "step", "start", "level", "ranks", "bytes", "state", "time", "path",
    ]  # fmt: skip


@pytest.mark.slow
def test_what_a_run_that_is_alive_renames_and_deletes_is_no_damage(run):
    """What `ls` looks at beside a process that writes and deletes checkpoints."""
    (newest,) = (run / "checkpoints").glob("step-00000004-*")
    aside = newest.with_name(f".{newest.name}.tmp")
    writing = f"""
import os, shutil
newest, aside, final = {str(newest)!r}, {str(aside)!r}, {str(newest.with_name("step-00000006-0000-00000000"))!r}
print("alive", flush=True)
while True:
    shutil.copytree(newest, aside)
    os.rename(aside, final)
    os.rename(final, aside)
    shutil.rmtree(aside)
"""
    with subprocess.Popen([sys.executable, "-c", writing], stdout=subprocess.PIPE) as alive:
        assert alive.stdout is not None and alive.stdout.readline()
        try:
            archive = Archive.of(run)
            found = [checkpoint.state for _ in range(500) for checkpoint in archive.found()]
        finally:
            alive.kill()
    assert set(found) <= {"not committed", COMPLETE}


def test_ls_finds_what_a_dead_run_has_in_memory(dead, capsys):
    assert steps(told(capsys, "ls", dead)) == [(2, "memory", COMPLETE), (1, "disk", COMPLETE)]
    assert [row["damage"] for row in told(capsys, "verify", dead)] == [[], []]


def test_a_checkpoint_in_memory_can_be_exported_by_its_step(dead, capsys, tmp_path):
    assert told(capsys, "show", dead, 2)["checkpoint"]["level"] == "memory"
    assert told(capsys, "show", dead)["checkpoint"]["level"] == "disk"
    assert main(["checkpoint", "export", str(dead), "2", "--to", str(tmp_path / "out")]) == 0
    weights = load_file(tmp_path / "out/model.safetensors")
    assert "embedding.weight" in weights and "head.weight" not in weights  # they are one, which is written once
    found, _ = load_model(tmp_path / "out")
    assert all(torch.equal(found.state_dict()[name], value) for name, value in weights.items())


@pytest.mark.parametrize("at", [4, 30, 5000, -1])
def test_verify_finds_a_flipped_bit_and_exits_with_1(run, capsys, at):
    assert [row["damage"] for row in told(capsys, "verify", run)] == [[], []]
    flip(of(run, 4) / "private-0.safetensors", at)
    assert steps(told(capsys, "ls", run))[0] == (4, "disk", COMPLETE)  # which says that it was not verified
    rows = told(capsys, "verify", run, code=1)
    assert [row["state"] for row in rows] == ["damaged", "verified"]
    damage = [row["damage"] for row in rows]
    assert damage[1] == [] and "private-0.safetensors` is damaged" in damage[0][0]
    assert told(capsys, "verify", run, 2)[0]["damage"] == []
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "is damaged: chunk 0" in capsys.readouterr().out


def test_show_says_what_is_in_a_checkpoint(run, capsys):
    found = told(capsys, "show", run, 2)
    assert (found["checkpoint"]["step"], found["checkpoint"]["ranks"]) == (2, 1)
    tensors = {each["name"]: each for each in found["tensors"]}
    assert tensors["model/norm.weight"] | {"pieces": 0} == {
        "name": "model/norm.weight", "dtype": "float32", "shape": [16], "pieces": 0, "bytes": 64,
    }  # fmt: skip
    states = {each["name"]: each for each in found["states"]}
    assert {"model", "optimizer", "progress", "loader", "random"} <= states.keys()
    assert states["progress"]["values"]["step"] == 2
    assert sum(each["bytes"] for each in found["states"]) == sum(each["bytes"] for each in found["tensors"])
    assert main(["checkpoint", "show", str(run)]) == 0
    assert "whole" in capsys.readouterr().out


def test_errors_name_what_is_near(run, capsys, tmp_path):
    said = refused(capsys, "show", run, 5)
    assert "no checkpoint of step 5" in said and "the nearest is 4; there are 2, 4" in said
    assert f"there are checkpoints in `{run}`" in refused(capsys, "ls", tmp_path / "rum")
    assert "is not empty" in refused(capsys, "export", run, "--to", run)
    assert "unknown argument `--bogus`" in refused(capsys, "ls", run, "--bogus")


@pytest.mark.parametrize("way", ["safetensors", "hf"])
def test_an_exported_model_is_read_as_the_run_s_own(run, way, tmp_path, capsys):
    expected, _ = load_model(run)
    shutil.rmtree(run / "model")  # as in a run that was killed
    assert main(["checkpoint", "export", str(run), "--to", str(tmp_path / "out"), "--as", way]) == 0
    found, tokenizer = load_model(tmp_path / "out")
    assert tokenizer is not None and found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    layout = json.loads((tmp_path / "out/config.json").read_text())
    assert ("model_type" in layout) == (way == "hf")
    assert main(["generate", str(tmp_path / "out"), "--tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "import", str(tmp_path / "out"), "--to", str(tmp_path / "new")]) == 0
    back = Archive.of(tmp_path / "new").pick(None).content().state("model")
    assert all(torch.equal(back[name].read(), value) for name, value in expected.state_dict().items())


def test_hf_needs_a_model_with_such_a_layout(dead, capsys, tmp_path):
    shutil.copytree(dead / "checkpoints", tmp_path / "alone")
    said = refused(capsys, "export", tmp_path / "alone", "--to", tmp_path / "out", "--as", "hf")
    assert "no run.toml" in said and "--as safetensors needs no run file" in said
    said = refused(capsys, "export", dead, "--to", tmp_path / "out", "--as", "hf")
    assert "`shoestring.testing.jobs:tiny` has no Hugging Face layout" in said


@pytest.mark.slow
def test_trim_keeps_the_newest_and_half_deletes_none(run, capsys, monkeypatch):
    acts = []
    monkeypatch.setattr(file_acts.Files, "before", lambda _, act, path, *__: acts.append((act, path.name)))
    (run / "checkpoints/.step-00000001-0000-abc.tmp").mkdir()
    old = of(run, 2)
    gone = told(capsys, "trim", run, "--keep", 1)
    assert {str(old), str(run / "checkpoints/.step-00000001-0000-abc.tmp")} == set(gone)
    assert steps(told(capsys, "ls", run)) == [(4, "disk", COMPLETE)]
    aside = f".{old.name}.tmp"  # the name of what is not committed, by which the rest of it is found
    at = acts.index(("rename", old.name))
    assert acts[at : at + 3] == [("rename", old.name), ("sync folder", old.parent.name), ("remove", aside)]


@pytest.mark.slow
def test_trim_leaves_what_others_have_put_there(run, tmp_path, capsys):
    saves = run / "checkpoints"
    linked = tmp_path / "linked"
    shutil.copytree(of(run, 2), linked)
    shutil.rmtree(of(run, 2))
    (saves / "step-00000002-0000-abc").symlink_to(linked)
    for name in ("step-100/.metadata", "step-00000001-0000-abc/notes", ".step-notes.tmp/notes"):
        (saves / name).parent.mkdir()
        (saves / name).write_bytes(b"")
    left = saves / ".step-00000009-0000-abc.0123456789abcdef.tmp"
    left.mkdir()
    lock = file_acts.Files().lock(saves / LOCK, "another process")
    before = sorted(saves.rglob("*"))
    assert told(capsys, "trim", run, "--keep", 1) == []  # it is running
    assert sorted(saves.rglob("*")) == before and (linked / "manifest.json").exists()
    lock.release()
    assert told(capsys, "trim", run, "--keep", 1) == [str(left)]
    left.mkdir()
    assert sorted(saves.rglob("*")) == before and (linked / "manifest.json").exists()


@pytest.mark.slow
def test_trim_deletes_nothing_where_what_is_kept_is_damaged(run, capsys):
    flip(of(run, 4) / "private-0.safetensors")
    assert "nothing is deleted: the checkpoint of step 4 is damaged" in refused(capsys, "trim", run, "--keep", 1)
    assert "must be at least 1" in refused(capsys, "trim", run, "--keep", 0)
    assert len(told(capsys, "ls", run)) == 2


def test_what_a_run_went_back_from_is_not_what_it_goes_on_from(tmp_path, capsys):
    """Neither for `trim` and `show`, nor in the list."""
    run = tmp_path / "run"
    settings = {"memory_folder": str(tmp_path / "memory"), "memory_every": 0, "disk_every": 2, "keep": 9}

    def start(where, steps):
        saves = attach({"it": jobs.tiny()}, settings=Tiered(folder=str(run / "checkpoints"), **settings))
        with saves:
            step = saves.restore(where)
            for _ in range(steps):
                saves.step()
                saves.checkpointer.drain()
        return step

    def listed():
        return [(step, state) for step, _, state in steps(told(capsys, "ls", run))]

    assert start("auto", 6) == 0
    assert start(of(run, 2), 2) == 2
    abandoned = f"{COMPLETE}, abandoned"
    assert listed() == [(6, abandoned), (4, COMPLETE), (2, COMPLETE)]  # 4 was done again
    assert told(capsys, "show", run)["checkpoint"]["start"] == 1
    told(capsys, "trim", run, "--keep", 2)
    assert listed() == [(4, COMPLETE), (2, COMPLETE)]
    assert start("auto", 0) == 4


def test_nor_is_it_where_each_checkpoint_is_one_file(tmp_path, capsys):
    folder = tmp_path / "run/checkpoints"

    def start(where, steps):
        job = compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), [Plain(folder=str(folder), every=1)])
        with closing(job):  # as if it were killed
            step = job.restore(str(where))
            for number in range(steps):
                job.step(jobs.batch(number))
        return step

    assert start("auto", 2) is None
    assert start(folder / "step-00000001.safetensors", 0) == 1
    assert [state for _, _, state in steps(told(capsys, "ls", folder))] == [f"{COMPLETE}, abandoned", COMPLETE]
    assert told(capsys, "trim", folder, "--keep", 1) == [str(folder / "step-00000002.safetensors")]
    assert start("auto", 0) == 1


@pytest.mark.slow
def test_memory_is_cleared_of_dead_runs_only(tmp_path, capsys):
    folder = tmp_path / "run"
    with closing(saving_ranks.made(str(folder), memory_every=1)) as job:
        for number in range(2):
            job.step(jobs.batch(number))
        (folder / "run.toml").write_text(f'[checkpoint.tiered]\nmemory = "{folder / "memory"}"\n')
        memory = Archive.of(folder).memory
        assert users(memory) != []
        assert "is in use by process" in refused(capsys, "trim", folder, "--keep", 1, "--memory")
        assert any(memory.rglob("*.seal"))
        left = tmp_path / "left"
        shutil.copytree(memory, left)
    del job
    shutil.rmtree(folder)  # the run folder is gone, what it had in memory is not
    folder.mkdir()
    (folder / "run.toml").write_text(f'[checkpoint.tiered]\nmemory = "{folder / "memory"}"\n')
    memory.parent.mkdir(parents=True)
    shutil.copytree(left, memory)
    assert {row["level"] for row in told(capsys, "ls", folder)} == {"memory"}
    assert told(capsys, "trim", folder, "--keep", 1, "--memory") == [str(memory)]
    assert not memory.exists()


@pytest.mark.slow
def test_checkpoints_in_one_file_are_read_too(tmp_path, capsys):
    job = compose(Job(jobs.tiny(), world=World()), [Plain(folder=str(tmp_path / "run/checkpoints"), every=1)])
    with job:
        for number in range(2):
            job.step(jobs.batch(number))
        expected = attachments_of(job).module.state_dict()
    assert steps(told(capsys, "ls", tmp_path / "run")) == [(2, "disk", COMPLETE), (1, "disk", COMPLETE)]
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "optimizer" in [each["name"] for each in told(capsys, "show", tmp_path / "run", 1)["states"]]
    flip(tmp_path / "run/checkpoints/step-00000002.safetensors")
    assert [bool(row["damage"]) for row in told(capsys, "verify", tmp_path / "run", code=1)] == [True, False]
    assert len(told(capsys, "trim", tmp_path / "run/checkpoints/step-00000001.safetensors", "--keep", 1)) == 0
    flip(tmp_path / "run/checkpoints/step-00000002.safetensors")
    linked = tmp_path / "run/checkpoints/step-00000003.safetensors"
    linked.symlink_to(tmp_path / "elsewhere.safetensors")
    shutil.copy(tmp_path / "run/checkpoints/step-00000002.safetensors", tmp_path / "elsewhere.safetensors")
    assert told(capsys, "trim", tmp_path / "run", "--keep", 2) == []  # a link counts for nothing and is left
    assert linked.is_symlink() and (tmp_path / "elsewhere.safetensors").exists()
