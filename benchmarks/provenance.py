"""Which code a row was measured with, and how much of it has changed since.

Commits are rewritten and clones are shallow, so a row names content. A *source set* is the list of the files that a
measurement reaches by imports, each known by a digest of its path and content. `results/sources.digests` keeps, for
every file version that some row names, a sample of its lines: all those whose hash is divisible by `SAMPLING`. The same
lines are sampled in every version, so the share of a row's lines that the tree no longer has can be estimated without
git, and lines that only moved count as unchanged.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.machine import ROOT
from shoestring.core.errors import DataError
from shoestring.storage.whole import write_atomic

SAMPLING = 8
STALE = 0.2
"""Share of changed lines above which a row is shown as stale."""
UNKNOWN = "unknown"
"""Names the source set of a measurement whose code cannot be found any more."""
FILE = "sources.digests"
_LINE_BYTES = 3
_ROOTS = {"shoestring": "src", "shoestring_recipes": "src", "benchmarks": ".", "tests": "."}
"""Folder that the modules of each top-level package are found in."""
_TREE = ("src", "benchmarks", "tests/rigs")
"""Folders of what can be measured: of the tests, only the rigs that benchmarks share."""
_STARTED = {"shoestring": "shoestring.training.loop"}
"""What a benchmark that starts `python -m shoestring` measures besides its own area: training."""
_SUFFIXES = (".py", ".c", ".cpp", ".h", ".js")
_HARNESS = frozenset(
    f"benchmarks/{name}.py"
    for name in ("__init__", "calm", "evidence", "gpu", "harness", "machine", "provenance", "rows", "stale", "timing")
)
"""How figures are taken and judged; what is measured lies elsewhere."""


@dataclass(frozen=True)
class FileVersion:
    """One version of one file, as it was measured."""

    path: str
    lines: tuple[bytes, ...]
    """Hashes of the sampled lines, in order."""

    def to_json(self) -> list[str]:
        return [self.path, base64.b64encode(b"".join(self.lines)).decode()]

    @classmethod
    def from_json(cls, record: Sequence[str]) -> FileVersion:
        path, packed = record
        data = base64.b64decode(packed, validate=True)
        return cls(path, tuple(data[at : at + _LINE_BYTES] for at in range(0, len(data), _LINE_BYTES)))


def read_version(path: Path, root: Path = ROOT) -> tuple[str, FileVersion]:
    """The digest and the sampled lines of a file below `root`."""
    content, name = path.read_bytes(), path.relative_to(root).as_posix()
    hashes = (hashlib.blake2b(line.strip(), digest_size=8).digest() for line in content.split(b"\n") if line.strip())
    sampled = tuple(found[:_LINE_BYTES] for found in hashes if found[-1] % SAMPLING == 0)
    return _digest(name.encode(), content), FileVersion(name, sampled)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


# -- which files -------------------------------------------------------------------------------------------------------


def measured_files(module: str, area: str, root: Path = ROOT) -> list[Path]:
    """The files that a measurement defined in `module` reaches by imports, and those of the area that it is about.

    Imports inside functions count; those for type checkers do not. An area's files count as a whole, because run
    files name features by strings. The native sources count whose names a reached file mentions.
    """
    own = root / "src" / "shoestring" / area
    names = [module, *(_module_name(path, root) for path in sorted(own.rglob("*.py")))]
    reached: dict[str, Path] = {}
    while names:
        name = names.pop()
        if name in reached or (path := _module_file(name, root)) is None:
            continue
        reached[name] = path
        names += _imports(path, name)
    native = root / "src" / "shoestring" / "native"
    texts = [path.read_text() for path in reached.values()] if native / "__init__.py" in reached.values() else []
    compiled = [path for path in sorted(native.glob("*.c*")) if any(f'"{path.stem}"' in text for text in texts)]
    files = {*reached.values(), *compiled}
    return sorted(path for path in files if path.relative_to(root).as_posix() not in _HARNESS)


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _module_file(name: str, root: Path) -> Path | None:
    """The file of a module of this repository."""
    parts = name.split(".")
    if parts[0] not in _ROOTS or not all(part.isidentifier() for part in parts):
        return None
    base = (root / _ROOTS[parts[0]]).joinpath(*parts)
    found = (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())
    return next(found, None)


@cache
def _imports(path: Path, name: str) -> tuple[str, ...]:
    """Names of modules, and of what might be modules, that a file imports or names in a string."""
    found: list[str] = []
    for node in _run_time_nodes(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([source] if source else [])])
            found += (source, *(f"{source}.{alias.name}" for alias in node.names))
        elif name.startswith("benchmarks") and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(_STARTED.get(node.value, node.value.partition(":")[0]))  # `python -m NAME`, `NAME:callable`
    return tuple(found)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run_time_nodes(child)


# -- source sets -------------------------------------------------------------------------------------------------------


@dataclass
class Sources:
    """The file `sources.digests`, in JSON: file versions by digest, and source sets by the digest of their list."""

    files: dict[str, FileVersion] = field(default_factory=dict)
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path) -> Sources:
        """The sources that rows in a folder of results name.

        Raises:
            DataError: the file is malformed, or a digest does not fit what it stands for.
        """
        path = results / FILE
        if not path.exists():
            return cls()
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            files = {digest: FileVersion.from_json(version) for digest, version in record["files"].items()}
            sets = {digest: tuple(members) for digest, members in record["sets"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: malformed: {error}") from error
        for digest, members in sets.items():
            if digest != _digest(*map(str.encode, members)):
                raise DataError(f"{path}: the source set `{digest}` is not the one that its digest names")
            if missing := [member for member in members if member not in files]:
                raise DataError(f"{path}: the source set `{digest}` names the file `{missing[0]}`, which is not there")
        return cls(files, sets)

    def write(self, results: Path, named: Iterable[str]) -> None:
        """Replace the file, keeping only the source sets that are named and the files in them.

        What another benchmark has put into the file since this one read it is taken over first.
        """
        later = Sources.read(results)
        self.files, self.sets = later.files | self.files, later.sets | self.sets
        kept = {digest: self.sets[digest] for digest in sorted(set(named) & self.sets.keys())}
        files = {
            member: self.files[member].to_json() for member in sorted({one for row in kept.values() for one in row})
        }
        lines = [
            "{",
            '"files": {',
            ",\n".join(f'"{digest}": {json.dumps(version)}' for digest, version in files.items()),
            "},",
            '"sets": {',
            ",\n".join(f'"{digest}": {json.dumps(members)}' for digest, members in kept.items()),
            "}",
            "}",
        ]
        write_atomic(results / FILE, ("\n".join(lines) + "\n").encode())

    def add(self, paths: Iterable[Path], root: Path = ROOT) -> str:
        """Put a source set in, as its files are now, and return its digest."""
        versions = dict(read_version(path, root) for path in paths)
        members = tuple(sorted(versions))
        digest = _digest(*map(str.encode, members))
        self.files |= versions
        self.sets[digest] = members
        return digest

    def check_current(self, root: Path = ROOT) -> None:
        """Recompute what is kept of every file that is still as it was measured.

        Raises:
            DataError: the lines kept of a file are not those of its content.
        """
        for path in _tree(root):
            digest, version = read_version(path, root)
            if digest in self.files and self.files[digest] != version:
                raise DataError(f"`{FILE}` keeps other lines of `{version.path}` than the file has")

    def changed(self, digest: str, present: Mapping[bytes, int]) -> float:
        """Share of the lines of a source set that are not among `present` any more; 1 if the set is unknown."""
        if digest not in self.sets:
            return 1.0
        lines = Counter(line for member in self.sets[digest] for line in self.files[member].lines)
        if not lines:
            return 0.0
        gone = sum(max(0, count - present.get(line, 0)) for line, count in lines.items())
        return gone / lines.total()


def present_lines(root: Path = ROOT) -> Counter[bytes]:
    """The sampled lines of the tree as it is, with how often each occurs."""
    return Counter(line for path in _tree(root) for line in read_version(path, root)[1].lines)


def _tree(root: Path) -> list[Path]:
    found = (path for top in _TREE for path in (root / top).rglob("*") if path.suffix in _SUFFIXES)
    return sorted(path for path in found if "results" not in path.parts)
