"""Bars of a GPU, of every area: what is measured where there is none, for how long, and whose memory is there."""

import sys
import textwrap
from dataclasses import replace
from types import ModuleType

import pytest

from benchmarks.gpu import main as run_gpu
from benchmarks.harness import Bar, Deadline, Environment, report, shared
from benchmarks.rows import read

HERE = Environment(cpu="abacus", cores=2, memory_gib=4.0, gpu=None, tree="0123abc")
WITH_GPU = replace(HERE, gpu="1 × planted")


def stored(folder, area):
    return {row.id: row for row in read(folder / f"{area}.json").values()}


@pytest.fixture
def areas(tmp_path, monkeypatch):
    """A package of areas: one with a GPU bar, one without, one that does not import."""
    folder = tmp_path / "planted_areas"
    folder.mkdir()
    fast = """
        from benchmarks.harness import Bar

        def gpu_rows():
            names = ("one", "two")
            more = {"measure": lambda deadline: 2.0, "gpu": True, "kind": "exact"}
            return [Bar(f"fast.{name}", name, ">=", 1, **more) for name in names]
        """
    for name, text in {"fast": fast, "plain": "", "broken": "import no_such_module_at_all"}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    package = ModuleType("planted_areas")
    package.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "planted_areas", package)
    yield package, folder
    for name in ("fast", "plain", "broken"):
        sys.modules.pop(f"planted_areas.{name}", None)


def test_without_a_gpu_every_gpu_bar_says_so_and_a_broken_module_is_reported(areas, tmp_path, capsys):
    package, _ = areas
    assert run_gpu([], package, tmp_path, HERE) == 1
    assert "planted_areas.broken gave no bars" in capsys.readouterr().err
    assert {row.reason for row in stored(tmp_path, "fast").values()} == {"no GPU"}
    assert not (tmp_path / "plain.json").exists()


@pytest.mark.slow
def test_gpu_bars_run_within_the_budget_and_stay_when_there_is_no_gpu_later(areas, tmp_path, capsys):
    package, folder = areas
    (folder / "broken.py").write_text("")
    assert run_gpu(["--budget", "0"], package, tmp_path, WITH_GPU) == 0
    assert {row.reason for row in stored(tmp_path, "fast").values()} == {"budget"}
    assert run_gpu(["--only", "fast.one"], package, tmp_path, WITH_GPU) == 0
    assert [row.status for row in stored(tmp_path, "fast").values()] == ["held", "not-run"]
    assert stored(tmp_path, "fast")["fast.one"].command == "python -m benchmarks.gpu --only fast.one"
    capsys.readouterr()
    assert run_gpu([], package, tmp_path, HERE) == 0
    assert "(no GPU); kept: 2 of " in capsys.readouterr().out
    assert stored(tmp_path, "fast")["fast.one"].measured == 2.0
    assert run_gpu(["--budget", "601"], package, tmp_path, HERE) == 2


@pytest.mark.slow
def test_a_bar_that_takes_too_long_leaves_time_for_the_others(areas, tmp_path):
    package, folder = areas
    (folder / "broken.py").write_text(
        textwrap.dedent("""
        from benchmarks.harness import Bar

        def forever(deadline):
            while deadline.left() > -60:
                pass

        def gpu_rows():
            return [Bar("broken.one", "one", ">=", 1, measure=forever, gpu=True, kind="exact")]
        """)
    )
    wanted = ["--only", "broken", "--only", "fast", "--skip", "fast.two"]
    assert run_gpu(["--each", "0.2", *wanted], package, tmp_path, WITH_GPU) == 0
    assert stored(tmp_path, "broken")["broken.one"].reason == "budget"
    assert [row.reason for row in stored(tmp_path, "fast").values()] == ["", "not measured yet"]


@pytest.mark.slow
def test_what_bars_of_an_area_share_is_gone_before_those_of_the_next(tmp_path):
    held, made = [], []

    @shared
    def weights():
        made.append(None)
        return Weights()

    class Weights:
        def __init__(self):
            held.append(None)

        def __del__(self):
            held.pop()

    def of(name):
        return Bar(name, "", ">=", 1, measure=lambda deadline: weights() and float(len(held)), gpu=True, kind="exact")

    def after(name):
        return Bar(name, "", "<=", 0, measure=lambda deadline: float(len(held)), gpu=True, kind="exact")

    bars = [of("one.a"), of("one.b"), after("two.a")]
    assert report(bars, WITH_GPU, Deadline(), tmp_path, strict=True) == 0
    assert (len(made), held) == (1, [])


def test_gpu_rows_that_do_not_ask_for_a_gpu_are_refused(areas, tmp_path, capsys):
    package, folder = areas
    (folder / "fast.py").write_text((folder / "fast.py").read_text().replace('"gpu": True, ', ""))
    assert run_gpu([], package, tmp_path, HERE) == 1
    assert "in gpu_rows() without gpu=True" in capsys.readouterr().err
