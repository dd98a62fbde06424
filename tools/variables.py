"""Fail where src/ has more variables than allowed whose names say nothing: `each`, `found`, `said`, `kept`, `given`.

`python -m tools.variables [ROOT]`. A variable is what an assignment, a loop, a comprehension, `with … as`, `:=` or a
pattern binds, and a parameter. Name the thing: `rank`, `candidates`, `message`, `saved`, `arguments`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES = {"each", "found", "said", "kept", "given"}
ALLOWED = 1
"""Such variables that src/ may have; to be lowered as they are renamed, to 0 in the end."""


def variables(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each binding of such a name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=str(name)):
                if name in NAMES:
                    yield node.lineno, name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)) if name in NAMES:
                yield node.lineno, name


def faults(root: Path) -> list[str]:
    """One line `file:line: what is wrong` for each."""
    return [
        f"{path.relative_to(root)}:{line}: `{name}` is no name for a variable; name the thing"
        for path in sorted((root / "src").rglob("*.py"))
        for line, name in sorted(variables(ast.parse(path.read_text(encoding="utf-8"))))
    ]


def main(argv: Sequence[str], allowed: int = ALLOWED) -> int:
    """Print each where there are more than allowed, and return 1; `--all` prints them in any case."""
    roots = [argument for argument in argv if not argument.startswith("-")]
    lines = faults(Path(roots[0]) if roots else Path(__file__).parent.parent)
    if len(lines) > allowed or "--all" in argv:
        print("\n".join(lines))
    print(f"src: {len(lines)} variables named {', '.join(sorted(NAMES))} ({allowed} allowed)")
    if len(lines) < allowed:
        print(f"hint: lower ALLOWED in tools/variables.py to {len(lines)}")
    return 1 if len(lines) > allowed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
