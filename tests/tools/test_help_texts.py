"""The check of help texts: what each rule refuses, and that it reads settings, inherited fields and subcommands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest

from shoestring.commands.table import VERBS
from shoestring.run import keys
from tools import help_texts
from tools.help_texts import reasons


@pytest.mark.parametrize(
    "text",
    [
        "Number of tokens in a sample.",
        "Density: the fraction of entries sent each step (0.01 sends 1%).",
        "Continue a prompt with a trained model, token by token.",
        "Steps between checkpoints; with 0 a run is saved at the end and on a signal only.",
        "Itself a proper noun phrase.",
    ],
)
def test_what_stands_alone_passes(text):
    assert list(reasons(text)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no help text"),
        ("number of tokens in a sample.", "capital letter"),
        ("`auto` takes what is there.", "capital letter"),
        ("Number of tokens in a sample", "full stop"),
        ("Tokens in all.", "fewer than 4 words"),
        ("Of the first random basis.", "begins with `Of`"),
        ("How many tokens to write.", "begins with `How`"),
        ("What the values travel as.", "begins with `What`"),
        ("Its share of the tokens.", "begins with `Its`"),
        ("Nesterov's own form of it.", "refers with `of it.`"),
        ("Steps over which the density falls to that, in five stages.", "refers with `to that,`"),
        ("Steps between saves of the run.", "says `saves`"),
        ("Path of the newest save to read.", "says `the newest save`"),
        ("Add what is owed to the next step.", "says `owed`"),
        ("Takes every so-manyth layer of all.", "says `so-manyth`"),
        ("A run goes on from this one.", "says `goes on`"),
    ],
)
def test_what_does_not_is_refused_for_its_reason(text, reason):
    assert any(reason in given for given in reasons(text)), list(reasons(text))


@dataclass(frozen=True)
class Inner:
    """Settings of a subcommand, for the test."""

    depth: int = 0
    """Of the subcommand alone."""


@dataclass(frozen=True)
class Base:
    """Settings that others inherit from."""

    common: int = 0
    """Of the base class."""


@dataclass(frozen=True)
class Planted(Base):
    """Settings with bad texts: each is found once.

    What follows the first paragraph is not shown.
    """

    limit: ClassVar[int] = 3
    missing: int = 0
    action: Annotated[Inner, "a subcommand"] | None = None
    """Action that is taken here."""


def test_missing_inherited_and_nested_texts_are_found_where_they_stand():
    here = Path(__file__)
    found = list(help_texts.faults(help_texts.help_texts([Planted, Base]), here.parent))
    assert [line.split(": ")[1:3] for line in found] == [
        ["Planted.missing", "has no help text"],
        ["Base.common", "begins with `Of`, as the rest of another sentence"],
        ["Inner.depth", "begins with `Of`, as the rest of another sentence"],
    ]
    lines = here.read_text().splitlines()
    for line in found:
        name, number = line.split(":")[:2]
        key = line.split(": ")[1].split(".")[1]
        assert name == here.name
        assert lines[int(number) - 1].strip().startswith(f"{key}: ")


@pytest.mark.slow
def test_every_table_and_verb_is_read():
    kinds = {*keys().values(), *(verb.load() for verb in VERBS.values())}
    assert {kind.__name__ for kind in kinds} <= {each.owner for each in help_texts.help_texts(kinds)}


def test_a_fault_is_printed_with_its_place(capsys, monkeypatch):
    path = "src/shoestring/commands/table.py"
    bad = help_texts.HelpText(Path(help_texts.__file__).parent.parent / path, 7, "Train", "workers", "Of all.")
    monkeypatch.setattr(help_texts, "help_texts", lambda _: [bad])
    assert help_texts.main([]) == 1
    assert f"{path}:7: Train.workers: begins with `Of`" in capsys.readouterr().out
