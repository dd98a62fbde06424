"""`shoestring profile`: any Python program, with a profile of its lines; importing this module imports no torch."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from shoestring.core.errors import ConfigError


@dataclass(frozen=True)
class ProfileProgram:
    """Run a Python program and show which of its lines take the time; or show a profile that was saved."""

    program: Positional[str]
    """Python file to run, with its arguments after `--`; or a profile that was saved, to show again."""
    out: Path = Path("profile.npz")
    """File to save the profile to."""
    lines: int = 15
    """Number of lines of the program to show."""

    def __call__(self, arguments: Sequence[str]) -> int:
        from shoestring.profile import load, profiled
        from shoestring.profile.summary import summary

        if self.lines < 1:
            raise ConfigError(f"--lines must be positive, got {self.lines}")
        if self.program.endswith(".npz"):
            print("\n".join(summary(load(self.program), self.lines)))
            return 0
        program = Path(self.program)
        if not program.is_file():
            raise ConfigError(f"there is no program {program}", hint="name a Python file")
        code: object = 0
        argv, path = list(sys.argv), list(sys.path)
        sys.argv[:], sys.path[0] = [str(program), *arguments], str(program.resolve().parent)
        try:
            with profiled(self.out) as result:
                try:
                    runpy.run_path(str(program), run_name="__main__")
                except SystemExit as ended:
                    code = ended.code
        finally:
            sys.argv[:], sys.path[:] = argv, path
        print("\n".join(summary(result.profile, self.lines)))
        print(f"saved to {self.out}; show it again with: shoestring profile {self.out}")
        return code if isinstance(code, int) else int(code is not None)
