"""The recipe `annotation`: crawls through kills, a store of two million rows, raters with planted faults, soft labels.

The raters are those of VADER's lexicon (Hutto and Gilbert, 2014; MIT licence, `pip install vaderSentiment`): ten people
who rated 7,520 words from -4 to 4, here as negative, neutral or positive. A draw takes some of them as good raters, and
the consensus of *others* as the truth; planted raters answer at random, always the same, inverted, or copy each other.

python -m benchmarks.recipes.annotation [FOLDER]

prints the README's table from the trainings that are stored.
"""

from __future__ import annotations

import ast
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Deadline, Measured, NotRun, run_command, stored
from benchmarks.intervals import of_mean, of_quantile, of_share
from benchmarks.recipes.autocast import faster
from benchmarks.rows import RESULTS, Kind, Op
from benchmarks.training import ended
from shoestring.core.task import call_model
from shoestring.models.images import small
from shoestring.storage import foreign
from shoestring_recipes.annotation.agreement import LEVELS, krippendorff
from shoestring_recipes.annotation.raters import Labels, consensus_of, copies, fit, majority, review
from shoestring_recipes.annotation.task import data, loss

CACHE = Path(".cache/recipes/annotation")
TABLES = 4000
PAGES, KILLS = 10_000, 20
DRAWS, CLEAN_DRAWS = 20, 100
"""Number of draws of raters with planted faults, and of raters without."""
FIRST = 700
"""The first draw that is judged. Those before it showed how the models of raters are to be compared."""
ROWS, REQUESTS = 2_000_000, 400
"""Number of items in the store, and of requests for each named query."""
SEEDS, NOISES, STEPS = 10, (0.15, 0.3, 0.45), 350
CLASSES = 3

# -- agreement ---------------------------------------------------------------------------------------------------------


def against_the_oracle(deadline: Deadline) -> Measured | NotRun:
    """The largest difference of alpha from the package `krippendorff`, where both are defined."""
    if find_spec("krippendorff") is None:
        return NotRun("krippendorff is not installed: pip install --no-deps krippendorff (GPL, for this row only)")
    from krippendorff import alpha as oracle

    rng, worst, undefined = np.random.default_rng(0), 0.0, 0
    for number in range(TABLES // len(LEVELS)):
        deadline.check()
        table = rng.integers(0, rng.integers(2, 6), (rng.integers(2, 12), rng.integers(2, 6))).astype(float)
        table += number % 2
        table[rng.random(table.shape) < 0.3] = np.nan
        for level in LEVELS:
            ours = krippendorff(table, level)
            undefined += bool(np.isnan(ours))
            if not np.isnan(ours):
                worst = max(worst, abs(ours - oracle(reliability_data=table.T, level_of_measurement=level)))
    return Measured(worst, f"{TABLES} tables, {undefined} of them undefined with us")


# -- raters ------------------------------------------------------------------------------------------------------------


@cache
def ratings() -> np.ndarray | None:
    """VADER's ratings (words, raters), or None if the package is not installed."""
    spec = find_spec("vaderSentiment")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "vader_lexicon.txt"
    rows = [line.split("\t") for line in foreign.read_text(path).splitlines()]
    return np.array([ast.literal_eval(row[3]) for row in rows if len(row) >= 4], dtype=np.float64)


def spoilt(rng: np.random.Generator, kind: str, good: int, planted: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    """The true classes of some words, and the labels (words, raters) of good raters, followed by planted ones."""
    table = ratings()
    assert table is not None
    table = table[rng.permutation(len(table))[:words]]
    signs, people = np.sign(table).astype(np.int64) + 1, rng.permutation(table.shape[1])
    used, number = good + (planted if kind == "inverted" else 0), len(signs)
    truth = majority(Labels.of_matrix(signs[:, people[used:]], CLASSES), int(rng.integers(2**31)))
    made = {
        "random": lambda: rng.integers(0, CLASSES, (number, planted)),
        "constant": lambda: np.full((number, planted), 2),
        "inverted": lambda: 2 - signs[:, people[good:used]],
        "copied": lambda: np.repeat(rng.integers(0, CLASSES, (number, 1)), planted, 1),
        "": lambda: np.empty((number, 0), np.int64),
    }[kind]()
    return truth, np.concatenate([signs[:, people[:good]], made], 1)


def right(answers: np.ndarray, truth: np.ndarray) -> float:
    return float((answers == truth).mean())


def above_majority(kind: str, good: int, planted: int, deadline: Deadline) -> Measured | NotRun:
    """The share of words that the consensus gets right, minus the majority's."""
    if ratings() is None:
        return NotRun("vaderSentiment is not installed: pip install --no-deps vaderSentiment")
    pairs, models = [], Counter[str]()
    for seed in range(FIRST, FIRST + DRAWS):
        deadline.check()
        truth, matrix = spoilt(np.random.default_rng([seed, good]), kind, good, planted, 10**6)
        labels = Labels.of_matrix(matrix, CLASSES)
        consensus = consensus_of(labels)
        models[consensus.model.name.lower()] += 1
        pairs.append((right(majority(labels, seed), truth), right(consensus.soft.argmax(1), truth)))
    means = np.mean(pairs, 0)
    note = (
        f"majority {means[0]:.3f}, consensus {means[1]:.3f}; {good} good and {planted} planted raters, {DRAWS} draws; "
    )
    note += ", ".join(f"{model} in {count}" for model, count in sorted(models.items()))
    return of_mean([one - votes for votes, one in pairs], note)


@cache
def colluding(seed: int) -> tuple[bool, float, float, float]:
    """Of a draw with three raters who copy each other: whether they, and nobody else, are named as copies; and the
    share of words that are right without looking for them, with them left out, and of the good raters alone."""
    truth, matrix = spoilt(np.random.default_rng([seed, 99]), "copied", 3, 3, 10**6)
    labels, clean = Labels.of_matrix(matrix, CLASSES), Labels.of_matrix(matrix[:, :3], CLASSES)
    reviewed = review(labels, merge=False)
    shares = (right(one.soft.argmax(1), truth) for one in (fit(labels), reviewed.consensus, consensus_of(clean)))
    plain, without, alone = shares
    return reviewed.groups == [[3, 4, 5]], plain, without, alone


def found_copies(deadline: Deadline) -> Measured | NotRun:
    """The share of draws in which exactly those are named who copy each other."""
    if ratings() is None:
        return NotRun("vaderSentiment is not installed: pip install --no-deps vaderSentiment")
    named = [deadline.check() or colluding(seed)[0] for seed in range(FIRST, FIRST + CLEAN_DRAWS)]
    return of_share(sum(named), len(named), f"three of six raters copy each other, {len(named)} draws")


def without_copies(deadline: Deadline) -> Measured | NotRun:
    """The share of words that are right once copies are left out, minus that of the good raters alone."""
    if ratings() is None:
        return NotRun("vaderSentiment is not installed: pip install --no-deps vaderSentiment")
    draws = [deadline.check() or colluding(seed) for seed in range(FIRST, FIRST + DRAWS)]
    plain, without, alone = np.mean([draw[1:] for draw in draws], 0)
    note = f"with copies {plain:.3f}, without {without:.3f}, good raters alone {alone:.3f}"
    return of_mean([draw[2] - draw[3] for draw in draws], note)


def accused(deadline: Deadline) -> Measured | NotRun:
    """The share of draws of good raters in which somebody is said to copy or to disagree with all others."""
    if ratings() is None:
        return NotRun("vaderSentiment is not installed: pip install --no-deps vaderSentiment")
    blamed: list[int] = []
    for seed in range(FIRST, FIRST + CLEAN_DRAWS):
        deadline.check()
        rng = np.random.default_rng([seed, 7])
        _, matrix = spoilt(rng, "", int(rng.integers(3, 8)), 0, int(rng.integers(200, 3000)))
        labels = Labels.of_matrix(matrix, CLASSES)
        blamed.append(bool(copies(labels)) or any(one.note for one in review(labels).judgements))
    return of_share(
        sum(blamed), len(blamed), f"from three to seven raters, from 200 to 3,000 words, {len(blamed)} draws"
    )


# -- crawl and store ---------------------------------------------------------------------------------------------------


def lost_or_twice(runs: Path, deadline: Deadline) -> Measured | NotRun:
    """Pages of a loopback site that are lost, or stored or requested more often than kills explain."""
    if find_spec("scrapy") is None:
        return NotRun('Scrapy is not installed: pip install "shoestring[annotation]"')
    from tests.rigs.crawls import UNDER_WAY, kill_and_continue
    from tests.rigs.site import LoopbackSite, tree

    def crawl() -> dict[str, Any]:
        with TemporaryDirectory() as folder, LoopbackSite(tree(PAGES)) as site:
            began = time.monotonic()
            found = kill_and_continue(Path(folder) / "store.db", site, KILLS, PAGES // (KILLS + 1))
            asked = [site.requests[f"/{number}"] for number in range(PAGES)]
            return {"found": found, "asked": asked, "seconds": time.monotonic() - began}

    run = stored(runs / "crawl.json", deadline.check, crawl)
    asked, held = run["asked"], run["found"].get("stored", 0)
    again = sum(asked) - PAGES
    lost = PAGES - held + asked.count(0) + max(again - UNDER_WAY * KILLS, 0)
    return Measured(
        lost, f"{held} of {PAGES} pages stored, {again} requested again after {KILLS} kills; {run['seconds']:.0f} s"
    )


def fill(store: Any, rows: int) -> None:
    """Fill a store with items, tasks of a tenth of them, and two labels for half of those."""
    import sqlalchemy as sql

    lite = store.engine.dialect.name == "sqlite"
    digest = "printf('%032x', i)" if lite else "lpad(to_hex(i), 32, '0')"
    fetched = (
        "datetime('2020-01-01', '+' || i || ' seconds') || '.000000'"
        if lite
        else "timestamp '2020-01-01' + i * interval '1 second'"
    )
    numbers = f"with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})"
    host = "'host-' || (i % 1000) || '.example'"
    with store.writing() as connection:
        for statement in (
            f"insert into items (id, url, source, host, title, size, digest, fetched) {numbers} select i, 'https://' "
            f"|| {host} || '/page/' || i, 'crawl ' || {host}, {host}, 'title ' || i, i % 5000, {digest}, "
            f"{fetched} from n",
            "insert into projects (id, name, question, choices, wanted) values (1, 'p', 'q', '[\"a\", \"b\"]', 3)",
            "insert into raters (id, name, token) values (1, 'a', '1'), (2, 'b', '2'), (3, 'c', '3')",
            "insert into tasks (id, project_id, item_id, labelled) select id, 1, id, case when id % 20 = 0 then 2 "
            f"else 0 end from items where id <= {rows // 10}",
            "insert into labels (task_id, rater_id, choice, seconds, made) select t.id, r.id, 0, 1.0, i.fetched "
            "from tasks t join items i on i.id = t.item_id join raters r on r.id < 3 where t.labelled = 2",
        ):
            connection.execute(sql.text(statement.replace(":", "\\:")))
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("analyze")


def arguments_of(rng: np.random.Generator, rows: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of each named query for a store of `fill`."""
    item = int(rng.integers(1, rows + 1))
    host = f"host-{item % 1000}.example"
    return {
        "item_of_url": (f"https://{host}/page/{item}",),
        "newest_of_host": (host,),
        "items_of_source": (f"crawl {host}", item),
        "same_text": (f"{item:032x}",),
        "next_task": (1, int(rng.integers(1, 4)), 3),
        "newest_labels": (int(rng.integers(1, 3)),),
    }


@cache
def queried(rows: int, requests: int) -> dict[str, Any]:
    """For each named query of a filled store, the seconds of its requests and the lines of its plan that scan."""
    from shoestring_recipes.annotation.store import QUERIES, open_store, plan, scans

    rng, measured = np.random.default_rng(0), {}
    with TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/store.db")
        fill(store, rows)
        for name, query in QUERIES.items():
            with store.reading() as connection:
                scanned = scans(plan(connection, query(*arguments_of(rng, rows)[name])))
            seconds = []
            for _ in range(requests + 20):
                statement = query(*arguments_of(rng, rows)[name])
                began = time.perf_counter()
                store.rows(statement)
                seconds.append(time.perf_counter() - began)
            measured[name] = {"seconds": seconds[20:], "scans": scanned}  # the first ones warm up
        store.engine.dispose()
    return measured


def slowest_query(deadline: Deadline) -> Measured:
    """Milliseconds of the 95% quantile of the slowest named query."""
    deadline.check()
    times = {name: [1000 * one for one in run["seconds"]] for name, run in queried(ROWS, REQUESTS).items()}
    quantiles = {name: of_quantile(values, 0.95) for name, values in times.items()}
    slowest = max(quantiles, key=lambda name: quantiles[name].value)
    note = ", ".join(f"{name} {one.value:.2f} ms" for name, one in quantiles.items())
    return Measured(quantiles[slowest].value, note, quantiles[slowest].interval)


def whole_tables_read(deadline: Deadline) -> Measured:
    """The number of named queries whose plan reads a whole table."""
    deadline.check()
    reading = [name for name, run in queried(ROWS, REQUESTS).items() if run["scans"]]
    return Measured(len(reading), ", ".join(reading))


# -- trainings ---------------------------------------------------------------------------------------------------------


def trained(kind: str, noise: float, seed: int) -> dict[str, Any]:
    """The last figures of a training."""
    folder = CACHE.absolute() / f"{seed}-{noise}-{kind}"
    if not ended(folder):
        named = ["--seed", str(seed), "--data.arguments.seed", str(seed), "--data.arguments.noise", str(noise)]
        named += ["--data.arguments.labels", kind, "--steps", str(STEPS), "--evaluate_every", str(STEPS)]
        named += ["--folder", str(folder), "--resume", "auto"]
        run_command([sys.executable, "-m", "shoestring", "train", "annotation", *named])
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = [row for row in rows if "log_loss" in row][-1]
    return {name: last[name] for name in ("log_loss", "accuracy", "calibration")}


class Study:
    """All trainings, each made once and stored in a folder."""

    def __init__(self, runs: Path, deadline: Deadline) -> None:
        self.runs, self.check = runs, deadline.check

    def cells(self, kind: str, noise: float) -> list[dict[str, Any]]:
        """The figures of a kind of labels at a rate of noise, for each seed."""
        draw = lambda: {"seeds": [secrets.randbelow(2**20) for _ in range(SEEDS)]}  # noqa: E731
        seeds = stored(self.runs / "seeds.json", self.check, draw)["seeds"]

        def cell(seed: int) -> dict[str, Any]:
            return stored(self.runs / f"{seed}-{noise}-{kind}.json", self.check, partial(trained, kind, noise, seed))

        with ThreadPoolExecutor(2) as pool:  # trainings are processes of their own
            return list(pool.map(cell, seeds))

    def better(self) -> Measured:
        """The number of rates of noise at which soft labels have the lower log-loss, with an interval clear of 0."""
        notes, clear = [], 0
        for noise in NOISES:
            losses = [[cell["log_loss"] for cell in self.cells(kind, noise)] for kind in ("majority", "soft")]
            gain = of_mean([one - other for one, other in zip(*losses, strict=True)])
            assert gain.interval is not None
            clear += gain.interval[0] > 0
            means = [float(np.mean(one)) for one in losses]
            notes.append(
                f"noise {noise}: majority {means[0]:.3f}, soft {means[1]:.3f}, "
                f"difference {gain.interval[0]:.3f} to {gain.interval[1]:.3f}"
            )
        return Measured(clear, "; ".join(notes))


def faster_in_bf16(deadline: Deadline) -> Measured:
    """What autocast is worth on 128 images."""
    torch.manual_seed(0)
    samples, _ = data(images=128, held_out=8)
    batch = {"inputs": samples.images.images, "targets": samples.soft}
    return faster(small(), batch, call_model, loss, deadline)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = Study(runs, deadline)

    def bar(
        name: str, what: str, op: Op, limit: float, measure: Callable[..., Any], kind: Kind = "exact", **rest: Any
    ) -> Bar:
        return Bar(f"recipes.annotation-{name}", f"annotation: {what}", op, limit, measure, kind=kind, **rest)

    planted: Sequence[tuple[str, str, int, int, str, float]] = (
        ("random", "random", 3, 4, "with four of seven raters answering at random", 0.03),
        ("constant", "constant", 3, 3, "with three of six raters always giving the same answer", 0.03),
        ("inverted", "inverted", 3, 2, "with two of five raters inverting their answers", 0.03),
        ("clean", "", 3, 0, "of three good raters alone", -0.005),
        ("clean-five", "", 5, 0, "of five good raters alone", -0.005),
    )
    right = "share of words that the consensus gets right"
    oracle = "largest difference of alpha from the package krippendorff, of 4,000 random tables where both are defined"
    copies = "share of draws in which exactly the three of six raters who copy each other are named"
    left_out = f"{right} once copies are left out, minus that of the good raters alone"
    killed = "pages lost, or requested again more often than was under way, of 10,000 in a crawl killed 20 times"
    slow = "milliseconds of the slowest of six named queries, two million items, 95% quantile of warm requests"
    soft = "rates of noise, of three, at which soft labels have a lower log-loss on clean labels than the majority"
    cast = "processor time of a step in float32 over that with [precision.autocast], on a CPU with bf16"
    return [
        bar("oracle", oracle, "<=", 1e-9, against_the_oracle, peers=("krippendorff",)),
        *(
            bar(
                word, f"{right}, minus the majority's, {what}", ">=", limit,
                partial(above_majority, kind, good, number), "drawn", baseline="majority",
            )
            for word, kind, good, number, what, limit in planted
        ),
        bar("copies-found", copies, ">=", 0.95, found_copies, "drawn"),
        bar("copies-left-out", left_out, ">=", -0.01, without_copies, "drawn"),
        bar("accused", "share of draws of good raters in which somebody is accused", "<=", 0.05, accused, "drawn"),
        bar("crawl", killed, "<=", 0, lambda deadline: lost_or_twice(runs, deadline)),
        bar("plans", "named queries that read a whole table, of six", "<=", 0, whole_tables_read),
        bar("queries", slow, "<=", 50.0, slowest_query, "timed"),
        bar("soft", f"{soft}, ten paired seeds", ">=", 2, lambda _: study.better(), baseline="majority"),
        bar("autocast", cast, ">=", 1.2, faster_in_bf16, "timed"),
    ]  # fmt: skip


def table(runs: Path) -> str:
    """The means of each kind of labels over the seeds that are stored, as rows of Markdown."""
    lines = ["| noise | labels | seeds | log-loss | accuracy | calibration error |", "|---|---|---|---|---|---|"]
    for noise in NOISES:
        for kind in ("majority", "soft"):
            cells: list[Mapping[str, Any]] = [
                json.loads(path.read_text()) for path in sorted(runs.glob(f"*-{noise}-{kind}.json"))
            ]
            if cells:
                means = [np.mean([cell[name] for cell in cells]) for name in ("log_loss", "accuracy", "calibration")]
                lines.append(f"| {noise} | {kind} | {len(cells)} | " + " | ".join(f"{one:.3f}" for one in means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "annotation"))
