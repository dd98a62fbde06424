"""Print how large functions and files are, and fail where one is too large.

`python tools/sizes.py [ROOT]`. A function's size is its body: from the first statement after the docstring to its end.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

FUNCTION_LIMIT, FILE_LIMIT, CORE_LIMIT = 80, 400, 1200
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
    """One file: its path below the root, its lines, its lines of code, its functions, and where it is broken."""

    path: Path
    lines: int
    code: int
    functions: tuple[Function, ...] = ()
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


def code_lines(module: ast.Module, text: str) -> int:
    """Lines that are neither blank, nor comments alone, nor strings that stand as statements (docstrings, help)."""
    prose = {
        line
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbered = enumerate((line.strip() for line in text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in prose for number, line in numbered)


def measure(root: Path, path: Path) -> File:
    """The sizes of one file below `root`."""
    text = path.read_text(encoding="utf-8")
    lines, name = len(text.splitlines()), path.relative_to(root)
    if path.suffix != ".py":
        return File(name, lines, lines)
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        return File(name, lines, lines, broken_at=error.lineno or 1)
    return File(name, lines, code_lines(module, text), tuple(sorted(functions(module))))


def survey(root: Path) -> list[File]:
    """Every file that has a limit, by path."""
    python = (path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    pages = (path for path in (root / "src").rglob("*") if path.suffix in PAGES)
    return [measure(root, path) for path in sorted({*python, *pages})]


def core_lines(files: Sequence[File]) -> int:
    """Lines of code of the core together; docstrings with shapes, units and errors are wanted there."""
    return sum(file.code for file in files if file.path.is_relative_to(CORE))


def faults(files: Sequence[File]) -> Iterator[str]:
    """One line `file:line: what is too large` for each limit that is passed."""
    for file in files:
        if file.broken_at:
            yield f"{file.path}:{file.broken_at}: does not parse"
        if file.lines > FILE_LIMIT:
            yield f"{file.path}:{FILE_LIMIT + 1}: {file.lines} lines, at most {FILE_LIMIT} in a file"
        for function in file.functions:
            if function.body > FUNCTION_LIMIT:
                yield (
                    f"{file.path}:{function.line}: {function.name} has a body of {function.body} lines, "
                    f"at most {FUNCTION_LIMIT}"
                )
    if (total := core_lines(files)) > CORE_LIMIT:
        yield f"{CORE}:1: {total} lines of code, at most {CORE_LIMIT} in the core"


def summary(files: Sequence[File]) -> str:
    """The sizes of what is shipped, in three lines."""
    shipped = [file for file in files if file.path.parts[0] == "src"]
    bodies = [function.body for file in shipped for function in file.functions]
    return "\n".join(
        [
            f"src: {len(bodies)} function bodies, {_spread(bodies)} lines (limit {FUNCTION_LIMIT})",
            f"src: {len(shipped)} files, {_spread([file.lines for file in shipped])} lines (limit {FILE_LIMIT})",
            f"core: {core_lines(files)} lines of code (limit {CORE_LIMIT})",
        ]
    )


def _spread(sizes: Sequence[int]) -> str:
    if not sizes:
        return "none, 0"
    ninth = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return f"median {median(sizes):g}, p90 {ninth:g}, max {max(sizes)}"


def main(argv: Sequence[str]) -> int:
    """Print the sizes of the tree at `argv[0]`, this one by default; 1 when something is too large."""
    files = survey(Path(argv[0]) if argv else Path(__file__).parent.parent)
    found = list(faults(files))
    print("\n".join([summary(files), *found]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
