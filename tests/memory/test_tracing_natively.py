"""The native observer against oracles: torch's own profiler, sums of sizes that are known, and threads."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.core.errors import DataError
from shoestring.memory import load, traced
from shoestring.memory.tracing import native_table
from shoestring.memory.tracing.recorder import AllocationRecorder
from shoestring.testing.held_resources import fresh_garbage
from tests.memory.observed import needs_compiler

pytestmark = needs_compiler
MIB = 2**20


@pytest.fixture(autouse=True)
def few_objects():
    """Each recording looks at all objects, which takes a fraction of a second where many modules are loaded."""
    with fresh_garbage():
        yield


def two_layers(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def one_step(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_every_total_is_that_of_torchs_profiler():
    recorder = AllocationRecorder()
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        recorder.start()
        before = native_table.device(0).total
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            one_step(model, optimizer, torch.ones(32, 64))
        blocks, total = native_table.blocks(), native_table.device(0).total - before
        recorder.stop()
    theirs = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    sizes = [event.nbytes() for event in theirs]
    window = blocks[blocks["born"] > 0]
    assert len(window) > 10
    assert total > 3 * sum(p.nbytes for p in model.parameters())
    assert total in np.cumsum(sizes), "the profiler never had the sum that was recorded"
    assert native_table.device(0).peak - before in np.cumsum(sizes)


def test_the_peak_is_the_largest_sum_of_what_was_alive():
    with traced() as memory:
        kept = torch.empty(MIB, dtype=torch.uint8)
        for _ in range(3):
            torch.empty(2 * MIB, dtype=torch.uint8)
        other = torch.empty(MIB, dtype=torch.uint8)
        del kept
        last = torch.empty(MIB // 2, dtype=torch.uint8)
        del other, last
    window = memory.profile.main
    before = sum(each.nbytes for each in window.held() if each.name.kind in ("unnamed", "parameter", "buffer"))
    assert window.peak - before == pytest.approx(3 * MIB, abs=MIB // 8)
    timeline = window.timeline()
    assert timeline.by_kind.sum(axis=0).max() == window.peak
    assert len(timeline.seconds) <= 600


def test_allocations_of_threads_that_were_there_before_are_seen():
    begin, done = threading.Event(), threading.Event()
    held = []

    def work():
        begin.wait(30)
        held.append(torch.zeros(5 * MIB, dtype=torch.uint8))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with traced() as memory:
        begin.set()
        assert done.wait(30)
    thread.join(30)
    (found,) = [each for each in memory.profile.main.held() if each.nbytes == 5 * MIB]
    assert "test_tracing_natively.py" in found.name.name


def test_a_tensor_from_before_that_is_freed_is_not_counted_any_more():
    early = torch.zeros(7 * MIB, dtype=torch.uint8)
    with traced() as memory:
        assert native_table.device(0).total >= 7 * MIB
        total = native_table.device(0).total
        del early
        assert total - native_table.device(0).total == 7 * MIB
    assert any(each.nbytes == 7 * MIB for each in memory.profile.main.held())


def test_what_lives_across_two_recordings_is_watched_by_both():
    with traced():
        kept = torch.zeros(3 * MIB, dtype=torch.uint8)
    with traced() as again:
        total = native_table.device(0).total
        del kept
        assert total - native_table.device(0).total == 3 * MIB
    assert any(each.nbytes == 3 * MIB for each in again.profile.main.held())


def test_blocks_beyond_the_bound_are_forgotten_but_not_the_peak():
    recorder = AllocationRecorder(freed=1 << 10)
    recorder.start()
    try:
        high = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(8)]
        del high
        small = torch.zeros(8)
        for _ in range(1 << 12):
            small.neg()
    finally:
        window = recorder.stop().main
    assert window.forgotten > 1 << 11
    assert len(window.columns["born"]) < 1 << 13
    assert sum(each.nbytes for each in window.held() if each.nbytes % MIB == 0) >= 8 * MIB


def test_what_is_reported_to_profilers_is_recorded_like_an_accelerators():
    recorder = AllocationRecorder(mimic=True)
    recorder.start()
    try:
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_step(model, optimizer, torch.ones(32, 64))
    finally:
        profile = recorder.stop()
    own, reported = profile.windows["cpu"], profile.windows["cuda:0"]
    ours = {kind: size for kind, size in own.by_kind().items() if kind in ("gradient", "activation")}
    assert reported.by_kind()["parameter"] == sum(parameter.nbytes for parameter in model.parameters())
    assert ours == {kind: reported.by_kind()[kind] for kind in ours}


def test_two_recordings_at_a_time_are_refused():
    with traced(), pytest.raises(RuntimeError, match="being recorded in this process already"), traced():
        pass
    with traced() as memory:
        torch.zeros(8)
    assert memory.profile.windows


def test_a_recording_that_raises_is_saved(tmp_path):
    with pytest.raises(ZeroDivisionError), traced(tmp_path / "memory.npz"):
        held = torch.zeros(MIB, dtype=torch.uint8)
        raise ZeroDivisionError
    del held
    assert any(each.nbytes == MIB for each in load(tmp_path / "memory.npz").main.held())


def test_a_request_that_cannot_be_served_is_named():
    with traced() as memory, pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert f"{1 << 60:,} bytes" in memory.profile.facts.failed
    assert "test_tracing_natively.py" in str(memory)


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_damaged_files_are_refused(tmp_path, cut):
    path = tmp_path / "memory.npz"
    with traced(path):
        torch.zeros(8)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"memory\.npz"):
        load(path)
