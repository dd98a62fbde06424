"""Checksums of chunks: the same whoever computes them, on as many threads as there are."""

import os
import select
import subprocess
import sys
import zlib
from contextlib import suppress
from importlib import reload
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoestring.checkpoint.format import checksum
from shoestring.checkpoint.format.checksum import CHUNK, sums
from shoestring.checkpoint.tiers import checksum_process
from shoestring.checkpoint.tiers.checksum_process import ChecksumProcess


@pytest.fixture(params=["isal", "zlib"])
def computing(request, monkeypatch):
    """The module, with and without the extra."""
    if request.param == "isal":
        pytest.importorskip("isal")
        yield checksum
        return
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)  # an import of it fails
        yield reload(checksum)
    reload(checksum)


@given(data=st.binary(max_size=300), threads=st.integers(1, 3))
@example(data=b"", threads=2)
def test_a_checksum_is_crc_32(data, threads):
    assert sums(
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), threads
    ) == ([zlib.crc32(data)] if data else [])


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 9])
def test_each_chunk_has_its_own_in_order_however_many_compute_them(computing, threads):
    data = torch.randint(0, 256, (3 * CHUNK + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(threads))
    chunks = data.split(CHUNK)
    assert computing.sums(data, threads) == [zlib.crc32(chunk.numpy().data) for chunk in chunks]


def test_threads_beside_training_are_a_quarter_of_a_ranks_share(monkeypatch):
    monkeypatch.setattr("shoestring.checkpoint.tiers.checksum_process.processors", lambda: 16)
    assert [checksum_process.threads_beside(ranks) for ranks in (1, 2, 8, 16)] == [4, 2, 1, 1]


@pytest.fixture
def file(tmp_path):
    """A file that is longer than what is in it, as a slot's is, and what it holds."""
    data = torch.randint(0, 256, (2 * CHUNK + 77,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    path = tmp_path / "own-0-0.private"
    path.write_bytes(data.numpy().tobytes() + bytes(1000))
    status = path.stat()
    return data, (path, status.st_dev, status.st_ino)


@pytest.fixture
def process():
    found = ChecksumProcess(2)
    yield found
    found.close()


def test_another_process_computes_what_lies_in_a_file(process, file, monkeypatch):
    data, identity = file
    expected = sums(data)
    monkeypatch.setattr(checksum, "sums", lambda *_: pytest.fail("computed here"))
    assert [process.sums(data, identity) for _ in range(2)] == [expected, expected]
    wrong = data.clone()
    wrong[-1] += 1
    identity[0].write_bytes(wrong.numpy().tobytes())  # what it reads is what is there
    assert process.sums(data, identity)[:-1] == expected[:-1]
    assert process.sums(data, identity)[-1] != expected[-1]


@pytest.mark.slow
def test_what_another_process_cannot_read_is_computed_here(process, file):
    data, (path, device, inode) = file
    expected, empty = sums(data), torch.empty(0, dtype=torch.uint8)
    assert process.sums(data, (path, device, inode + 1)) == expected  # another file by now
    assert process.sums(data, (path.with_name("gone"), device, inode)) == expected
    assert process.sums(data, None) == expected
    assert process.sums(empty, (path, device, inode)) == []
    path.with_name("link").symlink_to(path)
    assert process.sums(data, (path.with_name("link"), device, inode)) == expected
    assert process.sums(data, (path, device, inode)) == expected


@pytest.mark.parametrize("signal", [SIGKILL, SIGTERM])
def test_a_process_that_is_gone_costs_no_checkpoint(process, file, signal):
    data, identity = file
    expected = process.sums(data, identity)
    process._process.send_signal(signal)
    process._process.wait(10)
    assert process.sums(data, identity) == expected
    assert process._process is None


def test_the_process_imports_no_torch_and_ends_when_it_is_closed(process, file):
    process.sums(*file)
    child = process._process
    assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()
    process.close()
    assert child.returncode == -SIGTERM
    process.close()
    assert process.sums(*file) == sums(file[0]) and process._process is None  # none is started any more


def test_a_process_that_does_not_answer_is_given_up(process, file, monkeypatch):
    data, identity = file
    expected = process.sums(data, identity)
    child = process._process
    child.send_signal(SIGSTOP)
    monkeypatch.setattr(checksum_process, "PATIENCE", 0.2)
    monkeypatch.setattr(checksum_process, "_END", 0.2)
    assert process.sums(data, identity) == expected
    assert child.returncode == -SIGKILL and process._process is None


def test_a_file_that_is_too_short_is_no_reason_to_end(process, file):
    data, (path, device, inode) = file
    expected = process.sums(data, (path, device, inode))
    child = process._process
    path.write_bytes(bytes(10))
    assert process.sums(data, (path, device, inode)) == expected
    assert process._process is child and child.poll() is None


@pytest.mark.slow
def test_the_process_ends_with_its_parent_though_others_hold_its_input_open(tmp_path, file):
    """A worker that was forked after it has the other end of its input."""
    script = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from shoestring.checkpoint.tiers.checksum_process import ChecksumProcess\n"
        "path = Path(sys.argv[1]); status = path.stat()\n"
        "process = ChecksumProcess(1)\n"
        "process.sums(torch.ones(10, dtype=torch.uint8), (path, status.st_dev, status.st_ino))\n"
        "worker = os.fork()\n"
        "if not worker: os.closerange(0, 3); signal.pause()\n"
        "print(process._process.pid, worker, flush=True); os.kill(os.getpid(), 9)\n"
    )
    told = subprocess.run([sys.executable, "-c", script, file[1][0]], capture_output=True, text=True, timeout=60)
    child, worker = map(int, told.stdout.split())
    try:
        with suppress(ProcessLookupError):  # it has ended already
            ended = os.pidfd_open(child)
            assert select.select([ended], [], [], 20)[0]
            os.close(ended)
        assert Path(f"/proc/{worker}").exists()
    finally:
        os.kill(worker, SIGKILL)


def test_without_a_process_of_its_own_none_is_started(file):
    process = ChecksumProcess(2, child=False)
    assert process.sums(*file) == sums(file[0])
    assert process._process is None
