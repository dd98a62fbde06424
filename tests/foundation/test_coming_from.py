"""The guides for people who come from another library: their diffs apply to their programs, and both run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
LIBRARIES = {
    "from-torch.md": "torch",
    "from-accelerate.md": "accelerate",
    "from-trainer.md": "transformers",
    "from-lightning.md": "lightning",
    "from-trl.md": "trl",
}
RESUMED = {"from-torch.md", "from-accelerate.md"}  # the diff adds checkpoints and changes no number


def block(guide: str, language: str) -> str:
    fenced = re.findall(rf"^```{language}\n(.*?)^```$", (GUIDES / guide).read_text(), re.DOTALL | re.MULTILINE)
    assert len(fenced) == 1
    return fenced[0]


def applied(program: str, diff: str) -> str:
    """The program after a diff whose hunks begin with `@@`; each must fit at exactly one place."""
    for hunk in diff.split("@@\n")[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        assert {sign for sign, _ in lines} <= set(" +-")
        before = "".join(f"{text}\n" for sign, text in lines if sign != "+")
        assert program.count(before) == 1, f"this is at {program.count(before)} places of the program:\n{before}"
        program = program.replace(before, "".join(f"{text}\n" for sign, text in lines if sign != "-"))
    return program


def loss_of(script: Path) -> float:
    """The loss that a program prints in its last line."""
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        env=ranks.environment(PYTHONPATH=":".join((str(ranks.SOURCE), *filter(None, sys.path)))),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("loss "), done.stdout
    return float(last.removeprefix("loss "))


def test_each_guide_is_run():
    assert {path.name for path in GUIDES.glob("from-*.md")} == set(LIBRARIES)


@pytest.mark.parametrize("guide", LIBRARIES)
def test_a_diff_applies_and_what_it_gives_is_a_program(guide):
    program = block(guide, "python")
    changed = applied(program, block(guide, "diff"))
    compile(changed, guide, "exec")
    assert "shoestring" in changed and "shoestring" not in program


@pytest.mark.parametrize(
    ("diff", "message"),
    [("@@\n-d\n+e\n", "at 0 places"), ("@@\n-a\n+e\n", "at 2 places"), ("@@\n*a\n", "")],
    ids=["nowhere", "twice", "sign"],
)
def test_a_hunk_that_fits_nowhere_or_twice_is_refused(diff, message):
    with pytest.raises(AssertionError, match=message):
        applied("a\nb\na\n", diff)
    assert applied("a\nb\na\n", "@@\n b\n-a\n+c\n") == "a\nb\nc\n"


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("guide", LIBRARIES)
def test_a_program_runs_before_and_after(guide, tmp_path):
    pytest.importorskip(LIBRARIES[guide], reason=f"{LIBRARIES[guide]} is not installed")
    program = block(guide, "python")
    (tmp_path / "before.py").write_text(program)
    (tmp_path / "after.py").write_text(applied(program, block(guide, "diff")))
    before, after = loss_of(tmp_path / "before.py"), loss_of(tmp_path / "after.py")
    if guide in RESUMED:
        assert after == before and list((tmp_path / "checkpoints").glob("step-*"))
        assert loss_of(tmp_path / "after.py") == before, "a second start resumes at the end"
    else:
        assert after == pytest.approx(before, rel=0.5)
