"""Data of others: what it decodes to is bounded, each file is read once, and what is malformed is a DataError."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from shoestring.core.errors import DataError
from shoestring.data import parquet
from shoestring.data.chat_template import chat_template
from shoestring.data.flattening import from_bytes, to_bytes
from shoestring.data.images import read_idx
from shoestring.data.sources import open_source
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from shoestring.storage import foreign


def documents(source):
    return [document.text for document in open_source(str(source), "text").documents()]


def test_a_folder_that_links_lead_to_in_circles_is_read_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / f"texts/{name}/{name}.txt").write_text(name * 50)
        (tmp_path / f"texts/{name}/up").symlink_to("..")
        (tmp_path / f"texts/{name}/other").symlink_to("../a")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/c.txt").write_text("c" * 50)
    (tmp_path / "texts/linked").symlink_to("../outside")  # a link elsewhere is followed, as always
    assert sorted(documents(f"{tmp_path}/texts/**/*.txt")) == ["a" * 50, "b" * 50, "c" * 50]
    source = open_source(f"{tmp_path}/texts/**/*.txt", "text")
    assert sorted(source.paths.values()) == ["a/a.txt", "b/b.txt", "linked/c.txt"]
    assert documents(f"{tmp_path}/texts/**/a/*.txt") == ["a" * 50]
    assert sorted(documents(f"{tmp_path}/**/b/**")) == ["a" * 50, "b" * 50, "c" * 50]


def test_a_file_under_two_names_counts_once(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 5000)
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("a.txt")
    os.mkfifo(tmp_path / "d.txt")
    assert sum(map(len, documents(f"{tmp_path}/*.txt"))) == 5000
    assert sum(map(len, documents(f"{tmp_path}/a.txt,{tmp_path}/c.txt"))) == 5000


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"text":' * 100_000, b"1" * 5000, b"\xff", b"{", b"null"])
def test_a_malformed_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        documents(tmp_path / "a.jsonl")


def test_a_line_is_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "x"}\n')
        file.truncate(foreign.LINE_LIMIT + 100)
    with pytest.raises(DataError, match=r"a\.jsonl:2: it is longer than 67.1 MB"):
        documents(path)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def write(path, column, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False, **options)
    return path


def repeated(text, rows):
    """A column of equal values, which takes a few bytes."""
    part = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * min(rows, 1 << 16), pyarrow.int32()), [text])
    return pyarrow.chunked_array([part] * max(1, rows >> 16))


@pytest.mark.parametrize(("size", "rows"), [
    (1 << 20, 1 << 10), *(pytest.param(*large, marks=pytest.mark.slow) for large in ((1, 1 << 22), (1 << 23, 1 << 9))),
])  # fmt: skip
def test_a_parquet_file_that_grows_without_bound_is_refused(tmp_path, size, rows):
    path = write(tmp_path / "a.parquet", repeated("x" * size, rows), compression="zstd", row_group_size=1 << 22)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="far more"):
        for _ in parquet.rows(path, "text"):
            pass


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_honest_parquet_files_are_read(tmp_path, compression, version):
    texts = [f"{number} " * (number % 50) for number in range(600)]
    options = {"compression": compression, "data_page_version": version, "row_group_size": 140, "data_page_size": 999}
    path = write(tmp_path / "a.parquet", texts, **options)
    assert list(parquet.rows(path, "text")) == texts
    chats = [[{"role": "user", "content": text}] * 2 for text in texts]
    path = write(tmp_path / "b.parquet", chats, **options)
    assert list(parquet.rows(path, "text")) == chats
    parquet.check(path)
    with pytest.raises(DataError, match="no column 'test'"):
        next(parquet.rows(path, "test"))


@pytest.mark.parametrize("apart", [61, pytest.param(5, marks=pytest.mark.slow)])
def test_damaged_parquet_files_are_one_line(tmp_path, apart):
    path = write(tmp_path / "a.parquet", ["a text"] * 50)
    data = path.read_bytes()
    for place in range(4, len(data) - 4, apart):
        for value in (0, 255, data[place] ^ 64):
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                list(parquet.rows(path, "text"))
            except DataError as error:
                assert "\n" not in error.parts()[1]


# -- templates, samples, images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    ["{{ 9 ** 9 ** 9 if false }}{% for %}", "{% if a %}" * 300 + "{% endif %}" * 300, "{{" + "(" * 5000, "{% x %}",
     "{{ a | nofilter }}", "{{ [" * 3000],
)  # fmt: skip
def test_a_template_that_is_not_valid_is_one_line(template):
    companions = {"chat_template.jinja": template.encode()}
    with pytest.raises(DataError, match="chat template"):
        chat_template(Tokenizer(byte_tokenizer().engine, companions=companions))


def test_a_template_is_not_computed_before_it_is_used():
    companions = {"tokenizer_config.json": json.dumps({"chat_template": "{{ 9 ** 9 ** 9 if false }}x"}).encode()}
    template = chat_template(Tokenizer(byte_tokenizer().engine, companions=companions))
    assert template is not None and template.render([], {}) == "x"


def test_a_damaged_sample_is_one_line():
    raw = bytearray(to_bytes({"a": 1, "b": [2.0, "x"]}))
    assert from_bytes(raw) == {"a": 1, "b": [2.0, "x"]}
    heads = ['{"t": [false, "load", [1], 0]}', "[" * 5000, '{"t": [false, "float32", [1099511627776], 0]}', "7", "{}"]
    for head in map(str.encode, heads):
        with pytest.raises(DataError, match="damaged"):
            from_bytes(bytearray(len(head).to_bytes(8, "little") + head))


def test_image_files_whose_shape_cannot_be_are_one_line(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(b"\0\0\x08\xff" + bytes(4 * 255))
    with pytest.raises(DataError, match="255 dimensions"):
        read_idx(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        read_idx(path)
