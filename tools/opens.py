"""Fail where a module opens or parses a file by itself that somebody else may have made.

`python -m tools.opens [ROOT]`. Files of others are opened by `storage/foreign.py` and `storage/guarded.py`, which look
at them first. What a module opens besides must be its own: made by this process, this machine or this package, or read
from another rank. A comment `# own file: …` on the line says what it is, or `OWN` says so of a whole module.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HOMES = ("storage/foreign.py", "storage/guarded.py")
"""The modules that open what others made; below src/shoestring, as all paths here."""
HUB = "src/shoestring_hub"
"""The package of the hub, whose modules are named below src."""
MARK = "# own file:"
OWN: dict[str, str] = {
    "checkpoint/differences/ring.py": "a record whose checksum was compared",
    "checkpoint/format/": "files that the callers open by storage/guarded.py; damage is tested byte by byte",
    "checkpoint/interop/dcp.py": "an archive in a file that _Window opens by storage/guarded.py",
    "checkpoint/interop/exports.py": "a file that was written just now",
    "checkpoint/interop/pickles.py": "bytes of an archive that dcp.py bounds; nothing is called",
    "checkpoint/recovery/attempts.py": "marks of this run, read by storage/guarded.py",
    "checkpoint/tiers/": "locks and notes of this run, checked once they are open",
    "comm/auto/": "messages between ranks, and states of a checkpoint",
    "confined.py": "/proc",
    "core/world.py": "messages between ranks",
    "data/cache.py": "memory and a folder that are private to this user",
    "data/confined_template.py": "messages from a process that was started here",
    "data/flattening.py": "a sample whose checksum was compared; what else is wrong is a DataError",
    "data/tokenizer.py": "JSON that the engine wrote",
    "decode/serve/app.py": "the page in the package, and bodies of requests, whose size is limited",
    "decode/serve/understanding.py": "messages from processes that were started here, and bodies of limited size",
    "distributed/join.py": "/proc",
    "facts.py": "messages between ranks",
    "forking.py": "requests of the process that started this one",
    "memory/broker/": "records in folders that are checked, and /proc",
    "memory/exhausted.py": "/proc",
    "memory/offload/host_memory.py": "memory without a file",
    "memory/tracing/recorder.py": "/proc",
    "models/hf.py": "folders that _check_folder has looked at, and JSON that transformers wrote",
    "native/": "sources in the package, what was compiled from them, and /proc",
    "planning/system.py": "/proc and /sys",
    "processors.py": "/proc and /sys",
    "profile/analyses/": "tables in the package, and what this machine measured",
    "profile/happenings.py": "/proc",
    "report/document.py": "parts of pages in the package",
    "report/sinks.py": "the metrics of the run that writes them",
    "sandbox.py": "/proc",
    "storage/arrays.py": "profiles and memory records, which it reads for others",
    "storage/whole.py": "files that are written here, and their folders",
    "testing/": "what tests made",
    "training/": "messages between ranks and from processes that were started here",
    "tune/": "a study's database, logs and metrics of this user",
    "verbs/distill.py": "messages between ranks",
    "verbs/probe.py": "messages between ranks",
    "verbs/trials.py": "run folders of this user's study",
    "verbs/trim.py": "/proc",
    "verbs/tune.py": "logs of workers that were started here",
}
"""Modules that open only what is their own, with what that is; a name that ends with `/` is a folder's."""

FUNCTIONS = {
    "codecs.open", "gzip.decompress", "gzip.open", "io.open", "json.load", "json.loads", "lzma.open", "marshal.load",
    "mmap.mmap", "numpy.fromfile", "numpy.genfromtxt", "numpy.load", "numpy.loadtxt", "numpy.memmap", "open", "os.open",
    "PIL.Image.open", "pickle.load", "pickle.loads", "pickletools.genops", "pyarrow.parquet.ParquetFile",
    "pyarrow.parquet.read_table", "safetensors.safe_open", "safetensors.torch.load_file", "safetensors.numpy.load_file",
    "safetensors.torch.load_model", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree",
    "sqlite3.connect", "tarfile.open", "tomllib.load", "tomllib.loads", "torch.load", "yaml.safe_load",
    "zipfile.ZipFile",
}  # fmt: skip
"""Functions that open or parse a file, by their full names."""
METHODS = {"from_file", "from_pretrained", "GGUFReader", "load_dataset", "read_bytes", "read_text"}
"""Methods that do, whatever they are called on."""


def faults(root: Path) -> Iterator[str]:
    """One line `file:line: what is wrong` for each call, and for each entry of `OWN` that is no longer needed."""
    package = root / "src/shoestring"
    used: set[str] = set()
    for path in sorted([*package.rglob("*.py"), *(root / HUB).rglob("*.py")]):
        name = path.relative_to(package if path.is_relative_to(package) else root / "src").as_posix()
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        own = next((each for each in OWN if name == each or (each.endswith("/") and name.startswith(each))), None)
        for call, target in calls(ast.parse(text)):
            if name in HOMES or any(MARK in line for line in lines[call.lineno - 1 : call.end_lineno]):
                continue
            if own is not None:
                used.add(own)
                continue
            where = f"{path.relative_to(root)}:{call.lineno}"
            yield f"{where}: {target} opens or parses a file; use storage/foreign.py, or say `{MARK} what it is`"
    for each in sorted(OWN.keys() - used):
        if any((package / each).rglob("*.py")) if each.endswith("/") else (package / each).exists():
            yield f"tools/opens.py: OWN has {each}, which opens nothing"


def calls(module: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """The calls that open or parse a file, each with what is called."""
    names = dict(_imported(module))
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            target = _dotted(node.func, names)
            last = target.rpartition(".")[2]
            if target.startswith("shoestring.storage."):
                continue
            if target in FUNCTIONS - {"open"} or (target != last and last in METHODS) or _opens_to_read(node, target):
                yield node, target


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that the module imports, with its full name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield (
                    each.asname or each.name.partition(".")[0],
                    each.name if each.asname else each.name.partition(".")[0],
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of what is called; `?` stands for what is no name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{_dotted(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def _opens_to_read(call: ast.Call, target: str) -> bool:
    """Whether it is `open` or `Path.open` in a mode that reads."""
    if target == "open":
        mode = call.args[1] if len(call.args) > 1 else None
    elif target.endswith(".open"):
        mode = call.args[0] if call.args else None
        if mode is None and not call.keywords and not target.rpartition(".")[0].endswith(("path", "file", "?")):
            return False  # some other object's
        if mode is not None and not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)):
            return False
    else:
        return False
    mode = next((each.value for each in call.keywords if each.arg == "mode"), mode)
    text = mode.value if isinstance(mode, ast.Constant) else "r"
    return isinstance(text, str) and ("r" in text or "+" in text)


def main(argv: Sequence[str]) -> int:
    """Print each fault of the tree at `argv[0]`, this one by default; 1 when there is one."""
    lines = list(faults(Path(argv[0]) if argv else Path(__file__).parent.parent))
    print("\n".join(lines or ["src: what others made is opened by storage/foreign.py alone"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
