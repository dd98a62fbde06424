"""Print how readable src/ is, in numbers: before the work on it, now, and what they should be.

`python -m tools.house [--json] [--wheel] [--list KEY]`. `--list` prints the places behind a number, `--wheel` builds
the wheel to weigh it, and `--json` prints the numbers of now, as `house-before.json` holds those of before. Two things
are taken by hand: the processor seconds of `make test`, which it prints, and what fresh eyes judge (`tools/questions`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.commands.table import VERBS
from shoestring.data import Data
from shoestring.run import Settings, keys
from shoestring.settings import help_texts
from tools import counting
from tools.help_texts import help_texts as all_help_texts
from tools.walks import WALKS, Package, shown, walk

ROOT = Path(__file__).resolve().parent.parent
BEFORE = ROOT / "tools/house-before.json"
REVIEWED = ROOT / "tools/reviewed"
NO_LIBRARY = {"lab", "hub"}
"""Verbs that need not be importable: virtual hosts are for tests by hand."""


@dataclass(frozen=True)
class Row:
    """One number of the table."""

    key: str
    what: str
    goal: str
    take: Callable[[Package], int | float | Iterable[str]]
    """Takes the number, or the places that are counted."""


def returns(title: str) -> Callable[[Package], int | float | Iterable[str]]:
    return lambda package: [line for line in shown(walk(package, *WALKS[title])) if line.endswith("(return)")]


def rooms(title: str) -> Callable[[Package], int | float | Iterable[str]]:
    return lambda package: walk(package, *WALKS[title]).rooms


def settings_classes() -> set[tuple[Path, str]]:
    """File and name of each class whose fields users set, in a run file or on the command line."""
    tables = [Settings, Data, *keys().values(), *(verb.load() for verb in VERBS.values())]
    return {(text.path.relative_to(ROOT), text.owner) for text in all_help_texts(tables)}


def several_meanings(_: Package) -> Iterator[str]:
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    for table, settings in {"run": Settings, "data": Data, **keys()}.items():
        for key, text in help_texts(settings).items():
            texts[key][table] = text
    return counting.several_meanings(texts, _reviewed("keys"))


def not_importable(package: Package) -> Iterator[str]:
    for name, verb in sorted(VERBS.items()):
        if name.partition(" ")[0] not in NO_LIBRARY and (reason := counting.not_importable(package, verb.function)):
            yield f"{name}: {reason}"


def _reviewed(name: str) -> Any:
    return tomllib.loads((REVIEWED / f"{name}.toml").read_text(encoding="utf-8"))


def megabytes_of_wheel(package: Package) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
        subprocess.run([*command, str(package.root)], check=True)
        return round(next(Path(folder).glob("*.whl")).stat().st_size / 1e6, 3)


RUN, FOLDER = WALKS
ROWS = [
    Row("returns_run", f"returns on the walk of {RUN}", "<= 15", returns(RUN)),
    Row("rooms_run", f"rooms on the walk of {RUN}", "", rooms(RUN)),
    Row("returns_folder", f"returns on the walk of {FOLDER}", "<= 8", returns(FOLDER)),
    Row("rooms_folder", f"rooms on the walk of {FOLDER}", "", rooms(FOLDER)),
    Row("complex", f"functions above complexity {counting.COMPLEXITY} (C901)", "0", counting.complex_functions),
    Row("long", f"functions above {counting.LONGEST} lines", "0", counting.long_functions),
    Row("job", "public members of Job", "<= 15", lambda package: counting.members_of(package, "Job")),
    Row("private", "private functions used once", "<= 400", lambda package: map(str, counting.used_once(package))),
    Row("short", f"- called there, at most {counting.SHORT} lines", "0", lambda it: counting.short(it, inlinable=True)),
    Row("passed", "- as short, decorated or passed on", "", lambda package: counting.short(package, inlinable=False)),
    Row("public", "public functions, classes, methods", "no more", counting.public_names),
    Row("lines", "lines of code without imports", "3000 fewer", counting.lines_of_code),
    Row("typed_twice", "fields typed twice", "0", lambda it: counting.typed_twice(it, settings_classes())),
    Row("meanings", "keys with two meanings, or not reviewed", "0", several_meanings),
    Row("scattered", "areas with settings in other files", "0", lambda it: counting.scattered(it, settings_classes())),
    Row("verbs", f"verbs not importable, of {len(VERBS)}", "0", not_importable),
]
WHEEL = Row("wheel", "size of the wheel in MB", "<= 1.2", megabytes_of_wheel)


def main(argv: Sequence[str]) -> int:
    """Print the table, its numbers, or the places behind one of them."""
    package = Package(ROOT)
    rows = {row.key: row for row in [*ROWS, *([WHEEL] if "--wheel" in argv else [])]}
    if "--list" in argv:
        places = rows[argv[argv.index("--list") + 1]].take(package)
        print(places if isinstance(places, int | float) else "\n".join(places))
        return 0
    numbers = {key: _number(row.take(package)) for key, row in rows.items()}
    if "--json" in argv:
        print(json.dumps(numbers, indent=2))
        return 0
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.is_file() else {}
    print(f"{'key':15} {'what':50} {'before':>8} {'now':>8}  goal")
    for key, row in rows.items():
        print(f"{key:15} {row.what:50} {before.get(key, ''):>8} {numbers[key]:>8}  {row.goal}")
    return 0


def _number(taken: int | float | Iterable[str]) -> int | float:
    return taken if isinstance(taken, int | float) else sum(1 for _ in taken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
