"""Draw sentences of docstrings, comments and messages from src/, for judges who note which they had to read twice.

`python -m tools.sample_sentences --seed S [--n 100] [--under FOLDER] [ROOT]`. The same seed draws the same sentences
from the same tree. Each is printed with its place and the line of code that it belongs to. The text for the judges is
`tools/questions/judging.md`.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SHORTEST = 3
"""Words that a sentence has at least; shorter ones are headings and names."""
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(\d])")
_HEADING = re.compile(r"^(Args|Arguments|Returns|Raises|Yields):$")
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|pyrefly:|fmt:|own file:|-- )")


@dataclass(frozen=True, order=True)
class Sentence:
    """One sentence, and where it stands."""

    path: str
    line: int
    kind: str
    """Docstring, comment or message."""
    text: str
    code: str
    """Line of code that it belongs to: a signature, a field, the statement below a comment."""


def sentences(text: str, path: str) -> Iterator[Sentence]:
    """All sentences of a file."""
    lines = text.splitlines()
    for line, kind, code, prose in [*_of_tree(ast.parse(text)), *_comments(text)]:
        shown = lines[code - 1].strip() if code else "(the file)"
        for sentence in _split(prose):
            yield Sentence(path, line, kind, sentence, shown)


def _of_tree(tree: ast.Module) -> Iterator[tuple[int, str, int, str]]:
    """(line, kind, line of the code, text) of strings that stand as statements, and of what is raised or logged."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for before, statement in zip([node, *body], body, strict=False) if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, "docstring", getattr(before, "lineno", 0), text
        if isinstance(node, ast.Call) and _is_message(node.func):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if text := _text(value):
                    yield value.lineno, "message", node.lineno, text


def _is_message(func: ast.expr) -> bool:
    """Whether a call makes an error or writes to the log."""
    name = ast.unparse(func)
    return name.endswith(("Error", "log.info", "log.warning", "log.error"))


def _text(value: ast.expr) -> str:
    """A string, with the source of what is put into it in braces."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) if isinstance(part, ast.Constant) else "{…}" for part in parts)
    return ""


def _comments(text: str) -> Iterator[tuple[int, str, int, str]]:
    """Comments; those on lines of their own are one where they follow each other."""
    begun, words = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            comment = token.string.lstrip("# ")
            if token.line[:column].strip():
                yield line, "comment", line, comment
            else:
                begun, words = begun or line, f"{words} {comment}"
        elif begun and token.type not in {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}:
            yield begun, "comment", line, words
            begun, words = 0, ""


def _split(text: str) -> Iterator[str]:
    """Sentences of a text, of which each paragraph and each entry of a list or of `Args:` begins a new one."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\w+: ))|(?<=:)\n", text):
        joined = " ".join(paragraph.split())
        if "├" in joined:  # a drawing
            continue
        for sentence in _END.split(joined):
            if len(sentence.split()) >= SHORTEST and not _HEADING.match(sentence):
                yield sentence


def sample(root: Path, seed: int, number: int, under: str = "src") -> list[Sentence]:
    """Sentences drawn without replacement, in the order of the files."""
    everything = [
        sentence
        for path in sorted((root / under).rglob("*.py"))
        for sentence in sentences(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]
    return sorted(random.Random(seed).sample(sorted(everything), min(number, len(everything))))


def main(argv: Sequence[str]) -> int:
    """Print a numbered sample."""
    parser = argparse.ArgumentParser(prog="python -m tools.sample_sentences", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--under", default="src")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    arguments = parser.parse_args(argv)
    for number, it in enumerate(sample(arguments.root, arguments.seed, arguments.n, arguments.under), start=1):
        print(f"{number}. {it.text}\n   {it.kind} at {it.path}:{it.line}, of `{it.code}`\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
