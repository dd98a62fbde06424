"""Exports opened by the tools that they are for, which are installed apart from everything else."""

import base64
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.profile.comparison import merged
from shoestring.profile.exports import FORMATS
from shoestring.profile.recording import StepTimes
from tests.browser import Browser, needs_chromium
from tests.profile.small_profiles import hostile, small

pytestmark = pytest.mark.slow
PACKAGES = ("llnl-hatchet", "perfetto", "protobuf", "jsonschema")

HATCHET = """
import hatchet
frame = hatchet.GraphFrame.from_literal(json.load(open(path)))
rows = frame.dataframe
said = [len(rows), rows["time"].sum(), int(rows["count"].sum()), rows["name"].tolist()]
"""
PERFETTO = """
from collections import Counter
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema
trace = schema.Trace.FromString(open(path, "rb").read())

def unknown(message):
    inside = [one for field, value in message.ListFields() if field.type == field.TYPE_MESSAGE
              for one in (value if hasattr(value, "append") else [value])]
    return len(UnknownFieldSet(message)) + sum(map(unknown, inside))

names = {each.iid: each.name for each in trace.packet[0].interned_data.event_names}
tracks = {each.track_descriptor.uuid: each.track_descriptor.name for each in trace.packet}
open_slices, longest, memory = {}, {}, []
for packet in trace.packet:
    event = packet.track_event
    stack = open_slices.setdefault(event.track_uuid, [])
    if event.type == event.TYPE_SLICE_BEGIN:
        stack.append((event.name or names[event.name_iid], packet.timestamp))
    elif event.type == event.TYPE_SLICE_END:
        name, began = stack.pop()
        assert packet.timestamp >= began
        key = f"{tracks[event.track_uuid]}: {name}"
        longest[key] = max(longest.get(key, 0), packet.timestamp - began)
    elif event.type == event.TYPE_COUNTER:
        memory.append(event.counter_value)
said = [unknown(trace), longest, memory, [left for left in open_slices.values() if left]]
"""
SCHEMA = """
import jsonschema
jsonschema.validate(json.load(open(path)), json.load(open(sys.argv[2])))
said = "valid"
"""


def install(command, folder, unreachable):
    """Run an installer; what it says where it cannot reach its index skips the test, any other failure fails it."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and re.search(unreachable, done.stderr):
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with the packages of the tools."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    install(command, folder, r"\(from versions: none\)")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def speedscope(tmp_path_factory):
    """The folder of speedscope's web page."""
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    folder = tmp_path_factory.mktemp("speedscope")
    command = ["npm", "install", "--loglevel", "error", "--no-fund", "--ignore-scripts", "speedscope"]
    install(command, folder, r"code (ENOTFOUND|EAI_AGAIN|ENETUNREACH|ECONN\w+|ETIMEDOUT|E40[34])")
    return folder / "node_modules" / "speedscope" / "dist" / "release"


def asked(python, script, *arguments):
    """What a script says of a file."""
    whole = f"import json, sys\npath = sys.argv[1]\n{script}\nprint(json.dumps(said))"
    done = subprocess.run([python, "-c", whole, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exported(kind, profile, folder):
    ending, export = FORMATS[kind]
    path = folder / f"p{ending}"
    path.write_bytes(export(profile))
    return path


def test_hatchet_reads_its_literal(python, tmp_path):
    nodes, time, count, names = asked(python, HATCHET, exported("hatchet", small(), tmp_path))
    assert nodes == len(small().tree)
    assert time == pytest.approx(0.095)
    assert count == small().tree.count.sum()
    assert "aten::mm" in names


def test_perfettos_schema_knows_every_field_and_slices_nest(python, tmp_path):
    clock = [StepTimes(0, 1, 0.5, 0.5, 1000), StepTimes(1, 3, 0.6, 0.3, 3000)]
    profile = merged([small(), small(scale=2)])
    profile = replace(profile, facts=replace(profile.facts, clock=clock))
    unknown, longest, memory, left = asked(python, PERFETTO, exported("perfetto", profile, tmp_path))
    assert unknown == 0 and left == []
    assert longest["call paths of rank 1, all calls together: main (train.py:5)"] == 80_000_000
    assert longest["optimizer steps: steps 1 to 3"] == 600_000_000
    assert memory == [1000, 3000]


def test_speedscopes_schema_fits(python, speedscope, tmp_path):
    path = exported("speedscope", merged([small(), hostile()]), tmp_path)
    schema = next(speedscope.glob("file-format-schema*.json"))
    assert asked(python, SCHEMA, path, schema) == "valid"


@needs_chromium
@pytest.mark.parametrize("kind", ["speedscope", "pprof", "collapsed"])
def test_speedscope_shows_what_it_reads(speedscope, tmp_path, kind):
    path = exported(kind, merged([small(), hostile()]), tmp_path)
    loads = tmp_path / "load.js"
    content = base64.b64encode(path.read_bytes()).decode()
    loads.write_text(f"speedscope.loadFileFromBase64({json.dumps(path.name)}, {json.dumps(content)})")
    with Browser(width=1200, height=800) as browser:
        browser.open(f"{Path(speedscope, 'index.html').as_uri()}#localProfilePath={loads}")
        browser.until("document.querySelectorAll('canvas').length > 1", 30)
        name = "rank 0" if kind == "speedscope" else path.name
        browser.until(f"document.body.innerText.includes({json.dumps(name)})", 30)
        assert "Something went wrong" not in browser.value("document.body.innerText")
