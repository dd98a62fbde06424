"""Numbers of a log: the same as a report reads from the file, however the log was cut and written."""

import json
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.report.reading import ArrayColumn, read, values_at

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(scope="module")
def new_run(configured):
    """A function that makes a run without a log."""
    from shoestring_hub.server import runs
    from shoestring_hub.server.access import Access
    from shoestring_hub.server.models import Person, Project, Role

    access = Access(Person.objects.create_user("counter"), Project.objects.create(slug="numbers"), Role.OWNER)
    return lambda: runs.open_run(access, uuid.uuid4().hex, "run")


steps = st.integers(-3, 40)
values = st.one_of(st.floats(allow_nan=True), st.just("text"), st.none(), st.booleans(), st.integers(-(10**30), 10**30))
rows = st.dictionaries(st.sampled_from("abc"), values)
lines = st.one_of(
    st.builds(
        lambda step, row: json.dumps({"step": step} | row), steps, st.dictionaries(st.sampled_from("abc"), values)
    ),
    st.text("x{}[]\r", max_size=5),
)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(lines, max_size=30), st.integers(0, 10), st.randoms())
def test_a_log_in_pieces_reads_as_the_report_reads_the_file(new_run, tmp_path_factory, lines, rewritten, draw):
    from shoestring_hub.server import logs, runs

    run = new_run()
    data = "".join(line + "\n" for line in lines).encode()
    logs.splice(run, b'{"step": 1, "old": 1}\n' * rewritten, at=0, have=0, attempt=0)
    size, at = 22 * rewritten, 0
    while at < len(data) or size > len(data):
        part = data[at : at + draw.randint(1, 60)]
        size = logs.splice(run, part, at=at, have=size, attempt=0)
        at += len(part)
    folder = tmp_path_factory.mktemp("log")
    (folder / "metrics.jsonl").write_bytes(data)
    assert b"".join(logs.read(run.__class__.objects.get(pk=run.pk))) == data
    expected = dict(read(folder).columns)
    found = {key: dict(column) for key, column in runs.read(run).columns.items()}
    assert repr(found) == repr({key: dict(column) for key, column in expected.items()})
    last = {key: column[max(column)] for key, column in expected.items()}
    texts = dict(run.values.values_list("key__name", "text"))
    assert texts.keys() == last.keys()


@pytest.mark.slow
def test_a_log_of_several_segments_is_cut_at_lines(new_run, monkeypatch):
    from shoestring_hub.server import logs
    from shoestring_hub.server.models import HubRun, Segment

    monkeypatch.setattr(logs, "SEGMENT", 100)
    run, size = new_run(), 0
    data = b"".join(b'{"step": %d, "loss": 1}\n' % step for step in range(200))
    for start in range(0, len(data), 37):
        size = logs.splice(run, data[start : start + 37], at=size, have=size, attempt=0)
    stored = HubRun.objects.get(pk=run.pk)
    assert b"".join(logs.read(stored)) == data
    assert b"".join(logs.read(stored, 150, 333)) == data[150:333]
    assert max(Segment.objects.filter(run=run).values_list("size", flat=True)) <= 100


def test_a_fault_in_a_splice_leaves_all_as_it_was(new_run, monkeypatch):
    from shoestring_hub.server import logs, numbers

    run = new_run()
    logs.splice(run, b'{"step": 1, "loss": 1}\n', at=0, have=0, attempt=0)
    before = logs.describe(run.__class__.objects.get(pk=run.pk))
    monkeypatch.setattr(numbers, "parse", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logs.splice(run, b'{"step": 2, "loss": 1}\n', at=23, have=23, attempt=0)
    assert logs.describe(run.__class__.objects.get(pk=run.pk)) == before


@given(st.lists(st.integers(-5, 30), unique=True), st.lists(st.integers(-6, 31)))
def test_a_column_of_arrays_is_a_column_of_a_dict(present, asked):
    present = sorted(present)
    plain = {step: step / 2 for step in present}
    column = ArrayColumn(np.array(present, np.int64), np.array([step / 2 for step in present], np.float64))
    assert dict(column) == plain and list(column.values()) == list(plain.values())
    assert list(reversed(column)) == list(reversed(plain)) and len(column) == len(plain)
    assert [column.get(step) for step in asked] == [plain.get(step) for step in asked]
    assert repr(values_at(column, asked).tolist()) == repr(values_at(plain, asked).tolist())
