"""Folders and files that somebody else made, whose code leaves a mark where it is imported."""

from shoestring.cli import main
from tests.small_runs import write_run_file

OWN = """
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
with open(Path(__file__).with_name("imported"), "a") as marks:
    marks.write("once ")

class Own(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size, context=16)
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def model(vocab_size, width=32):
    return Own(vocab_size, width)

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), 1.0

def factor(step, total):
    return 1.0
"""
PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar
from shoestring import Feature, Seam
open(__file__ + ".imported", "a").write("once ")

@dataclass(frozen=True, kw_only=True)
class Noise(Feature):
    \"\"\"Does nothing.\"\"\"
    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments, seam):
        pass
"""


NO_SHAPE = dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden"))


def imported(here):
    return [path for path in (here / "imported", here / "intruding/__init__.py.imported") if path.exists()]


def refused(capsys, *arguments):
    """The command ends with one line that names the code, and its hint."""
    capsys.readouterr()
    assert main([str(each) for each in arguments]) == 2
    error, blank, hint, *rest = capsys.readouterr().err.split("\n")
    assert error.startswith("error: ") and "names code to run, `" in error and blank == "" and rest == [""]
    assert hint.startswith("hint: ")
    return error, hint


def own_run(here, ours, **settings):
    run = {"data": str(ours / "texts/*.txt"), "model": "intruder:model", "steps": 2, "folder": "own"} | settings
    tables = {"run": run, "model": NO_SHAPE}
    return str(write_run_file(here / "own.toml", tables))
