"""The benchmark of precision at toy size: every way runs to its end."""

from __future__ import annotations

import math

import pytest

from benchmarks.precision import casting, losses, searched, steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_losses_and_casts_are_measured(name, monkeypatch):
    monkeypatch.setattr(losses, "STEPS", 3)
    monkeypatch.setattr(losses, "LAST", 1)
    monkeypatch.setattr(steps, "MODELS", {name: losses.TRAINED[name]})
    monkeypatch.setattr(searched, "DRAWS", range(5, 6))
    monkeypatch.setattr(searched, "ROUNDS", 1)
    wide, narrow = (losses.final_loss(name, 0, narrowed=narrowed) for narrowed in (False, True))
    assert math.isfinite(wide) and wide != narrow == pytest.approx(wide, rel=1e-2)
    ours, theirs, chosen = (casting.WAYS[way](name, 0) for way in ("passes", "autocast", "graph"))
    assert 0 < ours.casts <= theirs.casts and 0.9 * theirs.elements <= ours.elements < 1
    assert chosen.nbytes <= ours.nbytes
    drawn = steps.drawn(name, 0)
    assert 0 < drawn.error(ours.step) < 0.1 and drawn.error(steps.plain(name, 0)) < 1e-4
