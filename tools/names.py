"""Fail where a class name of the package has two meanings: where two files below src/ define it.

`python -m tools.names [ROOT]`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

NESTED = {"Meta", "Migration"}
"""Names that a library gives a meaning inside of a class or a module, as Django does."""


def faults(root: Path) -> Iterator[str]:
    """One line `file:line: what is wrong` for each class name that is defined again."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in NESTED:
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    for name, (first, *others) in places.items():
        for place in others:
            yield f"{place}: class {name} is also at {first}; name each by what it is"


def main(argv: Sequence[str]) -> int:
    """Print each fault of the tree at `argv[0]`, this one by default; 1 when there is one."""
    lines = list(faults(Path(argv[0]) if argv else Path(__file__).parent.parent))
    print("\n".join(lines or ["src: no class name is defined twice"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
