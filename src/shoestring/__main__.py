"""Runs the command line by `python -m shoestring`, alone or under torchrun."""

import os
import sys
from contextlib import suppress

# `python -m` puts the current folder first on the import path. A file in it that has the name of a module imported
# below would be run, so the folder is removed here. To import the user's modules, shoestring.naming appends it again.
with suppress(OSError):  # the current folder no longer exists
    if not sys.flags.safe_path and sys.modules["__main__"].__dict__ is globals() and sys.path[0] == os.getcwd():  # noqa: PTH109
        del sys.path[0]

from shoestring.cli import main

if __name__ == "__main__":
    sys.exit(main())
