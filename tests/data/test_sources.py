"""Every source of documents, and the message for each way it can be wrong."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoestring.core.errors import DataError
from shoestring.data.sources import StandardLibrary, key_of, open_source


def texts(source, field="text"):
    return [document.text for document in open_source(str(source), field).documents()]


def records(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_files_and_globs_with_commas(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text(name)
    records(tmp_path / "e.jsonl", {"text": "one"}, "", {"text": ""}, {"text": "two"})
    assert texts(f"{tmp_path}/*.txt, {tmp_path}/e.jsonl,{tmp_path}/d.md") == ["a.txt", "b.txt", "d.md", "one", "two"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert texts(f"{tmp_path}/a.txt,{tmp_path}/*.txt") == ["a.txt", "b.txt"]


def test_keys_follow_names_below_the_pattern_and_texts_of_records(tmp_path):
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        for i in range(40):
            (tmp_path / root / f"{i}.txt").write_text(f"{root} {i}")
        records(tmp_path / root / "r.jsonl", *({"text": str(i)} for i in range(3)[:: 1 if root == "one" else -1]))
    keys = [
        [
            sorted(d.key for d in open_source(f"{tmp_path}/{root}/{glob}", "text").documents())
            for glob in ("*.txt", "*.jsonl")
        ]
        for root in ("one", "two")
    ]
    assert keys[0] == keys[1]
    assert len(set(keys[0][0])) == 40


@settings(max_examples=40)
@example("漢", 5000)
@example("a🙂", 5000)
@given(st.text(st.sampled_from("aé漢🙂\n"), min_size=1, max_size=60), st.integers(1, 300))
def test_the_parts_of_a_large_file_are_the_file(tmp_path_factory, text, times):
    path = tmp_path_factory.mktemp("parts") / "large.txt"
    path.write_text(text * times, newline="")
    parts = texts(path)
    assert "".join(parts) == text * times
    assert all(len(part.encode()) <= 1 << 16 for part in parts)
    if "\n" in text:
        assert all(part.endswith("\n") for part in parts[:-1])


def test_a_large_file_gives_enough_parts_to_split_and_many_files_stay_whole(tmp_path):
    (tmp_path / "large.txt").write_text("a line of text\n" * 50_000)
    assert 50 < len(texts(tmp_path / "large.txt")) < 80
    for i in range(40):
        (tmp_path / f"{i}.md").write_text(f"{i} a line of text\n" * 1000)
    assert len(texts(f"{tmp_path}/*.md")) == 40
    (tmp_path / "0.md").write_text("a line of text\n" * 10_000)
    keys = [document.key for document in open_source(f"{tmp_path}/*.md", "text").documents()]
    assert (len(keys), len(set(keys))) == (42, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"fine\nbut \xff here", "invalid UTF-8 at offset 9"), (b"zero \0 here", "a zero byte at offset 5")],
)
@pytest.mark.parametrize("before", [0, 100_000])
def test_a_binary_file_is_named_with_the_offset(tmp_path, content, message, before):
    (tmp_path / "a.txt").write_bytes(b"x" * before + content)
    where = int(message.split()[-1]) + before
    with pytest.raises(DataError, match=rf"a\.txt is not text: {message.rsplit(' ', 1)[0]} {where}"):
        texts(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", r"x\.jsonl:2: not JSON"),
        ("[1]", r"x\.jsonl:2: not an object"),
        ({"texts": "a"}, r"x\.jsonl:2: no field 'text'.*did you mean `texts`"),
        ({"body": "a"}, r"x\.jsonl:2: no field 'text'.*valid: body"),
        ({"text": 3}, r"x\.jsonl:2: field 'text' is int, not text"),
        ('{"text": "\\ud800"}', r"x\.jsonl:2: half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    records(tmp_path / "x.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "x.jsonl")


def test_a_line_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:1: not JSON"):
        texts(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.txt", "no file 'none.txt'"),
        ("none/*.txt", r"no file matches 'none/\*\.txt'"),
        ("python-stdlb", "did you mean `python-stdlib`"),
        ("", "is a folder|no file ''"),
        (".", r"is a folder.*\*\*/\*\.txt"),
    ],
)
def test_what_does_not_exist_is_named(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        open_source(source, "text")


def test_the_standard_library_without_tests_tables_and_installed_packages():
    library = open_source("python-stdlib", "text")
    assert isinstance(library, StandardLibrary)
    names = {path.relative_to(library.root).as_posix() for path in library.paths}
    assert {"argparse.py", "asyncio/events.py", "unittest/case.py"} <= names
    assert not any(set(Path(name).parts) & {"test", "site-packages", "encodings", "__pycache__"} for name in names)
    assert library.root == Path(sysconfig.get_path("stdlib"))


def test_the_standard_librarys_odd_files_are_skipped_and_counted(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    library = StandardLibrary(tmp_path)
    for _ in range(2):
        assert [document.key for document in library.documents()] == [key_of("good.py")]
        assert library.skipped == 1


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(DataError, match="no source of the standard library"):
        StandardLibrary(tmp_path)


def test_a_hugging_face_data_set(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    records(tmp_path / "rows" / "train.jsonl", {"body": "one"}, {"body": ""}, {"body": "two"})
    name = f"hf:{tmp_path}/rows"
    source = open_source(f"{name}:train", "body")
    assert [document.text for document in source.documents()] == ["one", "two"]
    assert json.dumps(source.identity()) == json.dumps(open_source(f"{name}:train", "body").identity())
    with pytest.raises(DataError, match=r"no field 'bod'.*did you mean `body`"):
        open_source(name, "bod")
    with pytest.raises(DataError, match="cannot load hf:"):
        open_source(f"{name}:tset", "body")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install shoestring\[hf\]"):
        open_source("hf:anything", "text")


# -- Parquet -----------------------------------------------------------------------------------------------------------


def parquet(path, rows, **settings):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet.write_table(pyarrow.table(rows), path, **settings)
    return path


def test_rows_of_parquet_are_the_documents_that_lines_of_jsonl_are(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number} é\n" for number in range(2500)] + [""]
    parquet(tmp_path / "a.parquet", {"id": list(range(2501)), "body": texts}, row_group_size=700)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    found, expected = (open_source(str(tmp_path / name), "body") for name in ("a.parquet", "a.jsonl"))
    assert list(found.documents()) == list(expected.documents()) and len(list(found.documents())) == 2500


@pytest.mark.parametrize(
    ("rows", "field", "message", "hint"),
    [
        ({"body": ["a"]}, "bdy", "no column 'bdy'", "did you mean `body`"),
        ({"body": ["a", None]}, "body", r"row 2: field 'body' is NoneType, not text", "another data.field"),
        ({"body": [1]}, "body", r"row 1: field 'body' is int, not text", "another data.field"),
    ],
)
def test_columns_that_hold_no_text_are_refused(tmp_path, rows, field, message, hint):
    pytest.importorskip("pyarrow.parquet")
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=message) as caught:
        list(open_source(str(path), field).documents())
    assert hint in caught.value.hint


@pytest.mark.parametrize("cut", [0, 3, 200, -20])
def test_damaged_parquet_is_one_line(tmp_path, cut):
    pytest.importorskip("pyarrow.parquet")
    path = parquet(tmp_path / "a.parquet", {"text": ["some text"] * 100})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="not a Parquet file, or damaged") as caught:
        list(open_source(str(path), "text").documents())
    assert "\n" not in str(caught.value)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="Parquet needs pyarrow") as caught:
        list(open_source(str(tmp_path / "a.parquet"), "text").documents())
    assert "shoestring[parquet]" in caught.value.hint
