"""Several sources as one: shares, order, position, and the held-out part of each."""

import json
import tomllib
from collections import Counter
from fractions import Fraction
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring.data import Data
from shoestring.data.loader import Loader
from shoestring.data.mixture import names, prepare_mixture
from shoestring.data.order import BLOCK, Interleaved, Shuffled, permutation, quotas
from shoestring.run import parse
from tests.small_runs import write_run_file

# -- the order ---------------------------------------------------------------------------------------------------------

mixtures = st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10)), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=12)
@example([(7, 1.0), (30, 2.5), (30, 1.0)], BLOCK - 20, 60, 3)
@given(mixtures, st.integers(0, 2 * BLOCK), st.integers(1, 300), st.integers(-5, 2**70))
def test_any_stretch_is_what_counting_from_the_start_gives(mixture, start, count, seed):
    lengths, weights = zip(*mixture, strict=True)
    shares, seen, expected = quotas(weights), Counter(), []
    offsets = np.cumsum([0, *lengths])
    for block in range(-(-(start + count) // BLOCK)):
        sources = np.repeat(np.arange(len(lengths)), shares)
        for source in sources[permutation(seed, block, BLOCK)].tolist():
            epoch, number = divmod(seen[source], lengths[source])
            seen[source] += 1
            expected.append((source, epoch, number))
    orders = {key: permutation(seed + key[0], key[1], lengths[key[0]]) for key in {each[:2] for each in expected}}
    wanted = [offsets[source] + orders[source, epoch][n] for source, epoch, n in expected[start : start + count]]
    assert Interleaved(seed, lengths, weights).at(np.arange(start, start + count)).tolist() == wanted


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_shares_of_a_block_add_up_and_are_exact_to_one_sample(weights):
    found = quotas(weights)
    assert found.sum() == BLOCK
    assert np.abs(found - np.array(weights) / sum(weights) * BLOCK).max() < 1 + 1e-6


@given(st.lists(st.floats(0.001, 1000), min_size=2, max_size=20))
@example([1.0, 1.0, 1.0])
@example([3.0, 3.0, 1.0])
@example([1.0, 9998.5, 0.7])
@example([0.99996, 0.00002, 0.00002])
def test_what_is_left_goes_to_the_largest_remainders(weights):
    shares = [Fraction(each) * BLOCK / sum(map(Fraction, weights)) for each in weights]
    found = Interleaved(0, [5] * len(weights), weights).quotas.tolist()
    up = [share % 1 for share, count in zip(shares, found, strict=True) if count > share]
    down = [share % 1 for share, count in zip(shares, found, strict=True) if count < share]
    assert not up or not down or min(up) >= max(down) - Fraction(1, 10**9)


@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), (0.1, 0.1, 0.8), (1.0, 1.0, 1.0)])
def test_a_run_takes_each_source_as_often_as_its_weight_says(tmp_path, weights):
    """By the setting, in the first block of a run: 10,000 samples, of which the largest remainders are rounded up."""
    parts = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        for file in range(5):
            (tmp_path / str(number) / f"{file}.txt").write_text(f"{number}{file}" * 200)
        parts.append(str(tmp_path / str(number) / "*.txt"))
    settings = Data(tokenizer="bytes", sequence=16, held_out=0.3, weights=weights)
    corpus = prepare_mixture(parts, settings, tmp_path / "made")
    loader = Loader(corpus.train, batch=BLOCK)
    ids, offsets = loader.ids(0, BLOCK), np.cumsum([0, *(len(part) for part in corpus.train.parts)])
    found = np.bincount(np.searchsorted(offsets, ids, side="right") - 1, minlength=3)
    shares = np.array(weights) / sum(weights) * BLOCK
    wanted = np.floor(shares).astype(int)
    for source in np.argsort(-(shares - wanted), kind="stable")[: BLOCK - wanted.sum()]:
        wanted[source] += 1
    assert found.tolist() == wanted.tolist()


def test_without_weights_every_sample_comes_once_an_epoch():
    order = Shuffled(3, 40)
    assert [sorted(order.at(np.arange(e * 40, e * 40 + 40)).tolist()) for e in range(3)] == [list(range(40))] * 3


# -- the corpus --------------------------------------------------------------------------------------------------------

SETTINGS = {"tokenizer": "bytes", "sequence": 16, "held_out": 0.3}


@pytest.fixture
def sources(tmp_path):
    """Two files of letters and one of digits: which sample is whose can be seen in it."""
    for name, letters, lines in (("a", "ab", 400), ("b", "xy", 150), ("c", "12", 90)):
        lines = [f"{letters[number % 2] * (number % 7 + 3)} {letters * (number % 11)}" for number in range(lines)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines * 6))
    return [str(tmp_path / f"{name}.txt") for name in "abc"]


def whose(sample):
    text = bytes(token for token in sample["inputs"].tolist() if token < 256).decode()
    found = {name for name, letters in (("a", "ab"), ("b", "xy"), ("c", "12")) if set(letters) & set(text)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.slow
def test_training_draws_each_source_by_its_weight_and_holds_out_of_each(sources, tmp_path):
    corpus = prepare_mixture(sources, Data(**SETTINGS, weights=(1, 2, 1)), tmp_path / "out")
    loader = Loader(corpus.train, batch=100, seed=1)
    drawn = Counter(whose({"inputs": row}) for (part,) in islice(loader, BLOCK // 100) for row in part["inputs"])
    assert drawn == {"a": BLOCK / 4, "b": BLOCK / 2, "c": BLOCK / 4}
    assert list(corpus.parts) == ["a", "b", "c"]
    for name, part in corpus.parts.items():
        assert {whose(part.held_out[index]) for index in range(len(part.held_out))} == {name}
    whole = list(chain.from_iterable(part.held_out for part in corpus.parts.values()))
    assert len(whole) == len(corpus.held_out)
    assert all(torch.equal(one["inputs"], corpus.held_out[index]["inputs"]) for index, one in enumerate(whole))


def test_bits_per_byte_are_those_of_the_samples_as_they_are_drawn(sources, tmp_path):
    corpus = prepare_mixture(sources, Data(**SETTINGS, weights=(1, 2, 1)), tmp_path / "out")
    rates = [part.train.bytes / part.train.targets for part in corpus.parts.values()]
    assert corpus.train.targets_per_byte == pytest.approx(4 / (rates[0] + 2 * rates[1] + rates[2]))
    plain = prepare_mixture(sources, Data(**SETTINGS), tmp_path / "out")
    assert plain.train.targets_per_byte == pytest.approx(plain.train.targets / plain.train.bytes)


@pytest.mark.parametrize("weights", [(), (1.0, 5.0, 0.5)])
@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 2), (4, 1)])
def test_a_run_continues_exactly_with_another_number_of_ranks(sources, tmp_path, weights, size, accumulate):
    corpus = prepare_mixture(sources, Data(**SETTINGS, weights=weights), tmp_path / "out")

    def batches(loaders, count):
        steps = zip(*(islice(loader, count) for loader in loaders), strict=True)
        return [
            [i for micro in zip(*ranks, strict=True) for part in micro for i in part["ids"].tolist()] for ranks in steps
        ]

    whole = batches([Loader(corpus.train, batch=8, seed=4)], 40)
    one = Loader(corpus.train, batch=8, seed=4)
    assert batches([one], 13) == whole[:13]
    state = json.loads(json.dumps(one.state_dict()))
    assert state["consumed"] == 13 * 8
    several = [Loader(corpus.train, batch=8, rank=r, size=size, accumulate=accumulate, seed=9) for r in range(size)]
    for loader in several:
        loader.load_state_dict(state)
    assert batches(several, 27) == whole[13:]


def test_other_weights_or_sources_are_another_data_set(sources, tmp_path):
    one, other, fewer = (
        prepare_mixture(listed, Data(**SETTINGS, weights=weights), tmp_path / "out").train
        for listed, weights in ((sources, (1, 2, 3)), (sources, (1, 2, 4)), (sources[:2], (1, 2)))
    )
    state = Loader(one, batch=4).state_dict()
    for dataset in (other, fewer):
        with pytest.raises(DataError, match="position belongs to another data set"):
            Loader(dataset, batch=4).load_state_dict(state)


def test_a_trained_tokenizer_knows_every_source_and_is_used_again(sources, tmp_path, monkeypatch):
    def modified():
        return {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}

    settings = Data(vocabulary=300, sequence=16, held_out=0.3)
    corpus = prepare_mixture(sources, settings, tmp_path / "out")
    encoded = [len(corpus.tokenizer.encode(text)) for text in ("ab" * 8, "xy" * 8, "12" * 8)]
    assert max(encoded) <= 8  # of 16 characters: there are merges for all three
    assert len({part.tokenizer.hash for part in corpus.parts.values()} | {corpus.tokenizer.hash}) == 1
    before = modified()
    monkeypatch.setattr("shoestring.data.mixture.train_bpe", None)
    again = prepare_mixture(sources, settings, tmp_path / "out")
    changed = {str(path) for path, time in modified().items() if before[path] != time}
    assert again.fingerprint == corpus.fingerprint and changed == {"out/tokenizer.json"}


def test_sources_have_short_names_of_their_own():
    assert list(names(["x/a.txt", "y/a.txt", "b.jsonl"])) == ["a-1", "a-2", "b"]
    assert list(names(["texts/*.txt", "hf:org/set:train", "python-stdlib"])) == ["source", "set-train", "python-stdlib"]


# -- the run file ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mixture_trains_and_reports_the_loss_of_each_source(sources, tmp_path, capsys):
    run = tmp_path / "run"
    settings = {"data": sources, "folder": str(run), "steps": 4, "evaluate_every": 2, "baselines": True}
    file = write_run_file(tmp_path / "run.toml", {"run": settings, "data": {"weights": [1, 2.5, 1]}})
    assert main(["check", str(file)]) == 0 and main(["train", str(file)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "held_out_loss" in row][-1]
    losses = [last[f"held_out_loss_{name}"] for name in "abc"]
    assert len(set(losses)) == 3 and min(losses) < last["held_out_loss"] < max(losses)
    assert [row["step"] for row in rows if row.get("held_out_loss_a", 0) > 1][:2] == [2, 4]
    assert "held_out_loss_b" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("data", "weights", "message"),
    [
        (["a.txt", "b.txt"], [1.0], "1 entries for 2 sources"),
        ("a.txt", [1.0, 2.0], "2 entries for 1 sources"),
        (["a.txt", "b.txt"], [1.0, 0.0], "data.weights is"),
        (["a.txt", "b.txt"], [1.0, 1e-5], "one is below 1/10,000"),
        ([1, 2], [], "`run.data` must be a string or a list of strings"),
        (3, [], "`run.data` must be a string or a list of strings"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused_in_one_line(data, weights, message):
    with pytest.raises(ConfigError, match=message):
        parse({"run": {"data": data}, "data": {"weights": weights}})


@pytest.mark.parametrize(("data", "message"), [([], "lists nothing"), (["a.txt", "mine:data"], "lists `mine:data`")])
def test_a_mixture_is_of_text(data, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f"[run]\ndata = {json.dumps(data)}\n")
    assert main(["check", str(tmp_path / "run.toml")]) == 2
    assert message in capsys.readouterr().err


def test_a_resolved_mixture_reads_back_to_itself():
    run = parse({"run": {"data": ["a.txt", "b.txt"]}, "data": {"weights": [1, 2]}})
    assert parse(tomllib.loads(run.toml)) == run
