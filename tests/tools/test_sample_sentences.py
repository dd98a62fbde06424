"""Sentences are found wherever users and readers meet them, and drawn the same by the same seed."""

from pathlib import Path

import pytest

from tools.sample_sentences import main, sample, sentences

TEXT = '''"""A file of settings. It has two sentences."""

import os  # noqa: F401

# Why the order matters:
# the first is closed last.
class Settings:
    """What is set.

    Args:
        length: of the text, in words.
    """

    length: int = 3
    """Length of the text: `short` or longer. Larger is slower."""

    def check(self):
        if self.length < 1:  # of an empty text
            raise ConfigError(f"`length` must be positive, got {self.length}", hint="give a positive number")
        log.warning("the text is %d words long", self.length)
'''


def test_each_kind_is_read_with_its_code():
    read = [(it.line, it.kind, it.text, it.code) for it in sentences(TEXT, "a.py")]
    check = 'raise ConfigError(f"`length` must be positive, got {self.length}", hint="give a positive number")'
    assert sorted(read) == [
        (1, "docstring", "A file of settings.", "(the file)"),
        (1, "docstring", "It has two sentences.", "(the file)"),
        (5, "comment", "Why the order matters: the first is closed last.", "class Settings:"),
        (8, "docstring", "What is set.", "class Settings:"),
        (8, "docstring", "length: of the text, in words.", "class Settings:"),
        (15, "docstring", "Larger is slower.", "length: int = 3"),
        (15, "docstring", "Length of the text: `short` or longer.", "length: int = 3"),
        (18, "comment", "of an empty text", "if self.length < 1:  # of an empty text"),
        (19, "message", "`length` must be positive, got {…}", check),
        (19, "message", "give a positive number", check),
        (20, "message", "the text is %d words long", 'log.warning("the text is %d words long", self.length)'),
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(TEXT)
    (tmp_path / "src/b.py").write_text("".join(f"x = {n}  # comment number {n}\n" for n in range(200)))
    return tmp_path


def test_the_same_seed_draws_the_same(root: Path):
    assert sample(root, 1, 50) == sample(root, 1, 50) != sample(root, 2, 50)
    assert len(set(sample(root, 1, 50))) == 50
    assert len(sample(root, 1, 1000)) == 211


def test_the_command_prints_a_numbered_list(root: Path, capsys):
    assert main(["--seed", "3", "--n", "2", str(root)]) == 0
    first, place, _, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("1. ") and second.startswith("2. ") and " at src/" in place
