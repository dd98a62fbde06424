"""Which files a row measures, and how much of them has changed since."""

import json
from dataclasses import replace

import pytest

from benchmarks import stale
from benchmarks.evidence import main as write_evidence
from benchmarks.harness import Bar, Environment, main
from benchmarks.machine import ROOT
from benchmarks.provenance import FILE, STALE, Sources, measured_files, present_lines
from benchmarks.rows import read, write
from shoestring.core.errors import DataError

FILES = {
    "benchmarks/area.py": "from shoestring.one import f\nimport benchmarks.kills\nPROGRAM = ['-m', 'shoestring']\n",
    "benchmarks/kills.py": "from tests.rigs.kills import g\n",
    "benchmarks/other.py": "import shoestring.four\n",
    "tests/rigs/kills.py": "import shoestring.five\n",
    "src/shoestring/__init__.py": "",
    "src/shoestring/one.py": 'from . import two\nfrom shoestring import native\nf = native.load("loops")\n',
    "src/shoestring/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shoestring.three\n",
    "src/shoestring/three.py": "",
    "src/shoestring/four.py": "",
    "src/shoestring/five.py": "",
    "src/shoestring/training/__init__.py": "",
    "src/shoestring/training/loop.py": "",
    "src/shoestring/area/feature.py": "import shoestring.needed\n",
    "src/shoestring/needed.py": "",
    "src/shoestring/native/__init__.py": "",
    "src/shoestring/native/loops.c": "int loops;\n",
    "src/shoestring/native/unused.c": "int unused;\n",
}


@pytest.fixture
def tree(tmp_path):
    """A repository with one benchmark of one area."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def lines(first, last):
    return "".join(f"statement = {number}\n" for number in range(first, last))


def test_imports_strings_and_the_areas_own_files_are_followed(tree):
    files = {path.relative_to(tree).as_posix() for path in measured_files("benchmarks.area", "area", tree)}
    absent = {"benchmarks/other.py", *(f"src/shoestring/{name}" for name in ("three.py", "four.py", "native/unused.c"))}
    assert files == FILES.keys() - absent - {"src/shoestring/training/__init__.py"}


def test_the_share_of_changed_lines_is_estimated_from_the_sample(tree):
    code = tree / "src/shoestring/one.py"
    code.write_text(lines(0, 4000))
    sources = Sources()
    digest = sources.add([code], tree)
    assert sources.changed(digest, present_lines(tree)) == 0
    code.write_text(lines(1200, 4000) + lines(5000, 9000))  # 30% are gone; what is added does not count
    assert sources.changed(digest, present_lines(tree)) == pytest.approx(0.3, abs=0.04)
    (tree / "src/shoestring/moved.py").write_text("# moved\n" + lines(0, 1200).replace("statement", "   statement"))
    assert sources.changed(digest, present_lines(tree)) == 0
    assert sources.changed("0" * 12, present_lines(tree)) == 1


def test_the_same_code_has_the_same_digest_and_survives_its_file(tree):
    code = tree / "src/shoestring/one.py"
    code.write_text(lines(0, 400))
    sources = Sources()
    digest, first = sources.add([code], tree), sources.add([tree / "benchmarks/area.py"], tree)
    sources.write(tree, [digest])
    again = Sources.read(tree)
    assert (again.sets.keys(), again.files) == ({digest}, {one: sources.files[one] for one in sources.sets[digest]})
    assert again.add([code], tree) == digest != first
    code.write_text(lines(0, 401))
    assert again.add([code], tree) != digest


def test_two_benchmarks_in_one_folder_keep_each_others_sources(tree):
    code = tree / "src/shoestring/one.py"
    code.write_text(lines(0, 400))
    one, other = Sources.read(tree), Sources.read(tree)
    first = one.add([code], tree)
    one.write(tree, [first])
    second = other.add([tree / "benchmarks/area.py"], tree)
    other.write(tree, [first, second])  # which both are named by rows by now
    assert Sources.read(tree).sets.keys() == {first, second}


def test_a_record_that_was_tampered_with_is_refused(tree):
    code = tree / "src/shoestring/one.py"
    code.write_text(lines(0, 400))
    sources = Sources()
    digest = sources.add([code], tree)
    sources.write(tree, [digest])
    record = json.loads((tree / FILE).read_text())
    (member,) = record["sets"][digest]
    for planted in (
        {**record, "sets": {digest: []}},
        {**record, "files": {}},
        {**record, "files": {member: ["only a path"]}},
        [],
    ):
        (tree / FILE).write_text(json.dumps(planted))
        with pytest.raises(DataError, match=FILE):
            Sources.read(tree)
    path, packed = record["files"][member]
    (tree / FILE).write_text(json.dumps({**record, "files": {member: [path, packed[4:]]}}))
    with pytest.raises(DataError, match="keeps other lines"):
        Sources.read(tree).check_current(tree)


def test_a_row_names_the_code_of_its_measurement_and_of_its_stored_runs(tmp_path, monkeypatch, capsys):
    from benchmarks import harness

    monkeypatch.setattr("benchmarks.machine._given", {ROOT: "0123456789ab"})
    run = tmp_path / "runs" / "area" / "run.json"

    def measured(deadline):
        return float(harness.stored(run, lambda: None, lambda: {"loss": 3})["loss"])

    bar = Bar("area.one", "what", ">=", 2.0, measure=measured, kind="exact")
    main("area", lambda: [bar], [], tmp_path)
    (row,) = read(tmp_path / "area.json").values()
    (made,) = row.rests_on  # the run was made by the same code
    assert made["tree"] == "0123456789ab"
    assert set(Sources.read(tmp_path).sets) == {made["sources"]}
    record = json.loads(run.read_text())
    run.write_text(json.dumps(record | {"tree": "ba9876543210", "sources": "unknown"}))
    main("area", lambda: [bar], [], tmp_path)
    (row,) = read(tmp_path / "area.json").values()
    assert row.rests_on == [made, {"tree": "ba9876543210", "sources": "unknown"}]


@pytest.mark.slow
def test_rows_of_changed_unknown_and_uncommitted_code_are_shown_as_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.machine._given", {ROOT: "0123456789ab"})
    bar = Bar("area.one", "what", ">=", 2.0, measure=lambda _: 3.0, kind="exact")
    main("area", lambda: [bar], [], tmp_path)
    (row,) = read(tmp_path / "area.json").values()
    capsys.readouterr()
    assert stale.main([], tmp_path) == 0
    assert capsys.readouterr().out == ""
    unknown = replace(row, id="area.two", rests_on=[{"tree": "unknown", "sources": "unknown"}])
    dirty = replace(row, id="area.three", rests_on=[{**row.rests_on[0], "tree": "0123456789ab-dirty"}])
    never = replace(row, id="area.four", measured=None, status="not-run", reason="no GPU", rests_on=[])
    write(tmp_path / "area.json", [row, unknown, dirty, never])
    assert [each.id for share, each in stale.ranked(tmp_path) if share > STALE] == ["area.three", "area.two"]
    page = tmp_path / "evidence.md"
    assert write_evidence([], tmp_path, page) == 0
    assert page.read_text().count("| held, stale |") == 2
    lost = replace(row, rests_on=[{"tree": "0123456789ab", "sources": "f" * 12}])
    write(tmp_path / "area.json", [lost])
    assert write_evidence(["--check"], tmp_path, page) == 2
    assert "names the source set" in capsys.readouterr().err


@pytest.mark.slow
def test_stale_rows_are_measured_again_until_the_time_is_up(tmp_path, monkeypatch, capfd):
    row = read_one(tmp_path, monkeypatch)
    old = [{"tree": "unknown", "sources": "unknown"}]
    commands = {"one": "python -c print('first')", "two": "python -m benchmarks.gpu", "three": "python -c 1/0"}
    write(
        tmp_path / "area.json",
        [replace(row, id=f"area.{name}", rests_on=old, command=command) for name, command in commands.items()],
    )
    assert stale.main(["--hours", "1", "--only", "area.one", "--only", "area.two"], tmp_path) == 0
    assert capfd.readouterr().out.count("first\n") == 1
    assert stale.main(["--hours", "1"], tmp_path) == 1
    assert stale.main(["--hours", "1e-12", "--only", "area.three"], tmp_path) == 0
    capfd.readouterr()


def read_one(folder, monkeypatch):
    monkeypatch.setattr("benchmarks.machine._given", {ROOT: "0123456789ab"})
    main("area", lambda: [Bar("area.one", "what", ">=", 2.0, measure=lambda _: 3.0, kind="exact")], [], folder)
    return read(folder / "area.json")["area.one"]


def test_environments_name_gits_tree(monkeypatch):
    monkeypatch.setattr("benchmarks.machine._given", {})
    assert Environment.capture().tree not in ("", "unknown")
