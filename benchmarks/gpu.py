"""`python -m benchmarks.gpu`: the GPU bars of every area in one call of at most ten minutes.

An area takes part by defining `gpu_rows() -> Sequence[Bar]`. Without a GPU every bar gets its "not-run" row.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks.harness import Deadline, Environment, parser, report, selected
from benchmarks.rows import RESULTS, Bar, declare, unique
from shoestring.core.errors import ConfigError, ShoestringError

MOST_SECONDS = 600.0
BUDGET = 570.0  # leaves time to start and to write the last rows


def discover(package: ModuleType) -> tuple[list[Bar], list[str]]:
    """The GPU bars of the package's modules, sorted by id, and the modules that failed (which is printed)."""
    bars: list[Bar] = []
    broken: list[str] = []
    for found in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            declared = getattr(module, "gpu_rows", list)()
            bars += _need_a_gpu(unique(declared, found.name))
        except Exception:
            traceback.print_exc()
            broken.append(found.name)
    return bars, broken


def _need_a_gpu(bars: list[Bar]) -> list[Bar]:
    for bar in bars:
        if not bar.gpu:
            raise ConfigError(f"bar `{bar.id}` is in gpu_rows() without gpu=True")
    return bars


def main(
    argv: Sequence[str] | None = None,
    package: ModuleType = benchmarks,
    results: Path = RESULTS,
    environment: Environment | None = None,
) -> int:
    """Measure, print and store the GPU bars of every module of `package`.

    Returns:
        The exit status: 1 for a missed bar with `--strict`, a failed measurement or a module that cannot
        be imported, 2 for wrong usage.
    """
    flags_of_gpu = parser("gpu")
    flags_of_gpu.add_argument("--budget", type=float, default=BUDGET, help="seconds for all bars, 600 at most")
    flags_of_gpu.add_argument("--each", type=float, default=MOST_SECONDS, help="seconds that one bar may take at most")
    flags = flags_of_gpu.parse_args(argv)
    deadline = Deadline(flags.budget)
    try:
        if not 0 <= flags.budget <= MOST_SECONDS:
            raise ConfigError(f"--budget is {flags.budget:g}", hint=f"0 to {MOST_SECONDS:g} seconds")
        bars, broken = discover(package)
        chosen = selected(bars, flags.only, flags.skip)
        if flags.list:
            print("\n".join(f"{bar.id}  {bar.op} {bar.bar:g}  {bar.what}" for bar in chosen))
            return 1 if broken else 0
        environment = environment or Environment.capture(tree=flags.tree)
        for area in sorted({bar.area for bar in bars}):
            declare(results / f"{area}.json", [bar for bar in bars if bar.area == area], environment)
        failed = report(chosen, environment, deadline, results, strict=flags.strict, each=flags.each)
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in broken:
        print(f"error: {package.__name__}.{name} gave no bars: see the traceback above", file=sys.stderr)
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
