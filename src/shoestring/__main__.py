"""`python -m shoestring`, which is also what torchrun starts."""

import sys

from shoestring.cli import main

if __name__ == "__main__":
    sys.exit(main())
