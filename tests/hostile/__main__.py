"""`python -m tests.hostile KIND FIRST LAST [traced]` runs these cases and prints what is wrong with each."""

import sys
from pathlib import Path
from tempfile import mkdtemp

from tests.hostile.frame import run_cases, run_traced_cases

if __name__ == "__main__":
    kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    place = Path(mkdtemp(prefix="hostile-"))
    print(place)
    for seed in range(first, last):
        found = (
            run_traced_cases([(kind, seed)], place / str(seed))
            if "traced" in sys.argv
            else run_cases(kind, [seed], place)
        )
        print("\n".join(found), end="\n" if found else "", flush=True)
