"""Formulas that are spelt out by hand, in the text of functions, by somebody who had not seen what knows them.

`spelt_by_hand` has the functions; nothing of it runs. What is measured is which operator each is known for. What was
missed when they were new has been mended since, so that the bars say what is known and no longer how general that is.
"""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_share
from benchmarks.profile import spelt_by_hand

FIRST = "first, before anything was mended by them: 28 of 36 known, 0 of 24 alarmed"
TANH = {"F.gelu tanh": "F.gelu(x, approximate='tanh')"}


def known() -> dict[str, list[str]]:
    """Of each function what it is known for, by its name or by that of its class and its own."""
    from shoestring.profile.analyses.formulas import spelt_out
    from shoestring.profile.analyses.statements import Text

    text = Text.of(Path(spelt_by_hand.__file__).read_text())
    assert text is not None
    found = {}
    for node in ast.walk(text.module):
        if isinstance(node, ast.FunctionDef):
            above = text.parents[node]
            name = f"{above.name}.{node.name}" if isinstance(above, ast.ClassDef) else node.name
            found[name] = [formula.instead for formula in spelt_out(text, node)]
    return found


def recall(_: Deadline) -> Measured:
    """Share of the formulas that are known for what they are, and for nothing else."""
    found = known()
    missed = [
        f"{name} ({', '.join(found[name]) or 'nothing'})"
        for name, operator in spelt_by_hand.SPELT.items()
        if [_is(operator, said) for said in found[name]] != [True]
    ]
    cases = len(spelt_by_hand.SPELT)
    return of_share(cases - len(missed), cases, _note(cases, "missed", missed))


def false_alarms(_: Deadline) -> Measured:
    """Share of what only looks like them in which a formula is seen."""
    found = known()
    alarmed = [f"{name} ({', '.join(found[name])})" for name in spelt_by_hand.ALIKE if found[name]]
    cases = len(spelt_by_hand.ALIKE)
    return of_share(len(alarmed), cases, _note(cases, "alarmed", alarmed))


def _is(operator: str, said: str) -> bool:
    """Whether an operator is what a finding says to call."""
    if "tanh" in said or operator in TANH:
        return said == TANH.get(operator)
    return operator in said


def _note(count: int, verb: str, names: list[str]) -> str:
    return f"{count} functions; {FIRST}; {verb}: {'; '.join(names) or 'none'}"


def rows() -> list[Bar]:
    """The bars."""
    return [
        Bar(
            "profile.formulas-recall",
            "Formulas spelt out by hand that are known for what they are",
            ">=",
            0.95,
            recall,
            kind="drawn",
        ),
        Bar(
            "profile.formulas-false-alarms",
            "Functions that only look like one and are taken for it",
            "<=",
            0.05,
            false_alarms,
            kind="drawn",
        ),
    ]
