"""Programs for the hosts of a lab."""

import sys
import textwrap


def python(program, *arguments):
    """The command that runs this text, which may be indented, with these arguments."""
    return [sys.executable, "-S", "-c", textwrap.dedent(program), *map(str, arguments)]
