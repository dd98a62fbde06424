"""Files and folders appear whole or not at all; what kills leave is removed, and what is being written is not."""

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shoestring.checkpoint.format.state import PackedState
from shoestring.core.job import Job, attachments_of
from shoestring.data.tokens import TokenWriter
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model
from shoestring.storage import whole as on_disk
from shoestring.storage.whole import make_folder, open_aside, put_in_place, replaced_folder, write_atomic


def killed(work):
    """Do some work in a process that is killed in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the child uses none
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_a_kill_left_is_removed_by_the_next_writer(tmp_path):
    def write():
        open_aside(tmp_path / "x")
        die()

    killed(write)
    assert len(names(tmp_path)) == 1
    (tmp_path / ".x.notes.tmp").touch()  # a user's
    write_atomic(tmp_path / "y", b"y")
    assert len(names(tmp_path)) == 3
    write_atomic(tmp_path / "x", b"x")
    assert names(tmp_path) == [".x.notes.tmp", "x", "y"]


def test_what_another_one_is_writing_is_not_removed(tmp_path):
    with open_aside(tmp_path / "x") as file:
        file.write(b"first")
        write_atomic(tmp_path / "x", b"second")
        put_in_place(file, tmp_path / "x")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"first"


def test_a_file_that_was_taken_for_one_that_was_left_is_begun_again(tmp_path, monkeypatch):
    """Another process may look between making the file and locking it."""
    real, times = on_disk._lock, []

    def lock(descriptor):
        if not times:
            (left,) = tmp_path.iterdir()
            left.unlink()
        times.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(on_disk, "_lock", lock)
    write_atomic(tmp_path / "x", b"x")
    assert len(times) == 2 and names(tmp_path) == ["x"]


@contextmanager
def taking(monkeypatch):
    """Another process that takes each new file or folder for one that was left, and is stuck while it removes it."""
    held, real = [], on_disk._aside

    def aside(path):
        """The new name is known before there is anything: the other process locks what gets it."""
        chosen = real(path)
        opened = Path.mkdir, Path.open

        def locked(made):
            descriptor = os.open(chosen, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held.append(descriptor)
            return made

        class TakenFolder(type(chosen)):
            def mkdir(self, *given, **named):
                return locked(opened[0](Path(self), *given, **named))

            def open(self, *given, **named):
                return locked(opened[1](Path(self), *given, **named))

        return TakenFolder(chosen)

    monkeypatch.setattr(on_disk, "_aside", aside)
    yield
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize("make", [open_aside, lambda path: replaced_folder(path).__enter__()])
def test_a_lock_that_another_process_holds_is_not_waited_for(make, tmp_path, monkeypatch):
    with taking(monkeypatch), pytest.raises(OSError, match="removes every"):
        make(tmp_path / "x")


def test_a_link_in_the_place_of_a_file_aside_is_not_written_to(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(b"secret")
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    (tmp_path / f".x.{'00' * 4}.tmp").symlink_to(tmp_path / "secret")
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "x", b"x")
    assert (tmp_path / "secret").read_bytes() == b"secret" and "x" not in names(tmp_path)


def test_a_kill_while_text_is_prepared_leaves_nothing_for_long(tmp_path):
    def prepare():
        with TokenWriter(tmp_path / "train.tokens", 256):
            die()

    killed(prepare)
    assert len(names(tmp_path)) == 1
    with TokenWriter(tmp_path / "train.tokens", 256) as writer:
        assert len(names(tmp_path)) == 1
        writer.finish(tokenizer="", recipe="")
    assert names(tmp_path) == ["train.tokens"]
    with pytest.raises(ZeroDivisionError), TokenWriter(tmp_path / "train.tokens", 256):
        raise ZeroDivisionError
    assert names(tmp_path) == ["train.tokens"]


@contextmanager
def synced(monkeypatch):
    """The folders and files whose content was made durable, by number."""
    found, real = [], os.fsync

    def fsync(descriptor):
        real(descriptor)
        found.append(os.fstat(descriptor).st_ino)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield found


def test_folders_that_are_made_are_durable(tmp_path, monkeypatch):
    with synced(monkeypatch) as found:
        make_folder(tmp_path / "a/b/c")
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a", tmp_path / "a/b")} <= set(found)
    with synced(monkeypatch) as found:
        make_folder(tmp_path / "a/b/c")
    assert not found


def test_a_checkpoint_in_one_file_makes_the_folders_above_it_durable(tmp_path, monkeypatch):
    """Also those that something else has made: without its run folder, a checkpoint is lost with the power."""
    from shoestring.checkpoint import Plain
    from shoestring.checkpoint.tiers.plain import Saver

    (tmp_path / "runs/one").mkdir(parents=True)
    saver = Saver(attachments_of(Job(torch.nn.Linear(1, 1))), Plain(folder=str(tmp_path / "runs/one/checkpoints")))
    above = [tmp_path / "runs/one/checkpoints", tmp_path / "runs/one", tmp_path / "runs", tmp_path]
    with synced(monkeypatch) as found:
        saver._write(above[0] / "step-00000001.safetensors", PackedState.of({}))
    assert {path.stat().st_ino for path in above} <= set(found)
    with synced(monkeypatch) as found:
        saver._write(above[0] / "step-00000002.safetensors", PackedState.of({}))
    assert len(found) == 2  # the file and its folder


# -- folders ----------------------------------------------------------------------------------------------------------


def write_all(folder, text):
    with replaced_folder(folder) as new:
        for name in ("a", "b"):
            (new / name).write_text(text)


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def whole(text):
    return {"a": text, "b": text}


@pytest.fixture(params=["exchange", "two renames"])
def exchanging(request, monkeypatch):
    """Where the file system can exchange two names in one act, and where it cannot."""
    if request.param != "exchange":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())


@pytest.mark.usefixtures("exchanging")
def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for text in ("first", "second"):
        write_all(tmp_path / "x/model", text)
        assert content(tmp_path / "x/model") == whole(text) and names(tmp_path / "x") == ["model"]


@pytest.mark.usefixtures("exchanging")
def test_a_folder_that_fails_leaves_the_former_one(tmp_path):
    write_all(tmp_path / "model", "first")
    with pytest.raises(OSError, match="No space"), replaced_folder(tmp_path / "model") as new:
        (new / "a").write_text("second")
        raise OSError(28, "No space left on device")
    assert content(tmp_path / "model") == whole("first") and names(tmp_path) == ["model"]


@pytest.mark.parametrize("at", ["sync_folder", "_exchange", "rmtree"])
def test_a_kill_leaves_one_of_both_whole(at, tmp_path, monkeypatch):
    write_all(tmp_path / "model", "first")
    with monkeypatch.context() as patch:
        patch.setattr(on_disk.shutil if at == "rmtree" else on_disk, at, die)
        killed(lambda: write_all(tmp_path / "model", "second"))
    assert content(tmp_path / "model") == whole("second" if at == "rmtree" else "first")
    assert len(names(tmp_path)) == 2
    write_all(tmp_path / "model", "third")
    assert content(tmp_path / "model") == whole("third") and names(tmp_path) == ["model"]


def test_a_second_rename_that_fails_is_undone(tmp_path, monkeypatch):
    write_all(tmp_path / "model", "first")
    real = Path.rename

    def rename(path, target):
        if Path(target).name == "model" and content(path) == whole("second"):
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        write_all(tmp_path / "model", "second")
    assert content(tmp_path / "model") == whole("first") and names(tmp_path) == ["model"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    write_all(tmp_path / "model", "first")
    assert (tmp_path / "model").is_symlink() and content(tmp_path / "disk") == whole("first")
    assert names(tmp_path) == ["disk", "model"]


def test_everything_in_a_folder_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    write_all(tmp_path / "model", "first")
    order, real = [], on_disk._exchange
    with synced(monkeypatch) as found, replaced_folder(tmp_path / "model") as new:
        (new / "deep").mkdir()
        (new / "deep/a").write_text("second")
        inodes = {path.stat().st_ino for path in (new, new / "deep", new / "deep/a")}
        monkeypatch.setattr(on_disk, "_exchange", lambda *given: (order.append(set(found)), real(*given)))
    assert inodes <= order[0] and found[-1] == tmp_path.stat().st_ino


# -- models -----------------------------------------------------------------------------------------------------------


def gpt(layers):
    return GPT(GPTConfig(vocab_size=64, dim=16, layers=layers, heads=2, kv_heads=1, hidden=32, context=8))


@contextmanager
def room(nbytes):
    """No file may be longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


MADE_BY = {"model": "torch.nn:Linear", "arguments": {"in_features": 64, "out_features": 64}, "offered": {}}


@pytest.mark.parametrize("make", [lambda: gpt(2), lambda: torch.nn.Linear(64, 64)], ids=["gpt", "module"])
def test_a_full_disk_leaves_the_earlier_model(make, tmp_path):
    first = make()
    save_model(first, None, tmp_path / "model", MADE_BY)
    (tmp_path / "model/notes.txt").write_text("mine")
    with room(8 << 10), pytest.raises(Exception, match=r"File too large|os error 27"):
        save_model(make(), None, tmp_path / "model", MADE_BY)
    found, _ = load_model(tmp_path / "model")
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), found.parameters(), strict=True))
    assert names(tmp_path) == ["model"]
    second = make()
    save_model(second, None, tmp_path / "model", MADE_BY)
    found, _ = load_model(tmp_path / "model")
    assert all(torch.equal(one, other) for one, other in zip(second.parameters(), found.parameters(), strict=True))
    assert (tmp_path / "model/notes.txt").read_text() == "mine"


def test_weights_of_an_earlier_model_do_not_stay(tmp_path):
    from shoestring.models import llama

    llama.save_pretrained(gpt(4), tmp_path / "model", max_shard_bytes=4 << 10)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    save_model(gpt(1), None, tmp_path / "model", MADE_BY)
    assert names(tmp_path / "model") == ["config.json", "model.safetensors"]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **shape))


@pytest.mark.parametrize("made", [lambda: gpt(1), lambda: torch.nn.Linear(2, 2), llama], ids=["gpt", "module", "hf"])
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_a_models_folder_may_read_its_weights(tmp_path, made, mask):
    """safetensors makes files that only their owner may read."""
    model, before = made(), os.umask(mask)
    try:
        save_model(model, None, tmp_path / "model", MADE_BY)
    finally:
        os.umask(before)
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    assert weights.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.slow
def test_a_model_is_written_without_a_copy_of_its_weights_in_memory(tmp_path):
    script = """
import resource
from pathlib import Path
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.saving import save_model
model = GPT(GPTConfig(vocab_size=257, dim=512, layers=16, heads=8, kv_heads=8, hidden=1408, context=16))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small = GPTConfig(vocab_size=257, dim=16, layers=1, heads=2, kv_heads=1, hidden=32, context=16)
save_model(GPT(small), None, Path("small"), {})
before = peak()
save_model(model, None, Path("model"), {})
print((peak() - before) / sum(parameter.nbytes for parameter in model.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.1
