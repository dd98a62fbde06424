"""`checkpoint explain`: what it says is what the next start does, whatever became of the checkpoints."""

import json
import shutil
from contextlib import closing

import pytest
import torch
from test_decide import offers
from torch.optim import AdamW

from shoestring.checkpoint import Plain, Tiered
from shoestring.checkpoint.format.history import HISTORY
from shoestring.checkpoint.recovery.attempts import MOST
from shoestring.checkpoint.recovery.decide import ResumeFacts, decide
from shoestring.checkpoint.recovery.explain import Explanation, explain
from shoestring.checkpoint.recovery.offers import Available, Wish
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.disk import MANIFEST, MARK, manifests
from shoestring.checkpoint.tiers.slots import slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Job, Kept
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.testing import jobs
from tests.rigs.checkpointing.known import KnownState, trained


class Run:
    """A run of one rank: each step in memory, each fourth on disk."""

    def __init__(self, root):
        self.settings = Tiered(
            folder=str(root / "run" / "checkpoints"),
            memory_folder=str(root / "memory"),
            memory_every=1,
            disk_every=4,
            keep=9,
        )
        self.disk, self.memory = root / "run" / "checkpoints", slots_folder(self.settings, World()).parent

    def start(self):
        state, progress = KnownState(lambda step: {"weight": torch.arange(6.0) * step, "step": step}), Progress()
        kept = {"mine": Kept(state, "own", None), "progress": Kept(progress, "same", None)}
        folder = slots_folder(self.settings, World())
        return Checkpointer(kept, progress, World(), self.settings, folder, set), state, progress

    def train(self, steps, where=None):
        """Resume, do these steps, and be killed."""
        checkpointer, state, progress = self.start()
        if where is not None:
            resume(checkpointer, str(where))
        trained(checkpointer, state, progress, steps)
        checkpointer.close()

    def resumed(self):
        """The step that the next start resumes from, or why it is refused."""
        checkpointer, *_ = self.start()
        with closing(checkpointer):
            try:
                return resume(checkpointer, "auto") or 0
            except CheckpointError as error:
                return error.parts()[1]

    def part(self, step):
        return next(self.disk.glob(f"step-{step:08d}-*/private-0.safetensors"))

    def named(self, step):
        return next(path for path, record in manifests(self.disk) if record.checkpoint.step == step)


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    shutil.rmtree(found.memory, ignore_errors=True)


def flip(path, at=-4):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def went_back(run):
    run.train([5, 6], run.named(4))


def lost_memory(run):
    shutil.rmtree(run.memory)


def damaged_memory(run):
    for path in run.memory.rglob("*.private"):
        data = bytearray(path.read_bytes())
        data[:100_000] = bytes(min(len(data), 100_000))
        path.write_bytes(data)


def damaged_all(run):
    damaged_memory(run)
    for path in run.disk.rglob("*.safetensors"):
        flip(path)


STORIES = {
    "newer in memory": (lambda run: None, 9, [("4 on disk", "older than step 9")]),
    "memory is lost": (lost_memory, 8, [("4 on disk", "older than step 8")]),
    "memory is damaged": (damaged_memory, 8, [("9 in memory", "damaged")]),
    "rolled back": (went_back, 6, [("8 on disk", "abandoned: the run went back to step 4 and continued from there")]),
    "history is damaged": (lambda run: flip(run.disk / HISTORY, 5), 9, []),
    "history is lost, and memory": (lambda run: ((run.disk / HISTORY).unlink(), lost_memory(run)), 8, []),
    "a damaged part": (lambda run: (lost_memory(run), flip(run.part(8))), 4, [("8 on disk", "damaged")]),
    "a missing part": (lambda run: (lost_memory(run), run.part(8).unlink()), 4, [("8 on disk", "damaged")]),
    "a damaged manifest": (lambda run: (lost_memory(run), flip(run.named(8) / MANIFEST)), 4, []),
    "tried too often": (
        lambda run: (lost_memory(run), (run.disk / f"{MARK}0").write_text(json.dumps({run.named(8).name: MOST}))),
        4,
        [("8 on disk", f"the last {MOST} attempts")],
    ),
    "all is damaged": (damaged_all, "can be read: all 4 are damaged or incomplete", []),
    "all manifests are damaged": (
        lambda run: (lost_memory(run), [flip(run.named(step) / MANIFEST) for step in (8, 4)]),
        "none of them can be used",
        [],
    ),
    "nothing is left": (lambda run: (lost_memory(run), shutil.rmtree(run.disk)), 0, []),
}


@pytest.mark.parametrize("story", STORIES)
def test_it_says_what_the_next_start_does(story, run):
    happens, expected, reasons = STORIES[story]
    run.train(range(1, 10))
    happens(run)
    before = {path: path.stat().st_mtime_ns for root in (run.disk, run.memory) for path in root.rglob("*")}
    explanation = explain(run.disk, run.memory)
    assert {path: path.stat().st_mtime_ns for root in (run.disk, run.memory) for path in root.rglob("*")} == before
    text, facts = "\n".join(explanation.lines()), explanation.facts()
    if isinstance(expected, int):
        verb = "resume from" if expected else "start from"
        assert f"would {verb} step {expected}: " in text and facts["step"] == expected
    else:
        assert "would be refused: " in text and expected in text and facts["hint"]
    for place, reason in reasons:
        assert any(f"{left['step']} {left['where']}" == place and reason in left["why"] for left in facts["not_taken"])
        assert f"  step {place.replace(' ', ', ', 1)}: {reason}" in text
    found = run.resumed()
    assert found == expected or (isinstance(expected, str) and expected in found)
    assert found == (facts["why"] if facts["action"] == "refuse" else facts["step"])


def test_a_run_that_is_going_is_said_to_be(run):
    checkpointer, state, progress = run.start()
    with closing(checkpointer):
        trained(checkpointer, state, progress, range(1, 5))
        explanation = explain(run.disk, run.memory)
        assert explanation.in_use and "The run is in progress" in "\n".join(explanation.lines())
        trained(checkpointer, state, progress, [5])
    assert not explain(run.disk, run.memory).in_use


def test_of_a_run_of_several_hosts_it_says_what_it_cannot_see(run):

    found = Available(offers("9 memory 0", "8 disk 0", "8 disk 1", ranks=2))
    plan = decide(found, None, Wish(run.disk, run.memory), ResumeFacts())
    text = "\n".join(Explanation(plan, found, plan.step, in_use=False).lines())
    assert "step 9, in memory: incomplete: the parts of 1 of 2 ranks are missing; it is used if other hosts" in text
    assert "Checkpoints in other hosts' memory or on their own disks cannot be seen from here." in text


def test_on_the_command_line(tmp_path, capsys):
    """A run of `Plain`, which leaves one file a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    text = '[run]\nmodel = "shoestring.testing.jobs:tiny"\n[checkpoint.plain]\nevery = 1\n'
    (folder / "run.toml").write_text(text)
    job = Job(jobs.tiny(), optimizer=lambda parameters: AdamW(parameters), world=World())
    with closing(compose(job, [Plain(every=1, folder=str(folder / "checkpoints"))])) as job:
        for number in range(2):
            job.step(jobs.batch(number, 0, 1))
    capsys.readouterr()
    assert main(["checkpoint", "explain", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out == (
        f'resume = "auto" in `{folder}/checkpoints` would resume from step 2: it is the newest that is undamaged, in '
        "a single file.\n"
    )
    for path in (folder / "checkpoints").glob("step-*"):
        flip(path)
    assert main(["checkpoint", "explain", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["action"] == "refuse" and facts["why"].endswith("all 2 are damaged")
