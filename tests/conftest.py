"""One thread for every process of the tests: tiny tensors on several threads wait more than they compute."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.shares import ALL_CASES

# The same examples at every run; how long one takes says something of the machine, not of what is tested.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_configure(config):
    """Hide GPUs from all tests but those that need one (`-m gpu`): the others count on a CPU, and on several ranks."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_itemcollected(item):
    """Several workers have to collect the same names. Composing a feature with those of all areas trains many jobs."""
    if getattr(item, "originalname", "") == "test_composes":
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.share(8))
    if " at 0x" in item.name:
        raise pytest.UsageError(f"{item.nodeid}: an address is another one in each worker; give the cases `ids`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of the cases of a test that is marked `share(n)` about one of `n` runs, and of those that are marked `all_cases`
    none, unless all are asked for.

    A digest of the case's name decides, so it is the same on all workers and when failed tests run again.
    """
    if ALL_CASES:
        return
    run, left_out = [], []
    for item in items:
        share = max((mark.args[0] for mark in item.iter_markers("share")), default=1)
        out = item.get_closest_marker("all_cases") or zlib.crc32(item.nodeid.encode()) % share
        (left_out if out else run).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = run


@pytest.fixture(scope="session", autouse=True)
def slots_of_killed_runs(tmp_path_factory):
    """Runs that tests kill leave their slots in shared memory, for a restart that never comes.

    Slots go by the folder of a run's checkpoints. Those of other sessions and of real runs stay.
    """
    yield
    if not any((Path("/dev/shm") / f"shoestring-{os.getuid()}").glob("*")):
        return
    from shoestring.checkpoint import Tiered
    from shoestring.checkpoint.tiers.slots import slots_folder
    from shoestring.core.world import World

    for folder, _, _ in os.walk(tmp_path_factory.getbasetemp()):
        shutil.rmtree(slots_folder(Tiered(folder=folder), World(), make=False).parent, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def own_trust():
    """What tests vouch for is remembered apart from what the user does."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)
        yield


ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_left():
    """No test takes folders from `sys.path` that ranks of later ones import their scenarios from, and none leaves files
    in the folder of the repository."""
    before, files = list(sys.path), set(ROOT.iterdir())
    yield
    lost = [path for path in before if path not in sys.path]
    if lost:
        sys.path[:] = before
        pytest.fail(f"the test has removed {lost} from sys.path")
    left = [path for path in ROOT.iterdir() if path not in files and path.is_file()]
    for path in left:
        path.unlink(missing_ok=True)
    if left:
        pytest.fail(f"the test has left {[path.name for path in left]} in the folder of the repository")


@pytest.fixture(scope="session")
def ours(tmp_path_factory):
    """A finished run of a small Llama, in a folder with its texts and its run file."""
    from shoestring.cli import main
    from tests.small_runs import write_run_file, write_texts

    root = tmp_path_factory.mktemp("ours")
    texts = write_texts(root / "texts")
    run = {"data": texts, "steps": 2, "folder": str(root / "run"), "packages": []}
    assert main(["train", str(write_run_file(root / "run.toml", {"run": run, "memory": {"tracing": {}}}))]) == 0
    return root


QUOTA = 45  # CPU seconds that the quick tests of one area may take
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid="self"):
    """User and system seconds of a process, of its children that run, and of those that it has waited for."""
    children = []
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                children += (thread / "children").read_text().split()
    except OSError:  # the process has just ended: its parent counts it once it has waited for it
        return 0.0
    return sum(map(int, times)) / TICKS + sum(map(cpu_seconds, children))


def pytest_collection_finish(session):
    session.config.stash[CPU] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Each phase of a test takes along the CPU seconds that this process and those below it took since the last."""
    report = yield
    now = cpu_seconds()
    report.cpu, item.config.stash[CPU] = max(0.0, now - item.config.stash[CPU]), now
    return report


CPU = pytest.StashKey()


def pytest_terminal_summary(terminalreporter):
    """CPU seconds of each area, and the clock's; of an area that takes more than its quota of `make test`, the slowest
    files."""
    cpu, clock, files = Counter(), Counter(), defaultdict(Counter)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu"):
                path = Path(report.nodeid.split("::")[0])
                area = path.parts[1]
                cpu[area] += report.cpu
                files[area][path.name] += report.cpu
                clock[area] += report.duration
    listed = ", ".join(f"{area} {cpu[area]:.0f} ({clock[area]:.0f})" for area, spent in cpu.most_common() if spent >= 1)
    terminalreporter.write_line(f"CPU seconds (clock) by area: {listed}; {sum(cpu.values()):.0f} in all")
    if terminalreporter.config.option.markexpr == "not slow":
        for area, spent in cpu.most_common():
            if spent > QUOTA:
                slowest = ", ".join(f"{name} {seconds:.0f}" for name, seconds in files[area].most_common(3))
                terminalreporter.write_line(
                    f"hint, not a failure: {area} is over its quota of {QUOTA} CPU seconds; slowest files: {slowest}"
                )
