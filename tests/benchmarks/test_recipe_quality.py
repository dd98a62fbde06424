"""The benchmark of the recipe `quality`: its parts run at toy size, are stored, and are compared by photo."""

import pytest

from benchmarks.harness import Deadline
from benchmarks.recipes import cells, quality
from benchmarks.recipes.__main__ import command


@pytest.fixture
def toy(monkeypatch):
    document = quality.settings()
    document["run"] |= {"steps": 2, "batch": 2}
    document["optim"]["schedule"]["warmup"] = 1
    monkeypatch.setattr(quality, "settings", lambda: document | {"optim": dict(document["optim"])})
    monkeypatch.setattr(quality, "ladders", quality.lru_cache(1)(lambda fold, seed: quality.data(fold, seed, 1)))


def test_a_part_can_be_named_alone(capsys):
    assert command(["--only", "quality", "--list"]) == 0
    assert "recipes.quality-unseen  > 0" in capsys.readouterr().out


@pytest.mark.slow
def test_parts_give_all_methods_the_same_photos(toy):
    cell = quality.classical(7, 1) | quality.networks("plain", 7, 1)
    assert len(cell) == 2 + 2 * 3
    photos = {tuple(method["photos"][side]) for method in cell.values() for side in ("seen", "unseen")}
    assert len(photos) == 1
    assert cell["svr"]["measures"]["pairs_seen"] > 0.6


def test_cells_are_stored_and_compared_by_photo(tmp_path, monkeypatch):
    def part(name, seed, fold):
        share = {"classical": 0.5, "residual": 0.75, "plain": 0.6}[name]
        method = {"classical": "svr", "residual": quality.DEFAULT, "plain": "plain trained module"}[name]
        photos = {side: {str(2 * fold + n): share + n / 10 for n in range(2)} for side in ("seen", "unseen")}
        return {method: {"measures": {"pairs_seen": share}, "photos": photos, "kinds": {}}}

    class Inline:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def submit(self, work, *arguments):
            made.append(arguments)
            future = cells.Future()
            future.set_result(part(*arguments))
            return future

    made = []
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Inline)
    contest = quality.Contest(tmp_path, Deadline())
    above = contest.above(quality.DEFAULT, "svr", "unseen")
    assert above.value == pytest.approx(0.25) and above.interval == pytest.approx((0.25, 0.25))
    assert len(made) == quality.REPETITIONS * 5 * 3
    again = quality.Contest(tmp_path, Deadline())
    assert again.above(quality.DEFAULT, "svr", "all").value == pytest.approx(0.25) and len(made) == 30
    assert "svr: pairs_seen 0.500" in above.note


def test_the_interval_is_over_photos():
    measured = quality.over_photos([0.1, 0.3, 0.2, 0.2, 0.1, 0.3])
    low, high = measured.interval
    assert low < measured.value == pytest.approx(0.2) and 0.1 < low < high < 0.3
    wrong = quality.over_photos([-0.1, 0.3, -0.2, 0.2, -0.3, 0.2])
    assert wrong.interval[0] < 0 < wrong.interval[1]
