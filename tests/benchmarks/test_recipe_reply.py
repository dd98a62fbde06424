"""The benchmark of the recipe `reply`: cells are stored and compared with each method, and each method trains."""

import numpy as np
import pytest
import tomli_w

from benchmarks.harness import Deadline, NotRun
from benchmarks.recipes import cells, reply
from benchmarks.recipes.__main__ import command
from shoestring_recipes.reply.ranking import BM25, HELD_OUT, OURS, UNSHARED, UNTAUGHT
from tests.benchmarks.inline_pool import Inline
from tests.recipes.toys import MODULES


@pytest.fixture
def toy(monkeypatch):
    """Made-up ranks of ten texts, four of which share no word, and of ten of emoji that were not taught."""

    def cell(method, seed):
        ours = {"": 1, reply.TAGS: 3, reply.FRAMES: 31, reply.LAST: 2}[method]
        ranks = {BM25: [1] * 6 + [500] * 4 + [1] * 10, OURS: [ours] * 20}
        groups = {HELD_OUT: list(range(10)), UNSHARED: list(range(6, 10)), UNTAUGHT: list(range(10, 20))}
        return {"ranks": ranks, "groups": groups}

    monkeypatch.setattr(reply, "cell", cell)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "made", [])


def test_a_part_can_be_named_alone(capsys):
    assert command(["--only", "reply", "--list"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("recipes.reply-") == 12 and "recipes.reply-untaught-ndcg  > 0" in printed


def test_cells_are_stored_and_compared(tmp_path, toy, monkeypatch):
    monkeypatch.setattr(reply, "PRETRAINED", tmp_path / "MiniLM")
    monkeypatch.setattr(reply, "PACKAGE", "nowhere")
    study = reply.ReplyStudy(tmp_path, Deadline())
    above = study.above(BM25, HELD_OUT, "recall_10")
    assert above.value == pytest.approx(0.4) and above.interval == pytest.approx((0.4, 0.4)) and "0.600" in above.note
    assert study.above(reply.TAGS, UNTAUGHT, "ndcg_30").value == pytest.approx(0.5)
    assert study.above(reply.FRAMES, HELD_OUT, "ndcg_30").value == pytest.approx(1.0)
    assert study.above_chance(reply.TAGS).value == pytest.approx(1 - 10 / 1911)
    assert study.above(reply.LAST, HELD_OUT, "ndcg_30").value == pytest.approx(1 - 1 / np.log2(3))
    missing = study.above(reply.MINILM, UNSHARED, "recall_10")
    assert isinstance(missing, NotRun) and missing.reason.startswith("all-MiniLM-L6-v2 is missing: pip")
    (tmp_path / "MiniLM").mkdir()
    (tmp_path / "MiniLM" / "model.safetensors").write_bytes(b"other")
    assert "other weights" in study.above(reply.MINILM, UNSHARED, "recall_10").reason
    assert len(Inline.made) == 4 * reply.SEEDS
    reply.ReplyStudy(tmp_path, Deadline()).cells(reply.TAGS)
    assert len(Inline.made) == 4 * reply.SEEDS
    lines = reply.table(tmp_path).splitlines()
    assert "| two encoders, tags alone | 5 | 1.000 | 0.500 |" in "\n".join(lines) and len(lines) == 2 + 5


@pytest.mark.slow
@pytest.mark.parametrize("method", reply.METHODS)
def test_each_method_trains(method, monkeypatch):
    document = reply.settings()
    document["run"] |= {"steps": 2, "batch": 8}
    document["model"] = {"dimensions": 16, "width": 8}
    document["optim"]["schedule"]["warmup"] = 1
    monkeypatch.setattr(reply, "settings", lambda: reply.tomllib.loads(tomli_w.dumps(document)))
    monkeypatch.setattr(reply, "arguments", lambda seed: {"seed": seed, "modules": MODULES, "every": 40})
    row = reply.cell(method, 3)
    compared = reply.comparison(row)
    assert compared.ranks.keys() == {BM25, OURS} and compared.groups[HELD_OUT].any()
    assert sum(map(len, row["groups"].values())) >= len(row["ranks"][OURS])
