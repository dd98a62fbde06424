"""Exports hold the times of the profile, as protobuf's own decoder and the formats' rules read them."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shoestring.cli import main
from shoestring.profile.comparison import merged
from shoestring.profile.exports import FORMATS
from shoestring.profile.protobuf import message, varint
from shoestring.profile.recording import StepTimes
from shoestring.profile.tree import NodeKind, TreeBuilder
from tests.profile.small_profiles import MILLION, hostile, small

INTEGER, UNSIGNED, TEXT, MESSAGE = 3, 4, 9, 11  # google.protobuf.FieldDescriptorProto.Type
PPROF = {  # of https://github.com/google/pprof/blob/main/proto/profile.proto: number, type, and whether it is repeated
    "Profile": [
        ("sample_type", 1, "ValueType", True), ("sample", 2, "Sample", True), ("location", 4, "Location", True),
        ("function", 5, "Function", True), ("string_table", 6, TEXT, True), ("duration_nanos", 10, INTEGER, False),
        ("period_type", 11, "ValueType", False), ("period", 12, INTEGER, False),
    ],
    "ValueType": [("type", 1, INTEGER, False), ("unit", 2, INTEGER, False)],
    "Sample": [("location_id", 1, UNSIGNED, True), ("value", 2, INTEGER, True), ("label", 3, "Label", True)],
    "Label": [("key", 1, INTEGER, False), ("str", 2, INTEGER, False)],
    "Location": [("id", 1, UNSIGNED, False), ("line", 4, "Line", True)],
    "Line": [("function_id", 1, UNSIGNED, False), ("line", 2, INTEGER, False)],
    "Function": [
        ("id", 1, UNSIGNED, False), ("name", 2, INTEGER, False), ("system_name", 3, INTEGER, False),
        ("filename", 4, INTEGER, False),
    ],
}  # fmt: skip


def message_class(messages, name):
    """The class that protobuf makes of a schema."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=f"of_{name}", syntax="proto3")
    for kind, fields in messages.items():
        described = file.message_type.add(name=kind)
        for field, number, of, repeated in fields:
            added = described.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = MESSAGE if isinstance(of, str) else of
            if isinstance(of, str):
                added.type_name = f".of_{name}.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"of_{name}.{name}"))


def export(kind, profile):
    return FORMATS[kind][1](profile)


def test_speedscope_gets_a_stack_for_each_path_and_a_profile_for_each_rank():
    document = json.loads(export("speedscope", merged([small(), small(scale=2)])))
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = document["shared"]["frames"]
    assert {"name": "main:5", "file": "/a/train.py", "line": 5} in frames
    totals = []
    for each in document["profiles"]:
        assert each["type"] == "sampled" and each["unit"] == "nanoseconds"
        assert len(each["samples"]) == len(each["weights"])
        assert all(0 <= frame < len(frames) for stack in each["samples"] for frame in stack)
        assert each["endValue"] == sum(each["weights"])
        totals.append((each["name"], each["endValue"]))
    assert totals == [("rank 0", 95 * MILLION), ("rank 1", 190 * MILLION)]
    deepest = max(document["profiles"][0]["samples"], key=len)
    names = ["<module>:10", "main:5", "Module._call_impl:1700", "aten::linear", "aten::mm"]
    assert [frames[frame]["name"] for frame in deepest] == names


def test_pprof_is_read_by_protobuf_and_has_times_calls_and_ranks():
    profile = merged([small(), small(scale=2)])
    read = message_class(PPROF, "Profile").FromString(gzip.decompress(export("pprof", profile)))
    texts = list(read.string_table)
    assert texts[0] == ""
    kinds = [(texts[kind.type], texts[kind.unit]) for kind in read.sample_type]
    assert kinds == [("calls", "count"), ("accelerator", "nanoseconds"), ("time", "nanoseconds")]
    functions = {function.id: texts[function.name] for function in read.function}
    places = {each.id: (functions[each.line[0].function_id], each.line[0].line) for each in read.location}
    times, calls = Counter(), Counter()
    for sample in read.sample:
        assert len(sample.value) == 3
        rank = texts[sample.label[0].str]
        assert texts[sample.label[0].key] == "rank"
        times[rank] += sample.value[2]
        calls[places[sample.location_id[0]]] += sample.value[0]
        assert places[sample.location_id[-1]] == ("<module>", 10)  # the outermost comes last
    assert times == {"rank 0": 95 * MILLION, "rank 1": 190 * MILLION}
    assert calls["aten::mm", 0] == 8
    assert read.duration_nanos == pytest.approx(285 * MILLION)


def test_collapsed_stacks_are_lines_of_names_and_a_whole_number():
    text = export("collapsed", small(extra="a;b\nc")).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert lines["<module> (train.py:10);a:b c"] == str(5 * MILLION)
    assert sum(map(int, lines.values())) == 100 * MILLION
    assert export("collapsed", merged([small(), small()])).startswith(b"rank 0;<module>")


def test_hatchet_gets_the_tree_with_times_that_add_up():
    root = json.loads(export("hatchet", small()))[0]
    assert root["metrics"]["time (inc)"] == pytest.approx(0.095)

    def own(node):
        return node["metrics"]["time"] + sum(map(own, node["children"]))

    assert own(root) == pytest.approx(0.095)
    assert root["children"][0]["frame"] == {
        "name": "<module> (train.py:10)", "type": "python", "file": "/a/train.py", "line": 10,
    }  # fmt: skip


def test_hatchets_literal_may_be_deeper_than_a_recursion():
    builder, node = TreeBuilder(), 0
    for _ in range(3000):
        node = builder.node(node, NodeKind.OPERATOR, "x")
    builder.add(node, count=1, own=5)
    profile = small()
    text = export("hatchet", replace(profile, tree=builder.build())).decode()
    assert text.count("{") == text.count("}") == 3 * 3001
    assert text.endswith("]}" * 3001 + "]")


def test_varints_are_those_of_the_wire_format():
    assert [varint(value) for value in (0, 127, 300)] == [b"\x00", b"\x7f", b"\xac\x02"]
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert message([(1, 150), (2, "ä"), (3, [(1, 0.5)])]).hex() == "0896011202c3a41a0909000000000000e03f"


def test_perfettos_trace_has_the_steps_when_they_were():
    clock = [StepTimes(0, 1, 0.5, 0.5, 1000), StepTimes(1, 3, 0.6, 0.3, 3000)]
    profile = small()
    trace = export("perfetto", replace(profile, facts=replace(profile.facts, clock=clock)))
    assert b"step 0" in trace and b"steps 1 to 3" in trace
    assert b"step 0" not in export("perfetto", profile)


@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_names_stay_names_in_every_format(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile().save(tmp_path / "h.npz")
    assert main(["profile", "export", "h.npz", "--format", kind]) == 0
    content = (tmp_path / f"h{FORMATS[kind][0]}").read_bytes()
    content = gzip.decompress(content) if kind == "pprof" else content
    assert b"</script><img" in content
