"""A verb of shoestring on a host with a quota: python -m benchmarks.parallel.cli_worker QUOTA-GROUP VERB …."""

from __future__ import annotations

import sys

from benchmarks.parallel.quotas import join
from shoestring.cli import main

if __name__ == "__main__":
    join(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
