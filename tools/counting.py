"""What `python -m tools.house` counts in src/, from the syntax tree: functions that yield a line for each place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tools.sizes import body_lines, functions
from tools.walks import Defined, Function, Module, Package

COMPLEXITY, LONGEST, SHORT = 12, 60, 3
COMMANDS = ("shoestring.cli", "shoestring.commands")

# -- sizes -----------------------------------------------------------------------------------------------------------


def complex_functions(package: Package) -> Iterator[str]:
    """Functions above the limit of ruff's C901."""
    limit = f"lint.mccabe.max-complexity={COMPLEXITY}"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "C901", "--config", limit]
    command += ["--output-format", "concise", "src"]
    output = subprocess.run(command, cwd=package.root, capture_output=True, check=False, text=True).stdout
    return (line for line in output.splitlines() if "C901" in line)


def long_functions(package: Package) -> Iterator[str]:
    for module in package.modules:
        for function in functions(module.tree):
            if function.body > LONGEST:
                yield f"{module.path}:{function.line}: {function.name}: {function.body} lines"


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


def lines_of_code(package: Package) -> int:
    """Lines without docstrings, blank lines, comments and imports."""
    total = 0
    for module in package.modules:
        imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        of_imports = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        total += code_lines(module.tree, (package.root / module.path).read_text(encoding="utf-8")) - len(of_imports)
    return total


# -- names -----------------------------------------------------------------------------------------------------------


def public_names(package: Package) -> Iterator[str]:
    """Public functions, classes, and methods of public classes."""
    for module in package.modules:
        for node in module.defined.values():
            if not node.name.startswith("_"):
                yield f"{module.path}:{node.lineno}: {node.name}"
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, Function) and not inner.name.startswith("_"):
                        yield f"{module.path}:{inner.lineno}: {node.name}.{inner.name}"


def members_of(package: Package, name: str) -> Iterator[str]:
    """Public members of the class of this name, with the number of members that lie behind each: behind one of a class
    of the package, a class may hide that it has become larger."""
    kind = next((kind for kind in classes(package) if kind.node.name == name), None)
    for member, owner in sorted(_members(package, kind).items()) if kind else ():
        behind = len(_members(package, owner)) if owner else 0
        yield f"{member}: a {owner.name}, which has {behind}" if owner and behind else member


def _members(package: Package, kind: Defined) -> dict[str, Defined | None]:
    """Public members of a class, with their class where it is one of the package."""
    members: dict[str, Defined | None] = {}
    for base in package.bases(kind):
        for node in base.node.body:
            if isinstance(node, ast.AnnAssign) and "InitVar" not in ast.unparse(node.annotation):
                members[ast.unparse(node.target)] = package.annotated(base.module, node.annotation)
            elif isinstance(node, Function):
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                members[node.name] = package.annotated(base.module, node.returns) if is_property else None
                for name, value in _assigned(node):
                    owner = package.expression(base.module, value.func) if isinstance(value, ast.Call) else None
                    is_object = isinstance(owner, Defined) and isinstance(owner.node, ast.ClassDef)
                    members.setdefault(name, owner if isinstance(owner, Defined) and is_object else None)
    return {name: owner for name, owner in members.items() if not name.startswith("_")}


def _assigned(method: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and values of what a method assigns to `self`."""
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=targets, value=value):
                parts = [part for target in targets for part in (getattr(target, "elts", None) or [target])]
            case ast.AnnAssign(target=target, value=value):
                parts = [target]
            case _:
                continue
        for part in parts:
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                yield part.attr, value


@dataclass(frozen=True, order=True)
class PrivateFunction:
    """A private function or method that one place uses."""

    path: Path
    line: int
    name: str
    lines: int
    inlinable: bool
    """Whether that place calls it, rather than passing it on, and nothing decorates it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.lines} lines"


@cache
def used_once(package: Package) -> tuple[PrivateFunction, ...]:
    """Private functions and methods with one use in all of src, their own bodies aside. A name that several files
    define is looked for in its own file and in those that define none of that name."""
    defined: dict[str, list[tuple[Module, Function]]] = defaultdict(list)
    for module in package.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function) and node.name.startswith("_") and not node.name.endswith("__"):
                defined[node.name].append((module, node))
    uses = {module: _uses(module.tree) for module in package.modules}
    once = []
    for name, places in defined.items():
        homes = [module for module, _ in places]
        elsewhere = sum((uses[module][name] for module in uses if module not in homes), Counter[bool]())
        for module, node in places:
            calls_and_reads = uses[module][name] + elsewhere - _uses(node)[name]
            if calls_and_reads.total() == 1:
                inlinable = calls_and_reads[True] == 1 and not node.decorator_list
                once.append(PrivateFunction(module.path, node.lineno, name, body_lines(node), inlinable))
    return tuple(sorted(once))


def _uses(tree: ast.AST) -> defaultdict[str, Counter[bool]]:
    """Name -> how often it is called (True), and read without a call (False)."""
    uses: defaultdict[str, Counter[bool]] = defaultdict(Counter)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            uses[node.id if isinstance(node, ast.Name) else node.attr][id(node) in called] += 1
    return uses


def short(package: Package, *, inlinable: bool) -> Iterator[str]:
    """Those of them that have few lines."""
    return (str(it) for it in used_once(package) if it.lines <= SHORT and it.inlinable is inlinable)


# -- settings and verbs ----------------------------------------------------------------------------------------------


def classes(package: Package) -> Iterator[Defined]:
    for module in package.modules:
        yield from (Defined(module, node) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _is_dataclass(kind: Defined) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in kind.node.decorator_list)


def _of_commands(module: Module) -> bool:
    return module.name.startswith(COMMANDS)


def typed_twice(package: Package, settings: Collection[tuple[Path, str]]) -> Iterator[str]:
    """Fields of settings with the name, type, default and help text of a field of another dataclass, and those that a
    command hands on to a dataclass of the library one by one, as `Sampling(seed=self.seed)`.

    Args:
        settings: file and name of each class whose fields users set, in a run file or on the command line.
    """
    twice: dict[str, str] = {}
    same: dict[tuple[str, ...], list[tuple[Defined, str]]] = defaultdict(list)
    for kind in filter(_is_dataclass, classes(package)):
        for field, place in _described_fields(kind):
            same[field].append((kind, place))
    for fields in same.values():
        if any((kind.module.path, kind.name) in settings for kind, _ in fields):
            (_, first), *others = sorted(fields, key=lambda field: _of_commands(field[0].module))
            twice |= {place.rpartition(" ")[2]: f"{place}, as in {first}" for _, place in others}
    for kind in filter(lambda kind: _of_commands(kind.module), classes(package)):
        for node in ast.walk(kind.node) if (kind.module.path, kind.name) in settings else ():
            target = package.expression(kind.module, node.func) if isinstance(node, ast.Call) else None
            if isinstance(target, Defined) and _is_dataclass(target) and not _of_commands(target.module):
                assert isinstance(node, ast.Call)
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
                        field, place = f"{kind.name}.{value.attr}", f"{kind.module.path}:{value.lineno}"
                        twice.setdefault(field, f"{place}: {field}, given to {target.name}")
    yield from twice.values()


def _described_fields(kind: Defined) -> Iterator[tuple[tuple[str, ...], str]]:
    """(name, type, default, help text) and place of each field with a help text."""
    for one, following in pairwise(kind.node.body):
        match one, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                default = ast.unparse(one.value) if one.value else ""
                field = name, ast.unparse(one.annotation), default, " ".join(text.split())
                yield field, f"{kind.module.path}:{one.lineno}: {kind.name}.{name}"


def several_meanings(
    texts: Mapping[str, Mapping[str, str]], reviewed: Mapping[str, Mapping[str, list[str]]]
) -> Iterator[str]:
    """Keys of run files that mean different things in different tables, and those that nobody has reviewed.

    Args:
        texts: key -> table -> help text. reviewed: key -> meaning -> tables.
    """
    for key, tables in sorted(texts.items()):
        if len(set(tables.values())) < 2:
            continue
        meanings = {meaning for meaning, listed in reviewed.get(key, {}).items() if tables.keys() & listed}
        if len(meanings) > 1:
            yield f"{key}: " + "; ".join(sorted(meanings))
        elif missing := sorted(
            tables.keys() - {table for listed in reviewed.get(key, {}).values() for table in listed}
        ):
            yield f"{key}: not reviewed in {', '.join(missing)}"


def scattered(package: Package, settings: Collection[tuple[Path, str]]) -> Iterator[str]:
    """Areas of which a class that users set is declared elsewhere than in `settings.py` or `settings/`."""
    homes: dict[str, Counter[str]] = defaultdict(Counter)
    for kind in classes(package):
        area, *file = kind.module.path.parts[2:]  # below src/shoestring
        if file and area != "commands" and (kind.module.path, kind.node.name) in settings:
            homes[area]["settings" if file[0] in {"settings", "settings.py"} else "/".join(file)] += 1
    for area, places in sorted(homes.items()):
        if set(places) != {"settings"}:
            yield f"{area}: " + ", ".join(f"{number} in {home}" for home, number in sorted(places.items()))


def not_importable(package: Package, function: str) -> str:
    """Why the function `module:name` of a verb is no library; empty where it is one and a test calls it."""
    name = f"shoestring.{function.replace(':', '.')}"
    target = package.definition(name)
    if not isinstance(target, Defined):
        return f"there is no {name}"
    if _of_commands(target.module) or target.node.name.startswith("_"):
        return f"{name} is a part of the command line"
    if not any(target.node.name in text and _calls(package, path, target) for path, text in _tests(package)):
        return f"no test calls {name} but through the command line"
    return ""


@cache
def _tests(package: Package) -> list[tuple[Path, str]]:
    return [(path, path.read_text(encoding="utf-8")) for path in sorted((package.root / "tests").rglob("*.py"))]


@cache
def _test(path: Path) -> Module:
    return Module(path.stem, path, ast.parse(path.read_text(encoding="utf-8")))


def _calls(package: Package, path: Path, target: Defined) -> bool:
    """Whether a file calls a function of the package, by any of its names."""
    module = _test(path)
    calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return any(isinstance(it := package.expression(module, func), Defined) and it.node is target.node for func in calls)
