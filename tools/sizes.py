"""Print how large functions and files are, with a hint where one is larger than most readers like.

A hint fails nothing: an idea that is split where lines end is harder to read than one that is long. A file that does
not parse fails.

`python tools/sizes.py [ROOT]`. A function's size is its body: from the first statement after the docstring to its end.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

FUNCTION_LIMIT, FILE_LIMIT = 80, 400
CONCEPT_LIMIT, MEMBER_LIMIT, JOB_LIMIT = 60, 260, 15
FOLDERS = ("src", "tests", "benchmarks", "tools")
PAGES = (".js", ".css", ".html")  # in src alone: what the package ships for the browser
CORE = Path("src/shoestring/core")


@dataclass(frozen=True, order=True)
class Function:
    """One function: where it starts, its qualified name, and the lines of its body."""

    line: int
    name: str
    body: int


@dataclass(frozen=True)
class File:
    """One file: its path below the root, its lines, its functions, its public names, and where it is broken."""

    path: Path
    lines: int
    functions: tuple[Function, ...] = ()
    concepts: Mapping[str, int] = field(default_factory=dict)
    broken_at: int = 0


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement that is not the docstring to the end; none for a docstring alone."""
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not statements:
        return 0
    first = min([statements[0].lineno, *(it.lineno for it in getattr(statements[0], "decorator_list", []))])
    return (statements[-1].end_lineno or first) - first + 1


def functions(module: ast.Module) -> Iterator[Function]:
    """Every function of a module, nested ones and methods too."""
    statements: list[ast.AST] = [module]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(node.lineno, node.name, body_lines(node))
        statements += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def concepts(module: ast.Module) -> dict[str, int]:
    """The public classes and functions of a module, and how many public members each has; a function has none."""
    return {
        node.name: len(members(node)) if isinstance(node, ast.ClassDef) else 0
        for node in module.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }


def members(node: ast.ClassDef) -> set[str]:
    """What a reader finds on an object of a class: its methods and properties, its fields, and what `__init__` sets."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
            if statement.name == "__init__":
                names |= {
                    it.attr
                    for it in ast.walk(statement)
                    if isinstance(it, ast.Attribute) and isinstance(it.ctx, ast.Store) and _is_self(it.value)
                }
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def measure(root: Path, path: Path) -> File:
    """The sizes of one file below `root`."""
    text = path.read_text(encoding="utf-8")
    lines, name = len(text.splitlines()), path.relative_to(root)
    if path.suffix != ".py":
        return File(name, lines)
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        return File(name, lines, broken_at=error.lineno or 1)
    return File(name, lines, tuple(sorted(functions(module))), concepts(module))


def survey(root: Path) -> list[File]:
    """Every file that has a limit, by path."""
    python = (path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    pages = (path for path in (root / "src").rglob("*") if path.suffix in PAGES)
    return [measure(root, path) for path in sorted({*python, *pages})]


def core(files: Sequence[File]) -> dict[str, int]:
    """The concepts of the core with their public members: what somebody has to learn who builds on it."""
    return {name: count for file in files if file.path.parent == CORE for name, count in file.concepts.items()}


def faults(files: Sequence[File]) -> Iterator[str]:
    """One line `file:line: what is wrong` for each file that does not parse."""
    return (f"{file.path}:{file.broken_at}: does not parse" for file in files if file.broken_at)


def hints(files: Sequence[File]) -> Iterator[str]:
    """One line `file:line: what is large` for each limit that is passed."""
    for file in files:
        if file.lines > FILE_LIMIT:
            yield f"{file.path}:{FILE_LIMIT + 1}: {file.lines} lines, at most {FILE_LIMIT} in a file"
        for function in file.functions:
            if function.body > FUNCTION_LIMIT:
                yield (
                    f"{file.path}:{function.line}: {function.name} has a body of {function.body} lines, "
                    f"at most {FUNCTION_LIMIT}"
                )
    inside = core(files)
    for number, what, limit in (
        (len(inside), "public classes and functions", CONCEPT_LIMIT),
        (sum(inside.values()), "public members", MEMBER_LIMIT),
        (inside.get("Job", 0), "public members of Job", JOB_LIMIT),
    ):
        if number > limit:
            yield f"{CORE}:1: {number} {what}, at most {limit} in the core"


def summary(files: Sequence[File]) -> str:
    """The sizes of what is shipped, in three lines."""
    shipped = [file for file in files if file.path.parts[0] == "src"]
    inside = core(files)
    bodies = [function.body for file in shipped for function in file.functions]
    return "\n".join(
        [
            f"src: {len(bodies)} function bodies, {_spread(bodies)} lines (limit {FUNCTION_LIMIT})",
            f"src: {len(shipped)} files, {_spread([file.lines for file in shipped])} lines (limit {FILE_LIMIT})",
            f"core: {len(inside)} public classes and functions (limit {CONCEPT_LIMIT}), with {sum(inside.values())} "
            f"public members (limit {MEMBER_LIMIT}), {inside.get('Job', 0)} of them Job's (limit {JOB_LIMIT})",
        ]
    )


def _spread(sizes: Sequence[int]) -> str:
    if not sizes:
        return "none, 0"
    ninth = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return f"median {median(sizes):g}, p90 {ninth:g}, max {max(sizes)}"


def main(argv: Sequence[str]) -> int:
    """Print the sizes of the tree at `argv[0]`, this one by default, and hints; 1 when a file does not parse."""
    files = survey(Path(argv[0]) if argv else Path(__file__).parent.parent)
    found = list(faults(files))
    print("\n".join([summary(files), *found, *(f"hint: {line}" for line in hints(files))]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
