"""Check that every help text stands alone: a full noun phrase or sentence in the field's words.

`python -m tools.help_texts [PACKAGE ...]`. A help text is read in `--help`, in docs/reference/run-file.md and
in the report, often without the key above it. Checked are the settings classes of the run file and the verbs of the
command line: the docstring of each class and of each of its fields.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from shoestring.commands.table import GROUPS, VERBS, Verb
from shoestring.core.feature import Feature
from shoestring.data import Data
from shoestring.run import Settings, keys

SHORTEST = 4
"""Words that a help text has at least."""

_FRAGMENT = re.compile(
    r"(as|at|between|by|during|for|from|in|into|of|on|over|through|to|under|what|when|where|which|who|whose|why|"
    r"how|with|within|without|it|its|that|this|these|those|and|or|so|such)\b",
    re.IGNORECASE,
)
_DANGLING = re.compile(r"\b(?:of|to|for|with|than|by) (?:it|its|that|this|so)[.;,]", re.IGNORECASE)
_PRIVATE_WORDS = {
    r"saves": "`checkpoints`, `writes a checkpoint`, or `reduces`, `cuts`",
    r"(?:a|an|the|each|every|last|newest|one) (?:\w+ )?save": "`checkpoint`",
    r"go(?:es|ing)? on": "`resume`, `continue`",
    r"owed|owes": "`residual`, `error feedback`",
    r"mishaps?": "`failure`",
    r"meeting places?": "`rendezvous`",
    r"so-many\w*": "a number",
    r"hand(?:s|ed)? round": "`broadcast`, `all-gather`",
    r"empty is|nothing is said": "`defaults to`",
    r"bytes grow with it": "say what a larger value buys and costs",
}


@dataclass(frozen=True)
class HelpText:
    """One help text and the place where it stands; `key` is empty for the docstring of the class itself."""

    path: Path
    line: int
    owner: str
    key: str
    text: str


def main(packages: Sequence[str]) -> int:
    """Print each fault as `file:line: what is wrong`; 1 where there is one."""
    verbs = [verb.load() for verb in VERBS.values()]
    classes = keys(packages).values() if packages else [Settings, Data, *keys().values(), *verbs]
    texts = [*help_texts(classes), *([] if packages else verb_lines())]
    found = list(faults(texts, Path(__file__).resolve().parent.parent))
    for fault in found:
        print(fault)
    return 1 if found else 0


def faults(texts: Iterable[HelpText], root: Path) -> Iterator[str]:
    """One line for each thing that is wrong with a text; paths below `root` are shortened."""
    for each in texts:
        path = each.path.relative_to(root) if each.path.is_relative_to(root) else each.path
        name = f"{each.owner}.{each.key}" if each.key else each.owner
        for reason in reasons(each.text):
            yield f"{path}:{each.line}: {name}: {reason}: {each.text!r}"


def reasons(text: str) -> Iterator[str]:
    """Why `text` does not stand alone as a noun phrase or sentence."""
    if not text:
        yield "has no help text"
        return
    if not text[0].isupper():
        yield "does not begin with a capital letter"
    if not text.endswith((".", ".)")):
        yield "does not end with a full stop"
    if len(text.split()) < SHORTEST:
        yield f"has fewer than {SHORTEST} words"
    if fragment := _FRAGMENT.match(text):
        yield f"begins with `{fragment[0]}`, as the rest of another sentence"
    if dangling := _DANGLING.search(text):
        yield f"refers with `{dangling[0]}` to something outside of the text"
    for pattern, instead in _PRIVATE_WORDS.items():
        if word := re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield f"says `{word[0]}`; write {instead}"


def help_texts(classes: Iterable[type]) -> Iterator[HelpText]:
    """The texts of these dataclasses, of those that they inherit fields from, and of their subcommands; each once."""
    seen: set[type] = {Feature}
    waiting = list(classes)
    while waiting:
        kind = waiting.pop(0)
        if kind in seen or not is_dataclass(kind):
            continue
        seen.add(kind)
        yield from texts_of(kind)
        hints = get_type_hints(kind, include_extras=True).values()
        waiting += [*kind.__mro__, *(part for hint in hints for part in _classes_in(hint))]


def verb_lines() -> Iterator[HelpText]:
    """The lines of help in the table of verbs."""
    path = Path(inspect.getsourcefile(Verb) or "")
    lines = path.read_text().splitlines()
    for name, text in [*((name, verb.help) for name, verb in VERBS.items()), *GROUPS.items()]:
        number = next(number for number, line in enumerate(lines, 1) if line.startswith(f'    "{name}": '))
        yield HelpText(path, number, "VERBS", name, text)


def texts_of(kind: type) -> Iterator[HelpText]:
    """The docstring of a dataclass, and the text below each field that it declares itself."""
    lines, first = inspect.getsourcelines(kind)
    path = Path(inspect.getsourcefile(kind) or "")
    (body,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(body, ast.ClassDef)
    summary = (ast.get_docstring(body) or "").partition("\n\n")[0]
    yield HelpText(path, first, kind.__name__, "", " ".join(summary.split()))
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if not _of_class(annotation):
                yield HelpText(path, first + statement.lineno - 1, kind.__name__, name, _string(following))


def _of_class(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).startswith("ClassVar")


def _string(statement: ast.stmt | None) -> str:
    """The text of a string that stands as a statement, on one line; empty for any other statement."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def _classes_in(hint: object) -> Iterator[type]:
    """The classes that an annotation names, at any depth: subcommands are a union of them."""
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _classes_in(part)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
