"""What `run.evaluate` gets and returns: the held-out data, numbers, tables and pictures; and the best of a metric."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.report.findings import MOST_ITEMS, MOST_ROWS
from shoestring.run import parse
from shoestring.testing import Pool
from shoestring.training.data_loading import DataSets
from shoestring.training.evaluation import Best, takes_held_out
from shoestring.training.held_out import HeldOut
from shoestring.training.loop import train
from tests.forms.two_towers import RUN, pairs

HERE = __name__
OPTIM = {"optim": {"sgd": {"lr": 0.1}}, "checkpoint": {"plain": {"every": 1}}}


def run(folder, **settings):
    return parse({"run": RUN | {"folder": str(folder)} | settings} | OPTIM, name="evaluated")


def rows(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in lines if key in row}


def recall(model, held_out):
    assert not model.training and not torch.is_grad_enabled() and type(model).__name__ == "Towers"
    parts = [held_out.forward(model, batch)[:2] for batch in held_out]
    text, clip = held_out.gather(tuple(map(torch.cat, zip(*parts, strict=True))))
    assert len(text) == len(held_out)
    ranks = (text @ clip.T).argsort(descending=True).eq(torch.arange(len(text))[:, None]).float().argmax(1)
    return {
        "recall": (ranks == 0).double().mean(),
        "similarity <b>": text @ clip.T,
        "nearest": ss.Table(title="Ranks", head=("pair", "rank"), rows=tuple(enumerate(ranks.tolist()))),
        "grey": ss.Picture(pixels=torch.zeros(3, 8, 9, dtype=torch.bfloat16), caption="<i>none</i>"),
    }


def shrinking(model, held_out):
    return {"score": float(next(model.parameters()).abs().sum()), "nothing": math.nan}


def test_tables_and_pictures_are_kept_and_shown(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    result = train(run(tmp_path, evaluate=f"{HERE}:recall", evaluate_every=2), World())
    assert list(rows(tmp_path, "recall")) == [2, 4] and "grey" not in result.metrics
    files = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert len(files) == 4 and files[0].startswith("00000002-grey") and "<" not in "".join(files)
    picture = pil.open(tmp_path / "pictures" / "00000004-grey.png")
    assert picture.size == (9, 8) and picture.mode == "RGB"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img ") == 2 and "img-src data:" in page and "similarity &lt;b&gt;" in page
    assert "&lt;i&gt;none&lt;/i&gt;" in page and "By run.evaluate, after step 4" in page


@pytest.mark.slow
def test_what_a_resumed_run_repeats_is_dropped(tmp_path):
    asked = iter([False] * 3 + [True])
    settings = {"evaluate": f"{HERE}:recall", "evaluate_every": 1, "steps": 8}
    train(run(tmp_path, **settings), World(), stop=lambda: next(asked))
    for number in (6, 7):  # as of a run that was killed after its last checkpoint
        (tmp_path / f"pictures/0000000{number}-grey.png").write_bytes(b"")
        with (tmp_path / "evaluations.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": number, "name": f"stale {number}", "title": "", "head": [], "rows": []}) + "\n"
            )
    asked = iter([False, True])
    train(run(tmp_path, resume=True, **settings), World(), stop=lambda: next(asked))
    assert {path.name[:8] for path in (tmp_path / "pictures").iterdir()} == {
        f"0000000{number}" for number in range(1, 7)
    }
    assert (tmp_path / "pictures/00000006-grey.png").read_bytes() and "stale" not in (
        tmp_path / "report.html"
    ).read_text()


def on_ranks(folder):
    return train(run(folder, evaluate=f"{HERE}:recall"), World.current()).metrics


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_the_work_and_gather_what_one_process_computes(tmp_path, ranks):
    alone = train(run(tmp_path / "alone", evaluate=f"{HERE}:recall"), World()).metrics
    with Pool(ranks, timeout=200) as pool:
        found = pool.call(on_ranks, folder=str(tmp_path / "together"))
    assert [metrics["recall"] for metrics in found] == [alone["recall"]] * ranks
    assert found[0]["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-5)
    assert (tmp_path / "together/pictures").is_dir()


def gathered_on_ranks(cases):
    """For each (samples, batch), what ranks gather of the squares of the sample numbers."""
    results = []
    for samples, batch in cases:
        data = [{"inputs": torch.tensor([float(index)])} for index in range(samples)]
        job = ss.compose(Job(torch.nn.Linear(1, 1)), [ss.parallel.DDP()])
        held_out = HeldOut(job, DataSets(data, data, None), data, batch)
        own = torch.cat([batch["inputs"] for batch in held_out])
        together = held_out.gather({"square": own[:, 0].square(), "half": own.bfloat16(), "empty": own[:, :0]})
        assert together["half"].dtype is torch.bfloat16 and together["empty"].shape == (samples, 0)
        results.append(together["square"].tolist())
        job.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_gathered_rows_have_the_order_of_the_data_set(ranks):
    cases = [(1, 1), (2, 4), (3, 1), (7, 2), (8, 3), (10, 1)]
    with Pool(ranks, timeout=200) as pool:
        for result in pool.call(gathered_on_ranks, cases=cases):
            assert result == [[float(index * index) for index in range(samples)] for samples, _ in cases]


def test_rows_that_are_not_one_for_each_sample_are_refused():
    data = [{"inputs": torch.zeros(1)} for _ in range(5)]
    held_out = HeldOut(ss.compose(Job(torch.nn.Linear(1, 1))), DataSets(data, data, None), data, 2)
    for rows in (torch.zeros(4), torch.zeros(()), torch.zeros(6, 2)):
        with pytest.raises(ConfigError, match="this rank has 5 samples"):
            held_out.gather(rows)


# -- the best of any metric --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_model_is_that_of_the_metric_and_its_direction(tmp_path):
    settings = {"evaluate": f"{HERE}:shrinking", "evaluate_every": 1, "save_best": True, "best_metric": "score"}
    for mode in ("min", "max"):
        train(run(tmp_path / mode, steps=5, best_mode=mode, **settings), World())
        scores = rows(tmp_path / mode, "score")
        best = (min if mode == "min" else max)(scores, key=lambda step: scores[step])
        word = {"min": "lowest", "max": "highest"}[mode]
        (note,) = json.loads((tmp_path / mode / "summary.json").read_text())["notes"]
        assert note.startswith(f"{word} score during the run: ") and f"after step {best}, in" in note


@pytest.mark.slow
def test_patience_ends_a_run_whose_metric_never_rises(tmp_path):
    settings = {"evaluate": f"{HERE}:shrinking", "evaluate_every": 1, "patience": 2, "steps": 30, "best_mode": "max"}
    train(run(tmp_path / "nan", best_metric="nothing", **settings), World())
    assert max(rows(tmp_path / "nan", "loss")) == 2  # NaN is never the best
    with pytest.raises(ConfigError, match=r"`run\.best_metric`: no evaluation returns `scores`") as caught:
        train(run(tmp_path / "no", best_metric="scores", **settings), World())
    assert "score" in caught.value.hint
    with pytest.raises(ConfigError, match=r"`run\.best_metric` is `score`, which no evaluation returns"):
        train(run(tmp_path / "none", best_metric="score", **settings | {"evaluate": ""}), World())


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, math.nan, math.inf, -math.inf]), max_size=12),
    st.sampled_from(["min", "max"]),
)
def test_the_best_value_is_the_first_of_the_best(values, mode):
    best, taken = Best("x", mode), []
    for step, value in enumerate(values, 1):
        resumed = Best("x", mode)
        resumed.load_state_dict(json.loads(json.dumps(best.state_dict())))
        best = resumed
        if best.take(step, value):
            taken.append(step)
    numbers = [value for value in values if not math.isnan(value)]
    if numbers:
        wanted = (min if mode == "min" else max)(numbers)
        assert best.value == wanted and best.step == taken[-1] == values.index(wanted) + 1
        assert best.since == len(values) - best.step
    else:
        assert not taken and best.since == len(values)


def test_a_saved_best_of_another_metric_is_not_taken_over():
    best = Best("accuracy", "max")
    best.load_state_dict({"loss": 0.5, "step": 3, "seen": 4, "since": 1})  # of an earlier version
    assert best.step == 0
    old = Best()
    old.load_state_dict({"loss": 0.5, "step": 3, "seen": 4, "since": 1})
    assert (old.value, old.step, old.seen, old.since) == (0.5, 3, 4, 1)


# -- results that are no numbers ---------------------------------------------------------------------------------------


def many(model):
    table = ss.Table(title="long", head=("a",), rows=tuple((f"{index}",) for index in range(MOST_ROWS + 5)))
    return {f"picture {index}": np.zeros((4, 4)) for index in range(MOST_ITEMS + 3)} | {"long": table, "one": 1}


def long(model):
    return {"long": many(model)["long"], "../../evil\n": np.full((3000, 5), np.nan), "é": np.ones((2, 2), bool)}


@pytest.mark.slow
def test_too_much_is_left_out_and_said(tmp_path, caplog):
    train(run(tmp_path / "many", evaluate=f"{HERE}:many", steps=1), World())
    assert len(list((tmp_path / "many/pictures").iterdir())) == MOST_ITEMS
    assert "`picture 32` is left out" in caplog.text
    train(run(tmp_path / "long", evaluate=f"{HERE}:long", steps=1), World())
    page = (tmp_path / "long/report.html").read_text()
    assert "The first 1,000 of 1,005 rows." in page and page.count("<img ") == 2
    assert all(path.parent == tmp_path / "long/pictures" for path in (tmp_path / "long").rglob("*.png"))


def shaped(model):
    return {"x": torch.zeros(2, 3, 4)}


def flat(model):
    return {"x": torch.zeros(4)}


def worded(model):
    return {"x": "text"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shaped", r"a picture has the shape \(2, 3, 4\)"),
        ("flat", "not a dict of numbers"),
        ("worded", "not a dict of"),
    ],
)
def test_other_results_are_refused_in_one_line(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        train(run(tmp_path, evaluate=f"{HERE}:{name}", steps=1), World())


def held_out_missing():
    return pairs()[0]


def test_a_function_of_held_out_data_needs_some(tmp_path):
    with pytest.raises(ConfigError, match="takes held-out data, but there is none"):
        train(run(tmp_path, data=f"{HERE}:held_out_missing", evaluate=f"{HERE}:recall"), World())


def test_one_argument_keeps_working():
    assert [takes_held_out(own) for own in (many, recall, lambda model, rate=1: {}, lambda *all: {}, dict)] == [
        False, True, False, False, False,
    ]  # fmt: skip


shapes = st.sampled_from([(1, 1), (2, 3), (3, 2, 2), (2, 2, 3), (1, 4, 5), (4, 5, 1), (3, 3, 3)])
kinds = st.sampled_from([np.uint8, np.int64, np.float32, np.float64, bool])


@settings(max_examples=60)
@given(shapes, kinds, st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_a_picture_is_read_back_as_it_was_given(shape, kind, value):
    pil = pytest.importorskip("PIL.Image")
    from io import BytesIO

    from shoestring.report.findings import png

    with np.errstate(all="ignore"):
        array = np.full(shape, value).astype(kind)
    pixels = ss.Picture(pixels=array).bytes_of_pixels()
    shown = np.asarray(pil.open(BytesIO(png(pixels))))
    assert shown.shape == pixels.shape and (shown == pixels).all()
    if kind in (np.float32, np.float64):
        wanted = 0 if math.isnan(value) else round(min(max(value, 0.0), 1.0) * 255)
        assert abs(int(pixels.flat[0]) - wanted) <= 1
