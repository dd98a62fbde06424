"""Runs the command line by `python -m shoestring`, alone or under torchrun."""

import os
import sys
from contextlib import suppress

# `python -m` puts the current folder first on the import path. A file in this folder would be run if it had the name
# of a module imported below, so the folder is removed here. `shoestring.naming` appends it again, to import the user's
# modules.
with suppress(OSError):  # the current folder no longer exists
    if not sys.flags.safe_path and sys.modules["__main__"].__dict__ is globals() and sys.path[0] == os.getcwd():  # noqa: PTH109
        del sys.path[0]

from shoestring.cli import main

if __name__ == "__main__":
    sys.exit(main())
