"""Spans: recorded from any thread, bounded, written, read, merged, exported."""

import json
import threading
import time

import pytest

from shoestring.core.errors import ConfigError
from shoestring.core.trace import Trace, listening, span
from shoestring.report.timeline import chrome, dumps, merge, read


def made(rank=0, names=("a", "b"), start=0.0):
    trace = Trace(rank=rank, host=f"host{rank}", ranks=2, parameters=7, facts={"own": 2.0}, origin=0.0)
    for index, name in enumerate(names):
        trace.step = index
        trace.record(name, "compute", start + index, start + index + 0.5, nbytes=10 * index)
    return trace


def test_what_is_written_is_read_again(tmp_path):
    trace = made()
    trace.record("a", "wire", 3.0, 4.0)
    path = tmp_path / "trace-0.jsonl"
    path.write_text(dumps(trace))
    again = read(path)
    known = ("rank", "host", "ranks", "parameters", "gradient_bytes", "steps", "training_seconds", "facts")
    assert [getattr(again, name) for name in known] == [0, "host0", 2, 7, 0, 0, 0.0, {"own": 2.0}]
    assert list(again.spans) == list(trace.spans)
    assert again.totals == trace.totals
    assert dumps(again) == dumps(trace)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]\n",
        "nonsense",
        '{"trace": 99, "totals": []}\n',
        '{"trace": 1, "totals": []}\n',
        '{"trace": 1, "totals": [], "rank": 0, "host": ""}\n',
        '{"trace": 1, "totals": [], "rank": 0, "host": "", "facts": {}}\n{"name": "a"}\n',
        '{"trace": 1, "totals": [], "rank": 0, "host": "", "facts": {}}\n5\n',
        pytest.param(dumps(made()).replace('"compute"', '"magic"'), id="unknown kind"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a trace of format 1"):
        read(path)


def test_binary_and_missing_files_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    for name in ("binary", "missing"):
        with pytest.raises(ConfigError):
            read(tmp_path / name)


def test_merge_orders_all_ranks_by_time():
    pairs = merge([made(0), made(1, start=0.25)])
    assert [(rank, one.name) for rank, one in pairs] == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]


def test_chrome_export_has_a_process_a_rank_and_microseconds():
    exported = json.loads(json.dumps(chrome(iter([made(0), made(1)]))))
    names = [event for event in exported["traceEvents"] if event["ph"] == "M"]
    spans = [event for event in exported["traceEvents"] if event["ph"] == "X"]
    assert [event["args"]["name"] for event in names] == ["rank 0 on host0", "rank 1 on host1"]
    last = spans[-1]
    assert (last["name"], last["cat"], last["ts"], last["dur"], last["pid"]) == ("b", "compute", 1e6, 5e5, 1)
    assert last["args"] == {"step": 1, "bytes": 10}


def test_memory_is_bounded_and_totals_are_not_cut():
    with Trace(keep=8) as trace:
        for _ in range(1000):
            with span("work", "copy", nbytes=3):
                pass
    assert len(trace.spans) == 8
    total = trace.totals["work", "copy"]
    assert (total.count, total.nbytes) == (1000, 3000)
    assert trace.seconds("copy") == total.seconds > 0
    assert trace.seconds("disk") == 0


def test_a_span_on_another_thread_is_recorded_under_that_thread():
    with Trace() as trace:
        worker = threading.Thread(target=lambda: span("there", "disk").__enter__().__exit__(None, None, None))
        worker.start()
        worker.join()
        with span("here", "disk"):
            pass
    there, here = trace.spans
    assert (there.name, here.name) == ("there", "here")
    assert here.thread == threading.get_ident() != there.thread


def test_without_an_open_trace_nothing_is_recorded():
    trace = Trace()
    with trace, span("inside", "wait"):
        pass
    with span("outside", "wait"):
        pass
    assert [one.name for one in trace.spans] == ["inside"]


def test_nested_traces_both_record_and_close_after_an_exception():
    outer, inner = Trace(), Trace()
    with outer:
        with pytest.raises(ZeroDivisionError), inner, span("fails", "compute"):
            raise ZeroDivisionError
        with span("after", "compute"):
            pass
    assert [one.name for one in outer.spans] == ["fails", "after"]
    assert [one.name for one in inner.spans] == ["fails"]


def test_bytes_can_be_set_while_a_span_runs():
    with Trace() as trace, span("send", "wire") as sending:
        sending.nbytes = 77
    assert trace.totals["send", "wire"].nbytes == 77


def test_align_starts_the_clock_anew_and_keeps_the_totals():
    with Trace() as trace:
        with span("before", "compute"):
            pass
        trace.align()
        with span("after", "compute"):
            pass
    assert [one.name for one in trace.spans] == ["after"]
    assert 0 <= trace.spans[0].start < time.perf_counter() - trace.origin
    assert trace.totals["before", "compute"].count == 1


def test_writing_while_other_threads_record():
    trace, ended = Trace(keep=512), threading.Event()

    def record():
        while not ended.is_set():
            trace.record(str(threading.get_ident() % 7), "compute", 0.0, 1.0)

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            head, *lines = map(json.loads, dumps(trace).splitlines())
            assert head["trace"] == 1 and len(lines) <= 512
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class Spy:
    """Writes down what it hears."""

    def __init__(self):
        self.heard = []

    def begin(self, work):
        self.heard.append(("begin", work.name, threading.get_ident()))

    def end(self, work):
        self.heard.append(("end", work.name, work.nbytes))


def test_a_listener_hears_a_span_begin_before_its_work_and_end_after_it():
    spy, here = Spy(), threading.get_ident()
    with listening(spy), span("outer", "compute"), span("inner", "wire") as inner:
        inner.nbytes = 5
        spy.heard.append("work")
    begun = [("begin", "outer", here), ("begin", "inner", here)]
    assert spy.heard == [*begun, "work", ("end", "inner", 5), ("end", "outer", 0)]


def test_a_listener_hears_of_other_threads_and_of_work_that_fails():
    spy = Spy()
    with listening(spy):
        worker = threading.Thread(target=lambda: span("there", "disk").__enter__().__exit__(None, None, None))
        worker.start()
        worker.join()
        with pytest.raises(ZeroDivisionError), span("fails", "compute"):
            raise ZeroDivisionError
    (_, name, thread), *rest = spy.heard
    assert name == "there" and thread == worker.ident
    assert [kind for kind, *_ in rest] == ["end", "begin", "end"]


def test_a_listener_hears_the_end_of_those_spans_only_that_it_heard_begin():
    early, late = Spy(), Spy()
    with listening(early):
        before = span("before", "compute").__enter__()
    with listening(late):
        before.__exit__(None, None, None)
    assert [kind for kind, *_ in early.heard] == ["begin"] and late.heard == []


def test_what_a_listener_does_is_no_part_of_the_span():
    class Slow(Spy):
        def begin(self, work):
            self.until = time.perf_counter()

    slow = Slow()
    with Trace(origin=0.0) as trace, listening(slow), span("quick", "compute"):
        pass
    assert trace.spans[0].start >= slow.until
