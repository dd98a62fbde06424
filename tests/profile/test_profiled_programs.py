"""Whole programs under `shoestring profile`: how they end, and what they use besides torch's operators."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.profile import load
from shoestring.profile.happenings import Happenings
from shoestring.profile.lines import by_line, package_of
from shoestring.profile.recording import Events, Profile

pytestmark = pytest.mark.slow
NONE = Events(0, 0.0, 0.0)
WORK = """
import os, signal, sys
import torch
from torch import nn
a = torch.randn(128, 128)
for _ in range(20):
    a @ a  # work
"""


def run(folder: Path, program: str, *before: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    shoestring = [*before, str(Path(sys.executable).with_name("shoestring")), "profile", "program.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(shoestring, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def line_times(profile: Profile, program: str, mark: str) -> tuple[int, int]:
    """Forward and backward nanoseconds of the lines that end with a mark."""
    wanted = {number for number, text in enumerate(program.splitlines(), 1) if text.endswith(f"# {mark}")}
    lines = [line for (file, number), line in by_line(profile.tree).items() if number in wanted and "program" in file]
    assert lines
    return sum(line.forward for line in lines), sum(line.backward for line in lines)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('my own')", 1, "my own"),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", 130, ""),
        ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", 143, ""),
        ("os._exit(5)", 5, "ends through os._exit"),
        (
            "import threading; threading.Thread(target=os._exit, args=(6,)).start(); signal.pause()",
            6,
            "ends through os._exit",
        ),
        ("os.execlp(sys.executable, 'python', '-c', 'raise SystemExit(8)')", 8, "ends through os.execv"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "ends through os.kill"),
    ],
)
def test_however_a_program_ends_its_profile_is_saved_and_it_is_said_where(tmp_path, ending, code, said):
    done = run(tmp_path, WORK + ending)
    assert done.returncode == code
    assert "shoestring profile view profile.npz" in done.stdout + done.stderr
    assert said in done.stderr
    assert line_times(load(tmp_path / "profile.npz"), WORK, "work")[0] > 0


FORKS = """
import os, resource, sys
child = os.fork()
if not child:
    raise SystemExit(3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("child:", code, used.ru_utime + used.ru_stime, flush=True)
"""


def test_a_forked_child_ends_without_going_through_all_that_the_profile_imported(tmp_path):
    plain = subprocess.run(
        [sys.executable, "-c", "import torch, shoestring.profile.collector" + FORKS], capture_output=True, text=True
    )
    done = run(tmp_path, FORKS)
    said = [line.split() for line in (plain.stdout + done.stdout).splitlines() if line.startswith("child:")]
    assert [code for _, code, _ in said] == ["3", "3"]
    assert float(said[1][2]) < 0.7 * float(said[0][2])


def test_children_that_end_by_themselves_do_not_end_the_profile(tmp_path):
    done = run(
        tmp_path, WORK + "child = os.fork()\nchild or os._exit(7)\nprint(os.waitpid(child, 0)[1] >> 8)\na @ a  # work"
    )
    assert done.stdout.startswith("7\n") and "ends by" not in done.stderr
    assert line_times(load(tmp_path / "profile.npz"), WORK, "work")[0] > 0


def test_a_program_that_handles_sigterm_keeps_its_handler_and_children_end_as_they_would(tmp_path):
    program = WORK + (
        "ready, tell = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n    os.write(tell, b'x'); signal.pause()\n"
        "os.read(ready, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('went on')\n"
    )
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert f"child {-signal.SIGTERM}" in done.stdout
    assert done.stdout.index("handled") < done.stdout.index("went on")


def test_what_is_computed_again_for_the_backward_pass_is_on_its_line(tmp_path):
    program = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
up, down = nn.Linear(64, 256), nn.Linear(256, 64)
def block(x):
    hidden = up(x).relu()  # block
    return x + down(hidden)  # block
for _ in range(20):
    x = torch.randn(256, 64)
    for _ in range(3):
        x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    profile = load(tmp_path / "profile.npz")
    forward, backward = line_times(profile, program, "block")
    operators = sum(line.forward + line.backward for line in by_line(profile.tree).values())
    assert forward + backward >= 0.8 * operators
    assert backward > forward > 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_do_not_disturb_it(tmp_path, start):
    program = f"""
import torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((32,), float(index))
def main():
    weights = torch.randn(32, 32)
    total = 0.0
    for batch in DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="{start}"):
        total += float((batch @ weights @ weights.inverse()).sum())  # work
    print("total", round(total))
if __name__ == "__main__":
    main()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert f"total {32 * 63 * 64 // 2}" in done.stdout
    assert line_times(load(tmp_path / "profile.npz"), program, "work")[0] > 0


def test_each_rank_of_ddp_has_a_file_and_they_merge(tmp_path):
    program = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
for _ in range(10):
    model(torch.randn(64, 64)).sum().backward()  # work
dist.destroy_process_group()
"""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = ("--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "agent"), "--no-python")
    done = run(tmp_path, program, torchrun, *options)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        forward, backward = line_times(load(tmp_path / f"profile-{rank}.npz"), program, "work")
        assert forward > 0 and backward > 0


def test_beside_torchs_profiler_both_count_the_same(tmp_path):
    program = """
import torch
from torch.profiler import profile
a = torch.randn(64, 64)
with profile() as theirs:
    for _ in range(20):
        a @ a  # work
print("theirs", sum(each.count for each in theirs.key_averages() if each.key == "aten::mm"))
"""
    done = run(tmp_path, program)
    assert done.returncode == 0 and "theirs 20" in done.stdout, done.stderr
    tree = load(tmp_path / "profile.npz").tree
    assert sum(int(tree.count[node]) for node in range(len(tree)) if tree.label(node) == "aten::mm") == 20


def test_what_torch_compile_writes_is_no_line_of_the_program(tmp_path):
    program = """
import torch
from torch import nn
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
for _ in range(5):
    model(torch.randn(64, 64)).sum().backward()  # work
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    files = {Path(file).name for file, _ in by_line(load(tmp_path / "profile.npz").tree)}
    assert files == {"program.py"}
    assert "What torch.compile has fused" in done.stdout


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/tmp/torchinductor_me/hk/chkyog66ri4qeynyojs5a5veb5x6yh26iwlraolzc6sfdsf3fr4h.py", "torch"),
        ("/scratch/cache/hk/chkyog66ri4qeynyojs5a5veb5x6yh26iwlraolzc6sfdsf3fr4h.py", "torch"),
        ("/home/me/ab/code.py", ""),
        ("/home/me/.venv/bin/shoestring", "python"),
    ],
)
def test_whose_a_file_is(file, package):
    assert package_of(file) == package


def test_garbage_that_the_import_of_a_package_collects_is_not_noted(tmp_path, monkeypatch):
    happenings = Happenings()
    monkeypatch.setattr("builtins.HAPPENINGS", happenings, raising=False)
    for folder, module, noted in (("site-packages", "collecting_package", 0), ("src", "collecting_module", 1)):
        (tmp_path / folder).mkdir()
        text = "HAPPENINGS.collected('start', {})\nHAPPENINGS.collected('stop', {})\n"
        (tmp_path / folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        __import__(module)
        assert happenings.events.get("garbage collection", NONE).count == noted
