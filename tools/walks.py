"""Follow one parameter from call to call through src/, as a reader does who asks what becomes of it.

`python -m tools.walks [--show] [--once] [ROOT]`. A *room* is a function that the walk enters. A *return* is a step back
into a file that the walk has left: at the end of a call to another file, or by a call into a file that was seen before.
A function that is called twice is walked twice, for the file is opened twice; `--once` passes it by the second time.

Only the syntax tree is read. Names are resolved by imports; the class of a receiver by annotations, constructors and
the declared results of functions. The walk follows the parameter under its other names too: a path below it, the result
of a function that takes it and returns the same type, and the field of an object that holds it. Properties are not
followed. `--show` prints the walk, and the calls that could not be resolved.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

WALKS = {
    "run, from train()": ("shoestring.training.loop", "train", "run"),
    "folder, from resume()": ("shoestring.checkpoint.recovery.resume", "resume", "where"),
}
"""The walks of the table in `tools.house`: module, function and parameter; to be changed where the function moves."""
SAME = {"Path", "str", "fspath", "cast", "replace", "deepcopy", "copy", "tuple", "list", "partial"}
"""Functions of other packages whose result stands for their argument."""


@dataclass(frozen=True, eq=False)
class Module:
    """One file: its tree, what it defines, and what its imports mean."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def defined(self) -> dict[str, Function | ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, Function | ast.ClassDef)}

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted name, for imports anywhere in the file."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
                names |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return names


@dataclass(frozen=True)
class Defined:
    """A function or a class, in the file that defines it; `owner` is the class of a method."""

    module: Module
    node: Function | ast.ClassDef
    owner: Defined | None = None

    @property
    def name(self) -> str:
        return f"{self.owner.node.name}.{self.node.name}" if self.owner else self.node.name


@dataclass(eq=False)
class Package:
    """All files below ROOT/src, each parsed when it is asked for, and the names in them."""

    root: Path
    _parsed: dict[str, Module] = field(default_factory=dict)

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Dotted name of each module -> its file, below the root."""
        paths = [path.relative_to(self.root) for path in sorted((self.root / "src").rglob("*.py"))]
        return {".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__"): path for path in paths}

    @property
    def modules(self) -> list[Module]:
        return [self.module(name) for name in self.paths]

    def module(self, name: str) -> Module:
        if name not in self._parsed:
            path = self.paths[name]
            self._parsed[name] = Module(name, path, ast.parse((self.root / path).read_text(encoding="utf-8")))
        return self._parsed[name]

    def definition(self, dotted: str) -> Defined | Module | None:
        """What a dotted name means, through re-exports; None for what is not in the package."""
        if dotted in self.paths:
            return self.module(dotted)
        above, _, name = dotted.rpartition(".")
        module = self.definition(above) if above else None
        if isinstance(module, Module):
            return self.local(module, name)
        return self.method(module, name) if isinstance(module, Defined) else None

    def local(self, module: Module, name: str) -> Defined | Module | None:
        """What a name means inside of a file."""
        if name in module.defined:
            return Defined(module, module.defined[name])
        target = module.imported.get(name)
        return self.definition(target) if target and target != f"{module.name}.{name}" else None

    def bases(self, kind: Defined) -> Iterator[Defined]:
        """A class and those that it inherits from."""
        yield kind
        for base in kind.node.bases if isinstance(kind.node, ast.ClassDef) else ():
            above = self.expression(kind.module, base)
            if isinstance(above, Defined):
                yield from self.bases(above)

    def method(self, kind: Defined, name: str) -> Defined | None:
        for base in self.bases(kind):
            for node in base.node.body:
                if isinstance(node, Function) and node.name == name:
                    return Defined(base.module, node, base)
        return None

    def fields(self, kind: Defined) -> dict[str, tuple[Module, ast.expr]]:
        """The annotated names of a class in the order of its constructor, each with the file that says it."""
        names: dict[str, tuple[Module, ast.expr]] = {}
        for base in reversed(list(self.bases(kind))):
            for node in base.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names[node.target.id] = base.module, node.annotation
        return names

    def expression(self, module: Module, node: ast.expr) -> Defined | Module | None:
        """What a name or a dotted name means where neither is a variable."""
        if isinstance(node, ast.Attribute):
            inner = self.expression(module, node.value)
            if isinstance(inner, Module):
                return self.local(inner, node.attr) or self.definition(f"{inner.name}.{node.attr}")
            return self.method(inner, node.attr) if isinstance(inner, Defined) else None
        return self.local(module, node.id) if isinstance(node, ast.Name) else None

    def annotated(self, module: Module, annotation: ast.expr | None) -> Defined | None:
        """The first class of the package that an annotation names."""
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                node = ast.Name(node.value)
            kind = self.expression(module, node) if isinstance(node, ast.Name | ast.Attribute) else None
            if isinstance(kind, Defined) and isinstance(kind.node, ast.ClassDef):
                return kind
        return None


@dataclass(frozen=True)
class Step:
    """One step of a walk: into a function, or back to the one that called it."""

    place: Defined
    depth: int
    back: bool
    returns: bool
    """Whether it is a step back into a file that the walk has left."""


@dataclass(eq=False)
class Walk:
    """The steps of one parameter."""

    package: Package
    once: bool = False
    steps: list[Step] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    _under_way: list[ast.AST] = field(default_factory=list)
    _files: set[Path] = field(default_factory=set)

    @property
    def rooms(self) -> int:
        return len({id(step.place.node) for step in self.steps})

    @property
    def returns(self) -> int:
        return sum(step.returns for step in self.steps)

    def enter(self, place: Defined, names: set[str], depth: int = 0) -> None:
        """Walk through a function in which `names`, such as `run` and `self.folder`, mean the parameter."""
        self._under_way.append(place.node)
        self._step(place, depth, back=False)
        _Room(self, place, depth, names).walk()
        self._under_way.pop()

    def call(self, caller: Defined, place: Defined, names: set[str], depth: int) -> None:
        """Enter a function from another, unless it is recursive, or was entered before and one visit is enough."""
        entered = self._under_way if not self.once else [step.place.node for step in self.steps]
        if place.node not in entered:
            self.enter(place, names, depth + 1)
            self._step(caller, depth, back=True)

    def _step(self, place: Defined, depth: int, *, back: bool) -> None:
        file, here = place.module.path, self.steps[-1].place.module.path if self.steps else None
        self.steps.append(Step(place, depth, back, file != here and file in self._files))
        self._files.add(file)


class _Room(ast.NodeVisitor):
    """The walk through one function, in the order in which it is read: arguments before the call that takes them."""

    def __init__(self, walk: Walk, place: Defined, depth: int, names: set[str]) -> None:
        self.all, self.package, self.place, self.depth, self.names = walk, walk.package, place, depth, names
        self.kinds: dict[str, Defined] = {"self": place.owner} if place.owner else {}
        self.types: set[str] = set()  # of the parameter, as this function says them
        assert isinstance(place.node, Function)
        for parameter in _parameters(place.node):
            if kind := self.package.annotated(place.module, parameter.annotation):
                self.kinds[parameter.arg] = kind
            if parameter.arg in names and parameter.annotation is not None:
                self.types |= {name.id for name in ast.walk(parameter.annotation) if isinstance(name, ast.Name)}
        self.types -= {"None", "Any", "Callable", "Sequence", "Mapping", "bool", "int"}
        self.types |= {"Path"} if "str" in self.types else set()

    def walk(self) -> None:
        for statement in self.place.node.body:
            self.visit(statement)

    def kind(self, node: ast.expr) -> Defined | None:
        """The class of an expression's value, where the tree says it."""
        match node:
            case ast.Name(id=name):
                return self.kinds.get(name)
            case ast.Attribute(value=value, attr=attr) if (owner := self.kind(value)) is not None:
                if annotation := self.package.fields(owner).get(attr):
                    return self.package.annotated(*annotation)
            case ast.Call():
                target = self.target(node.func)
                if target is not None and isinstance(target.node, Function):
                    if isinstance(target.node.returns, ast.Name) and target.node.returns.id == "Self":
                        return target.owner
                    return self.package.annotated(target.module, target.node.returns)
                if target is not None:
                    return target
                if isinstance(body := _passed_through(node), ast.expr):
                    return self.kind(body)
        return None

    def target(self, node: ast.expr) -> Defined | None:
        """The function, method or class that is called."""
        if isinstance(node, ast.Attribute) and (owner := self.kind(node.value)) is not None:
            return self.package.method(owner, node.attr)
        if isinstance(node, ast.Name) and node.id in self.kinds:
            return None
        definition = self.package.expression(self.place.module, node)
        return definition if isinstance(definition, Defined) else None

    def means(self, node: ast.expr) -> bool:
        """Whether an expression's value is the parameter, or stands for it."""
        match node:
            case ast.Name() | ast.Attribute() if _dotted(node) in self.names:
                return True
            case ast.Attribute(value=value, attr="parent"):
                return self.means(value)
            case ast.IfExp(body=body, orelse=other):
                return self.means(body) or self.means(other)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts):
                return any(map(self.means, parts))
            case ast.BinOp(left=left, op=ast.Div()):
                return self.means(left)
            case ast.NamedExpr(value=value):
                return self.means(value)
            case ast.Call(func=func, args=arguments, keywords=keywords):
                if (body := _passed_through(node)) is not None and self.means(body):
                    return True
                values = [*arguments, *(keyword.value for keyword in keywords)]
                values += [func.value] if isinstance(func, ast.Attribute) else []
                if not any(map(self.means, values)):
                    return False
                target = self.target(func)
                if target is None:
                    return (_dotted(func) or "").rpartition(".")[2] in SAME - {"partial"}
                returns = target.node.returns if isinstance(target.node, Function) else None
                types = {name.id for name in ast.walk(returns) if isinstance(name, ast.Name)} if returns else set()
                return bool(types & self.types) or ("Self" in types and self.means(values[-1]))
        return False

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        func, arguments, keywords = node.func, node.args, node.keywords
        if _dotted(func) == "partial" and arguments:
            func, arguments = arguments[0], arguments[1:]
        passed = self.passed(arguments, keywords)
        receiver = self.rests(func.value) if isinstance(func, ast.Attribute) else []
        if not passed and not receiver:
            return
        target = self.target(func)
        if target is None:
            if any(not rest for _, rest in passed) and not self.foreign(func):
                self.all.unresolved.append(f"{self.place.module.path}:{node.lineno}: {ast.unparse(func)}")
            return
        if isinstance(target.node, ast.ClassDef):
            initial = self.package.method(target, "__init__")
            if initial is None:  # a dataclass: `__post_init__` is its constructor, if it has one
                names = _bound(list(self.package.fields(target)), passed, "self.")
                initial = self.package.method(target, "__post_init__")
            else:
                names = _bound([parameter.arg for parameter in _parameters(initial.node)][1:], passed)
            if initial is not None and names:
                self.all.call(self.place, initial, names, self.depth)
            return
        parameters = [parameter.arg for parameter in _parameters(target.node)]
        bound = bool(target.owner) and isinstance(func, ast.Attribute) and self.kind(func.value) is not None
        names = _bound(parameters[1:] if bound else parameters, passed)
        if bound:
            names |= {f"{parameters[0]}{rest}" for rest in receiver}
        if names and (passed or _mentions(target.node, names)):
            self.all.call(self.place, target, names, self.depth)

    def foreign(self, func: ast.expr) -> bool:
        """Whether a function is of Python or of another package."""
        root, *_, name = [*(_dotted(func) or "").split("."), ""][:-1] * 2
        return name in SAME or hasattr(builtins, root) or root in {*self.place.module.imported, "log"}

    def passed(self, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> list[tuple[int | str, str]]:
        """Which arguments hand the parameter on: position or keyword, and what `rests` says of it."""
        values = [*enumerate(arguments), *((keyword.arg or "**", keyword.value) for keyword in keywords)]
        return [(key, rest) for key, value in values for rest in self.rests(value)]

    def rests(self, value: ast.expr) -> list[str]:
        """What has to be added to a value to get the parameter: "" for itself, ".folder" for an object with it."""
        if self.means(value):
            return [""]
        dotted = _dotted(value)
        return [name[len(dotted) :] for name in sorted(self.names) if dotted and name.startswith(f"{dotted}.")]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.assign(node.target, node.value)
        if isinstance(node.target, ast.Name) and (kind := self.package.annotated(self.place.module, node.annotation)):
            self.kinds[node.target.id] = kind

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.assign(node.target, node.value)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.visit(node.context_expr)
        if node.optional_vars is not None:
            self.assign(node.optional_vars, node.context_expr)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Note what a variable is from here on."""
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for index, part in enumerate(target.elts):
                self.assign(part, parts[index] if parts else value)
            return
        if (name := _dotted(target)) is None:
            return
        if self.means(value):
            self.names.add(name)
        if (kind := self.kind(value)) is None:
            return
        if isinstance(target, ast.Name):
            self.kinds[target.id] = kind
        if isinstance(value, ast.Call) and self.target(value.func) == kind:
            passed = self.passed(value.args, value.keywords)
            self.names |= _bound(list(self.package.fields(kind)), passed, f"{name}.")


def _passed_through(call: ast.Call) -> ast.expr | None:
    """What a call returns as it is: the body of a lambda (`world.agree`), or what a context manager enters."""
    for argument in call.args:
        if isinstance(argument, ast.Lambda):
            return argument.body
    entered = isinstance(call.func, ast.Attribute) and call.func.attr == "enter_context"
    return call.args[0] if entered and call.args else None


def _bound(parameters: Sequence[str], passed: Sequence[tuple[int | str, str]], prefix: str = "") -> set[str]:
    """The names of the parameter inside of what is called."""
    names = dict(enumerate(parameters))
    return {
        f"{prefix}{name}{rest}"
        for key, rest in passed
        if (name := names.get(key) if isinstance(key, int) else key if key in parameters else None)
    }


def _mentions(function: ast.AST, names: set[str]) -> bool:
    return any(_dotted(node) in names for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute))


def _parameters(node: ast.AST) -> list[ast.arg]:
    assert isinstance(node, Function)
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _dotted(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if inner := _dotted(value):
            return f"{inner}.{attr}"
    return None


def walk(package: Package, module: str, function: str, parameter: str, *, once: bool = False) -> Walk:
    """The walk of one parameter.

    Raises:
        LookupError: there is no such function, or it has no such parameter.
    """
    start = package.definition(f"{module}.{function}")
    if not isinstance(start, Defined) or parameter not in {argument.arg for argument in _parameters(start.node)}:
        raise LookupError(f"there is no {module}.{function} with a parameter `{parameter}`; see tools/walks.py: WALKS")
    steps = Walk(package, once)
    steps.enter(start, {parameter})
    return steps


def shown(steps: Walk) -> Iterator[str]:
    """The walk, a line for each step."""
    for step in steps.steps:
        mark = "back to " if step.back else ""
        note = "  (return)" if step.returns else ""
        yield f"{'  ' * step.depth}{mark}{step.place.name}  {step.place.module.path}:{step.place.node.lineno}{note}"
    yield from (f"not resolved: {line}" for line in sorted(set(steps.unresolved)))


def main(argv: Sequence[str]) -> int:
    """Print rooms and returns of both walks of the tree that is named, this one by default."""
    roots = [argument for argument in argv if not argument.startswith("-")]
    package = Package(Path(roots[0]) if roots else Path(__file__).parent.parent)
    for title, start in WALKS.items():
        steps = walk(package, *start, once="--once" in argv)
        print(f"{title}: {steps.rooms} rooms, {steps.returns} returns, {len(set(steps.unresolved))} not resolved")
        if "--show" in argv:
            print("\n".join(f"  {line}" for line in shown(steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
