"""The recipe `federated`: accuracy on a domain that no client has, beside pooled training, FedAvg and FedProx.

A *cell* is a seed and a domain that is left out; in it all methods train as many steps on the same samples. The
baseline is FedAvg with the recipe's augmentation. Each method has four candidates for its settings. They are judged
without the domain that is left out: a model learns from one of the other two domains and is judged by the other one.

python -m benchmarks.recipes.federated [FOLDER]

prints the README's table from the cells that are stored.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

import shoestring_recipes.federated as recipe
from benchmarks.harness import Bar, Deadline, Measured, NotRun, stored
from benchmarks.intervals import of_mean, of_median
from benchmarks.recipes.cells import made, seeds_of
from benchmarks.rows import RESULTS
from benchmarks.training import train_to_end
from shoestring.testing.netlab import SHARED, netlab, netlab_available
from shoestring_recipes.federated.digits import DOMAINS, domain
from shoestring_recipes.federated.task import Digits, Separated, data

SEEDS = 10
TUNED_WITH = 1
"""Seed of the trainings that choose settings."""
RATES = (0.02, 0.05, 0.1, 0.2)
FEDAVG = {"model.disentangle": False, "model.augment": False, "comm.fedavg.private": []}
BASELINE, OURS = "FedAvg, augmented", "separated"
METHODS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "pooled": tuple(FEDAVG | {"pooled": True, "optim.sgd.lr": rate} for rate in RATES),
    "FedAvg": tuple(FEDAVG | {"optim.sgd.lr": rate} for rate in RATES),
    "FedProx": tuple(FEDAVG | {"comm.fedavg.proximal": strength} for strength in (0.001, 0.01, 0.1, 1.0)),
    BASELINE: tuple(FEDAVG | {"model.augment": True, "optim.sgd.lr": rate} for rate in RATES),
    OURS: tuple({"model.bottleneck": weight} for weight in (0.005, 0.01, 0.02, 0.05)),
}
"""The candidates of each method: what they change in the recipe's run file."""
NETLAB_RATE, NETLAB_BITS = "10mbit", 10e6
ROUNDS = 12


def settings() -> dict[str, Any]:
    """The recipe's run file, as shipped."""
    return tomllib.loads(Path(recipe.__path__[0], "run.toml").read_text())


# -- trainings ---------------------------------------------------------------------------------------------------------


def taught_alone(name: str) -> tuple[dict[str, Digits], Digits]:
    """The clients of one domain, and all samples of the other two, in an order drawn once."""
    others = [other for other in DOMAINS if other != name]
    parts = data(left_out=others[0])[0]
    clients = {client: part for client, part in parts.items() if client.rpartition("-")[0] == name}
    held = together({other: Digits(*whole(other)) for other in others})
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(0))
    return clients, Digits(held.images[order], held.labels[order], held.domains[order])


def whole(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The images, labels and domain numbers of a domain."""
    images, labels, _ = domain(name)
    return images, labels, torch.full_like(labels, list(DOMAINS).index(name))


def together(clients: Mapping[str, Digits]) -> Digits:
    """The samples of all clients in one data set."""
    columns = ([getattr(part, name) for part in clients.values()] for name in ("images", "labels", "domains"))
    return Digits(*(torch.cat(column) for column in columns))


def tuning_data(learnt: str, pooled: bool) -> tuple[Any, Digits]:
    """What a training that chooses settings learns from and is judged by."""
    clients, held = taught_alone(learnt)
    return together(clients) if pooled else clients, held


def cell_data(left_out: str, pooled: bool, seed: int) -> tuple[Any, Digits]:
    """The recipe's data, by client or together."""
    clients, held = data(left_out=left_out, seed=seed)
    return together(clients) if pooled else clients, held


def trained(changes: Mapping[str, Any], data_name: str, arguments: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Train the recipe with changed settings; the metrics of the evaluation at the end."""
    torch.set_num_threads(1)
    document, changes = settings(), dict(changes)
    pooled = changes.pop("pooled", False)
    for key, value in changes.items():
        *tables, name = key.split(".")
        table = document
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    if pooled:
        del document["comm"]
    document["data"] = {"clients": not pooled, "arguments": {**arguments, "pooled": pooled}}
    with tempfile.TemporaryDirectory() as folder:
        document["run"] |= {"folder": f"{folder}/run", "seed": seed, "data": f"{__name__}:{data_name}"}
        document["run"]["evaluate_every"] = 0
        train_to_end(document)
        rows = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        metrics = [row for row in rows if any(name.startswith("accuracy_") for name in row)][-1]
    return {name: value for name, value in metrics.items() if isinstance(value, float)}


def tuning(method: str, number: int, learnt: str) -> dict[str, Any]:
    """Accuracies of a candidate that learns from one domain on the other two."""
    metrics = trained(METHODS[method][number], "tuning_data", {"learnt": learnt}, TUNED_WITH)
    return {name: value for name, value in metrics.items() if name.startswith("accuracy_")}


def cell(method: str, number: int, left_out: str, seed: int) -> dict[str, Any]:
    """What a method with a candidate's settings gives."""
    return trained(METHODS[method][number], "cell_data", {"left_out": left_out, "seed": seed}, seed)


# -- all cells ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """All trainings, each made once and stored, as many at a time as there are processors.

    Args:
        runs: folder of what they gave.
    """

    runs: Path
    deadline: Deadline

    def seeds(self) -> list[int]:
        """Seeds that were drawn after all settings were fixed: other settings draw others."""
        return seeds_of(self.runs, self.deadline, [settings(), METHODS, SEEDS], SEEDS)

    def chosen(self) -> dict[tuple[str, str], int]:
        """(method, domain left out) -> number of the candidate that is best on the other domains."""
        numbered = [(method, number) for method, candidates in METHODS.items() for number in range(len(candidates))]
        keys = [(*candidate, learnt) for candidate in numbered for learnt in DOMAINS]
        names = {key: f"tuning-{slug(key[0])}-{key[1]}-{key[2]}" for key in keys}
        results = made(self.runs, self.deadline, {names[key]: (tuning, *key) for key in keys})
        best = {}
        for method, candidates in METHODS.items():
            for left_out in DOMAINS:
                inner = [pair for pair in permutations(DOMAINS, 2) if left_out not in pair]
                scores = [
                    [results[names[method, number, learnt]][f"accuracy_{judged}"] for learnt, judged in inner]
                    for number in range(len(candidates))
                ]
                best[method, left_out] = int(np.mean(scores, 1).argmax())
        return best

    def cells(self, method: str) -> dict[str, list[dict[str, Any]]]:
        """Domain left out -> what a method gave with each seed."""
        best, seeds = self.chosen(), self.seeds()
        keys = [(one, left_out, seed) for seed in seeds for left_out in DOMAINS for one in METHODS]
        names = {key: f"cell-{slug(key[0])}-{key[1]}-{key[2]}" for key in keys}
        results = made(self.runs, self.deadline, {names[key]: (cell, key[0], best[key[:2]], *key[1:]) for key in keys})
        return {left_out: [results[names[method, left_out, seed]] for seed in seeds] for left_out in DOMAINS}

    def accuracy(self, method: str) -> np.ndarray:
        """Accuracies on the domain that is left out, (domains, seeds)."""
        return np.array([[one[f"accuracy_{name}"] for one in cells] for name, cells in self.cells(method).items()])

    def note(self, *methods: str) -> str:
        """The mean accuracies on each domain that is left out."""
        lines = []
        for method in methods:
            means = zip(DOMAINS, self.accuracy(method).mean(1), strict=True)
            lines.append(f"{method}: " + ", ".join(f"{name} {mean:.3f}" for name, mean in means))
        return "; ".join(lines)

    def above(self, other: str, take: Callable[[np.ndarray], Sequence[float]]) -> Measured:
        """How much more accurate the recipe is than a method, over the paired seeds.

        Args:
            take: differences (domains, seeds) -> a value for each seed.
        """
        return of_mean(list(take(self.accuracy(OURS) - self.accuracy(other))), self.note(OURS, other))

    def lowest(self) -> Measured:
        """The difference from the baseline on the domain where it is lowest."""
        differences = self.accuracy(OURS) - self.accuracy(BASELINE)
        number = int(differences.mean(1).argmin())
        return of_mean(list(differences[number]), f"{list(DOMAINS)[number]}; {self.note(OURS, BASELINE)}")

    def read(self, probe: str, chance: float) -> Measured:
        """Balanced accuracy of a probe above chance, over seeds, the mean of the domains that are left out."""
        values = np.array([[one[probe] for one in cells] for cells in self.cells(OURS).values()])
        means = ", ".join(f"{name} {mean:.3f}" for name, mean in zip(DOMAINS, values.mean(1), strict=True))
        return of_mean(list(values.mean(0) - chance), f"{probe}: {means}; chance {chance:.3f}")


def slug(method: str) -> str:
    return method.lower().replace(",", "").replace(" ", "-")


# -- what is sent ------------------------------------------------------------------------------------------------------


def rounds_on(hosts: int, rate: str | None) -> dict[str, Any]:
    """Megabytes and seconds of exposed communication of a round between virtual hosts with one rank each."""
    document = settings()
    steps = document["comm"]["fedavg"]["every"] * -(-4 // hosts)
    document["run"] |= {"steps": ROUNDS * steps, "evaluate": "", "evaluate_every": 0}
    document["data"]["arguments"] = {"most": 64}
    with tempfile.TemporaryDirectory() as folder, netlab(hosts=hosts, rate=rate, shared=Path(folder)) as lab:
        Path(folder, "run.toml").write_text(tomli_w.dumps(document))
        job = lab.torchrun(["-m", "shoestring", "train", str(SHARED / "run.toml"), "--folder", str(SHARED / "run")])
        job.check(timeout=600)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    merges = [row for row in rows if row.get("wire_mb", 0) > 0]
    return {
        "mb": float(np.median([row["wire_mb"] for row in merges])),
        "seconds": [row["exposed_seconds"] for row in merges],
        "steps": steps,
    }


def sent(runs: Path, deadline: Deadline) -> dict[str, Any]:
    return stored(runs / "netlab.json", deadline.check, partial(rounds_on, 2, NETLAB_RATE))


def bytes_of_round(runs: Path, deadline: Deadline) -> Measured | NotRun:
    """What a rank sends in a round, over what averaging all gradients in each of its steps would send."""
    if reason := netlab_available():
        return NotRun(reason)
    a_round = sent(runs, deadline)
    averaged = (
        4e-6 * a_round["steps"] * sum(parameter.numel() for parameter in Separated().parameters())
    )  # two in a ring
    return Measured(a_round["mb"] / averaged, f"{a_round['mb']:.3f} MB a rank and round of {a_round['steps']} steps")


def seconds_of_round(runs: Path, deadline: Deadline) -> Measured | NotRun:
    """Seconds of a round's merge at 10 Mbit/s, over those that its bytes take at least."""
    if reason := netlab_available():
        return NotRun(reason)
    a_round = sent(runs, deadline)
    least = 8e6 * a_round["mb"] / NETLAB_BITS
    note = f"{np.median(a_round['seconds']):.2f} s a round, {a_round['mb']:.3f} MB, two hosts"
    return of_median([seconds / least for seconds in a_round["seconds"]], note)


# -- bars --------------------------------------------------------------------------------------------------------------


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    contest = Contest(runs, deadline)
    bar = partial(Bar, kind="drawn", baseline=BASELINE)
    mean = lambda differences: differences.mean(0)  # noqa: E731
    what = "federated: accuracy on a domain that no client has, above that of {}, mean of three domains"
    augmented = what.format("FedAvg with the same augmentation")
    return [
        bar("recipes.federated-works", augmented, ">=", -0.01, lambda _: contest.above(BASELINE, mean)),
        bar("recipes.federated-better", augmented, ">=", 0.03, lambda _: contest.above(BASELINE, mean)),
        bar(
            "recipes.federated-lowest",
            "federated: the same difference on the domain where it is lowest",
            ">=",
            -0.02,
            lambda _: contest.lowest(),
        ),
        *(
            bar(
                f"recipes.federated-{word}",
                what.format(method),
                ">",
                0.0,
                lambda _, method=method: contest.above(method, mean),
                baseline=method,
            )
            for word, method in (("pooled", "pooled"), ("fedavg", "FedAvg"), ("fedprox", "FedProx"))
        ),
        bar(
            "recipes.federated-domain",
            "federated: balanced accuracy of the domain by a linear probe of the global features, above chance",
            "<=",
            0.1,
            lambda _: contest.read("domain_from_features", 1 / len(DOMAINS)),
            baseline="chance",
        ),
        bar(
            "recipes.federated-class",
            "federated: balanced accuracy of the class by a linear probe of the style codes, above chance",
            "<=",
            0.1,
            lambda _: contest.read("class_from_style", 0.1),
            baseline="chance",
        ),
        Bar(
            "recipes.federated-bytes",
            "federated: bytes that a rank sends in a round, over those of averaged gradients at each of its steps",
            "<=",
            0.05,
            lambda _: bytes_of_round(runs, deadline),
            kind="exact",
        ),
        Bar(
            "recipes.federated-seconds",
            "federated: seconds of a merge of two hosts at 10 Mbit/s, over those that its bytes take at least",
            "<=",
            2.0,
            lambda _: seconds_of_round(runs, deadline),
            kind="timed",
        ),
    ]


def table(runs: Path) -> str:
    """The mean accuracies of each method over the seeds that are stored, as rows of Markdown."""
    lines = ["| method | seeds | " + " | ".join(f"{name} left out" for name in DOMAINS) + " | mean |"]
    lines.append("|---|---|" + "---|" * (len(DOMAINS) + 1))
    for method in METHODS:
        paths = {name: runs.glob(f"cell-{slug(method)}-{name}-*.json") for name in DOMAINS}
        cells = [
            [json.loads(path.read_text())[f"accuracy_{name}"] for path in stored_in]
            for name, stored_in in paths.items()
        ]
        if all(cells):
            means = [float(np.mean(values)) for values in cells]
            row = " | ".join(f"{value:.3f}" for value in (*means, float(np.mean(means))))
            lines.append(f"| {method} | {min(map(len, cells))} | {row} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "federated"))
