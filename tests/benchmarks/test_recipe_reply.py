"""The benchmark of the recipe `reply`: cells are stored and compared with each method, and each method trains."""

import numpy as np
import pytest
import tomli_w

from benchmarks.harness import Deadline, NotRun
from benchmarks.recipes import cells, reply
from benchmarks.recipes.__main__ import command
from shoestring_recipes.reply.ranking import BM25, FROZEN, HELD_OUT, OURS, UNSHARED, UNTAUGHT
from tests.benchmarks.inline_pool import Inline
from tests.recipes.toys import MODULES, save_pretrained


@pytest.fixture
def toy(monkeypatch):
    """Made-up ranks of ten texts, four of which share no word, and of ten of emoji that were not taught."""

    def cell(method, seed):
        ours = {"": 1, reply.TAGS: 3, reply.FRAMES: 31, reply.LAST: 2, reply.BAG: 12}[method]
        ranks = {BM25: [1] * 6 + [500] * 4 + [1] * 10, FROZEN: [3] * 6 + [11] * 14, OURS: [ours] * 20}
        groups = {HELD_OUT: list(range(10)), UNSHARED: list(range(6, 10)), UNTAUGHT: list(range(10, 20))}
        return {"ranks": ranks, "groups": groups}

    monkeypatch.setattr(reply, "cell", cell)
    monkeypatch.setattr(reply, "encoder", lambda: "folder")
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "made", [])


def test_a_part_can_be_named_alone(capsys):
    assert command(["--only", "reply", "--list"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("recipes.reply-") == 14 and "recipes.reply-untaught-ndcg  > 0" in printed


def test_nothing_is_measured_without_the_encoder(tmp_path, monkeypatch):
    reply.folder_of.cache_clear()
    monkeypatch.setattr(reply.frozen, "PACKAGE", "nowhere")
    study = reply.ReplyStudy(tmp_path, Deadline())
    for missing in (study.above(FROZEN, UNSHARED, "recall_10"), study.above_chance(reply.FRAMES)):
        assert isinstance(missing, NotRun) and "is not installed: pip" in missing.reason
    assert isinstance(reply.faster_in_bf16(Deadline()), NotRun) and not list(tmp_path.iterdir())


def test_cells_are_stored_and_compared(tmp_path, toy):
    study = reply.ReplyStudy(tmp_path, Deadline())
    above = study.above(BM25, HELD_OUT, "recall_10")
    assert above.value == pytest.approx(0.4) and above.interval == pytest.approx((0.4, 0.4)) and "0.600" in above.note
    assert study.above(reply.TAGS, UNTAUGHT, "ndcg_30").value == pytest.approx(0.5)
    assert study.above(reply.FRAMES, HELD_OUT, "ndcg_30").value == pytest.approx(1.0)
    assert study.above_chance(reply.TAGS).value == pytest.approx(1 - 10 / 1911)
    assert study.above(reply.LAST, HELD_OUT, "ndcg_30").value == pytest.approx(1 - 1 / np.log2(3))
    assert study.above(FROZEN, UNSHARED, "recall_10").value == pytest.approx(1.0)
    assert study.above(FROZEN, HELD_OUT, "recall_10").value == pytest.approx(0.4)
    assert study.above(reply.BAG, HELD_OUT, "recall_10").value == pytest.approx(1.0)
    assert len(Inline.made) == 5 * reply.SEEDS
    reply.ReplyStudy(tmp_path, Deadline()).cells(reply.TAGS)
    assert len(Inline.made) == 5 * reply.SEEDS
    lines = reply.table(tmp_path).splitlines()
    assert "| two encoders, tags alone | 5 | 1.000 | 0.500 |" in "\n".join(lines) and len(lines) == 2 + 5 + 2


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("method", reply.METHODS)
def test_each_method_trains(method, tmp_path, monkeypatch):
    save_pretrained(tmp_path, "Bert")
    document = reply.settings()
    document["run"] |= {"steps": 2, "batch": 8}
    document["model"] |= {"frozen": str(tmp_path), "dimensions": 16, "width": 8}
    document["data"]["arguments"] |= {"frozen": str(tmp_path), "modules": MODULES, "every": 40}
    document["optim"]["schedule"]["warmup"] = 1
    monkeypatch.setattr(reply, "settings", lambda: reply.tomllib.loads(tomli_w.dumps(document)))
    row = reply.cell(method, 3)
    compared = reply.comparison(row)
    assert compared.ranks.keys() == {BM25, OURS} | ({FROZEN} if method != reply.BAG else set())
    assert compared.groups[HELD_OUT].any()
    assert sum(map(len, row["groups"].values())) >= len(row["ranks"][OURS])
