"""Write the golden losses anew, after a change that is meant to change them: `python -m tests.golden`."""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "foundation"))

import ranks


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        ranks.run(ranks.HERE / "scenarios.py", str(out), size=2, local_size=2)
        made = json.loads(out.read_text())["golden"]
    path = Path(__file__).parent / "losses.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{path}: {made['fingerprint']}, from {made['one'][0]:.4f} to {made['one'][-1]:.4f}")


if __name__ == "__main__":
    main()
