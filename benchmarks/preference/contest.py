"""Trainings beside TRL's: reward accuracy with the same settings, time and memory, a known preference, and resuming."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.numpy import load_file

from benchmarks.harness import Bar, Deadline, Measured, NotRun, stored
from benchmarks.intervals import of_mean, of_median, of_share
from benchmarks.preference import contestant, peer
from benchmarks.preference.contestant import Task
from benchmarks.preference.generator import Language, Shape, build_base, write
from benchmarks.preference.judge import encoded, judge
from benchmarks.timing import FEWEST_ROUNDS, run_command, was_calm

HELD = 2
"""Rounds in which TRL holds activations, to be noted."""
KL_BOUND = 0.5
"""Most nats a token by which the tuned model may differ from its reference on held-out answers."""
KNOWN: dict[str, Any] = {"rate": 1e-3, "beta": 1.0, "epochs": 1}
"""Settings of the trainings on a known preference."""


SFT = "TRL's SFTTrainer with PEFT, gradient checkpointing (its default), losses of answers alone, on the same chats"
CHATS = 2
"""Chats to learn for each pair to learn: a pair has two answers, so both take about as long."""


@dataclass(frozen=True)
class Plan:
    """Sizes of everything; those of a trial take minutes."""

    language: Language = field(default_factory=Language)
    """What is learnt; pairs are of about one length, so that a sample holds one of them."""
    even: Language = field(default_factory=lambda: Language(words=3000, prompt=(30, 32), answer=(38, 40)))
    """What is timed without packing, for the same reason."""
    mixed: Language = field(default_factory=lambda: Language(words=3000, prompt=(10, 60), answer=(5, 80)))
    """What is timed with packing."""
    shape: Shape = field(default_factory=Shape)
    large: Shape = field(default_factory=lambda: Shape(hidden=512, layers=8, steps=0))
    """The model that is timed."""
    pairs: int = 2000
    """Pairs to train on, beside TRL."""
    held_out: int = 1000
    known: int = 5000
    """Pairs of the generator with a known preference, of which a tenth is held out."""
    timed: int = 96
    rounds: int = FEWEST_ROUNDS
    seeds: int = 3
    epochs: int = 2
    kills: int = 6


TRIAL = Plan(
    shape=Shape(64, 2, 20), large=Shape(64, 2, 0), pairs=64, held_out=64, known=120, timed=16, rounds=2, seeds=2,
    epochs=1, kills=1,
)  # fmt: skip


class Contest:
    """All trainings, each made once and stored.

    Args:
        runs: folder of what they gave; models and adapters lie in `.cache` beside the repository's other caches.
        check: raises OutOfBudget when the time is up.
    """

    def __init__(self, runs: Path, check: Callable[[], None], plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self.runs, self.check = runs, check
        self.digest = self._digest()
        self.work = Path(".cache/preference").absolute() / self.digest

    # -- what is trained -----------------------------------------------------------------------------------------------

    def base(self, language: Language, shape: Shape) -> str:
        """The folder of the base model, built where it is not there."""
        name = hashlib.sha256(json.dumps([asdict(language), asdict(shape)]).encode()).hexdigest()[:8]
        folder = self.work / f"base-{name}"
        if not (folder / "done").exists():
            self.check()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            build_base(folder, language, shape)
            (folder / "done").touch()
        return str(folder)

    def _digest(self, *settings: Mapping[str, Any]) -> str:
        """What trainings are stored under: another plan, or other settings, give other names."""
        described = [asdict(self.plan), *settings] if settings else asdict(self.plan)
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]

    def seeds(self, *settings: Mapping[str, Any]) -> list[int]:
        """Seeds that were drawn after everything else was fixed: another plan, or other settings, draw others."""
        draw = lambda: {"seeds": [secrets.randbelow(2**31) for _ in range(self.plan.seeds)]}  # noqa: E731
        return stored(self.runs / f"seeds-{self._digest(*settings)}.json", self.check, draw)["seeds"]

    def task(self, library: Any, seed: int, folder: Path) -> Task:
        """The training of one seed with a pair in each sample."""
        language = self.plan.language
        records = language.pairs(self.plan.pairs + 1, 1)
        folder.mkdir(parents=True, exist_ok=True)
        return Task(
            library, self.base(language, self.plan.shape), write(folder / "pairs.jsonl", records), str(folder / "run"),
            batch=16, micro=8, sequence=self.sequence(records, language, 1), packed=False,
            epochs=self.plan.epochs, seed=seed,
        )  # fmt: skip

    @staticmethod
    def sequence(records: Sequence[Mapping[str, Any]], language: Language, pairs: int) -> int:
        """Tokens of a sample that any pair or chat fits into, and that holds so many on average, or exactly one.

        Raises:
            AssertionError: it should hold one, and would hold two of the shortest.
        """
        engine = language.tokenizer().engine
        sizes = [_size(engine, record) for record in records]
        assert pairs > 1 or 2 * min(sizes) > max(sizes), (min(sizes), max(sizes))
        return max(sizes) if pairs == 1 else max(*sizes, round(pairs * statistics.fmean(sizes)))

    # -- reward accuracy beside TRL ------------------------------------------------------------------------------------

    def accuracy(self, library: str, seed: int) -> float:
        """Share of held-out pairs whose chosen answer is ahead after a training, by the same judge for both."""

        def make() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                task = self.task(library, seed, Path(folder))
                answer = contestant.run(task)
                judged = judge(task.base, answer["adapter"], self.plan.language.pairs(self.plan.held_out, 2))
                return {"accuracy": judged, "steps": answer["steps"], "seconds": answer["seconds"]}

        path = self.runs / f"accuracy-{self.digest}-{library}-{seed}.json"
        return stored(path, self.check, make)["accuracy"]

    def beside(self) -> Measured:
        """The difference of the mean accuracies, without its sign, with the interval by Welch's test."""
        from scipy import stats

        seeds = self.seeds()
        ours, theirs = ([self.accuracy(library, seed) for seed in seeds] for library in ("shoestring", "trl"))
        difference = statistics.fmean(ours) - statistics.fmean(theirs)
        low = high = difference
        if statistics.pstdev(ours) or statistics.pstdev(theirs):
            interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
            low, high = float(interval[0]), float(interval[1])
        said = "; ".join(
            f"{name} {', '.join(f'{value:.3f}' for value in values)}"
            for name, values in (("ours", ours), ("TRL", theirs))
        )
        best = self.plan.language.best_accuracy(self.plan.language.pairs(self.plan.held_out, 2))
        note = f"{said}; difference {low:.4f} to {high:.4f}; knowing the generator gives {best:.3f}; seeds {seeds}"
        return Measured(abs(difference), note, (max(0.0, low, -high), max(abs(low), abs(high))))

    # -- time and memory -----------------------------------------------------------------------------------------------

    def timed(self, kind: str, library: str, round_: int, *, recompute: bool) -> dict[str, Any]:
        """One timed training: `even` pairs, one in each sample, or `mixed` ones, which ours packs; `chats-even` and
        `chats-mixed` likewise learn the answers of chats."""
        objective, lengths = "chat" if kind.startswith("chats-") else "dpo", kind.removeprefix("chats-")
        language = getattr(self.plan, lengths)

        def make() -> dict[str, Any]:
            while True:
                with tempfile.TemporaryDirectory() as folder:
                    records = language.pairs(self.plan.timed + 1, 3)
                    if objective == "chat":
                        records = as_chats(language.pairs(CHATS * self.plan.timed + 1, 3))
                    base, data = self.base(language, self.plan.large), write(Path(folder) / "pairs.jsonl", records)
                    micro = 1 if lengths == "even" else 4
                    task = Task(
                        library,  # pyrefly: ignore[bad-argument-type]
                        base, data, str(Path(folder) / "run"), batch=8, micro=micro,
                        sequence=self.sequence(records, language, micro), packed=lengths == "mixed", seed=round_,
                        recompute=recompute, objective=objective,
                    )  # fmt: skip
                    answer = contestant.run(task)
                if was_calm():
                    return {name: value for name, value in answer.items() if name != "adapter"}

        how = "recomputing" if recompute else "holding"
        return stored(self.runs / f"timed-{self.digest}-{kind}-{library}-{how}-{round_}.json", self.check, make)

    def ratio(self, kind: str, what: str) -> Measured:
        """The median over rounds of ours over TRL's, of alternating runs.

        TRL recomputes activations, as is its default; ours holds them, and must not take more memory for that. What TRL
        takes if it holds them too is noted.
        """
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(self.plan.rounds):
            order = ("shoestring", "trl") if number % 2 == 0 else ("trl", "shoestring")
            rounds.append({name: self.timed(kind, name, number, recompute=name == "trl") for name in order})
        ratios = [pair["shoestring"][what] / pair["trl"][what] for pair in rounds]
        held = [self.timed(kind, "trl", number, recompute=False) for number in range(min(HELD, self.plan.rounds))]
        note = "; ".join(_described(library, [pair[library] for pair in rounds]) for library in ("shoestring", "trl"))
        note += f"; holding activations too, in {len(held)} rounds, {_described('trl', held)}"
        if len(ratios) < FEWEST_ROUNDS:
            return Measured(statistics.median(ratios), f"{note}; a trial of {len(ratios)} rounds")
        return of_median(ratios, f"medians of {len(rounds)} rounds: {note}")

    # -- a known preference --------------------------------------------------------------------------------------------

    def known(self, seed: int) -> list[dict[str, Any]]:
        """The evaluations of a training on pairs of the generator."""

        def make() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                language, records = self.plan.language, self.plan.language.pairs(self.plan.known, 4)
                task = Task(
                    "shoestring", self.base(language, self.plan.shape), write(Path(folder) / "pairs.jsonl", records),
                    str(Path(folder) / "run"), batch=16, micro=8,
                    sequence=self.sequence(records, language, 1), packed=False, seed=seed, held_out=0.1,
                    evaluate_every=max(1, self.plan.known // 200), **KNOWN,
                )  # fmt: skip
                return {"evaluations": contestant.run(task)["evaluations"]}

        return stored(self.runs / f"known-{self._digest(KNOWN)}-{seed}.json", self.check, make)["evaluations"]

    def learned(self) -> Measured:
        """The lowest held-out accuracy over seeds, with the interval of a share of the held-out pairs."""
        runs = [self.known(seed) for seed in self.seeds(KNOWN)]
        firsts, lasts = ([run[place]["held_out_reward_accuracy"] for run in runs] for place in (0, -1))
        count = round(0.1 * self.plan.known)
        records = self.plan.language.pairs(self.plan.known, 4)
        said = ", ".join(f"{first:.3f} to {last:.3f}" for first, last in zip(firsts, lasts, strict=True))
        best = self.plan.language.best_accuracy(records)
        note = f"from the first evaluation to the last: {said}; knowing the generator gives {best:.3f}"
        return of_share(round(min(lasts) * count), count, note)

    def moved(self) -> Measured:
        """The largest divergence of any evaluation; the interval is over seeds."""
        most = [max(row["held_out_kl_per_token"] for row in self.known(seed)) for seed in self.seeds(KNOWN)]
        last = ", ".join(f"{self.known(seed)[-1]['held_out_kl_per_token']:.3f}" for seed in self.seeds(KNOWN))
        return of_mean(
            most, f"largest of a run's evaluations {', '.join(f'{value:.3f}' for value in most)}; last {last}"
        )

    # -- resuming ------------------------------------------------------------------------------------------------------

    def resumed(self) -> Measured:
        """Kills after which the finished run is not bitwise the run that was not killed."""

        def make() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder)
                task = replace(self.task("shoestring", 0, work), batch=8, micro=4, epochs=2, evaluate_every=5)
                records = self.plan.language.pairs(min(self.plan.pairs, 160), 5)
                task = replace(task, data=write(work / "few.jsonl", records), held_out=0.1)
                expected = self._finished(task, work / "through", 0)
                steps = 2 * len(records) // 8
                drawn = random.Random(0)
                kills = [drawn.randrange(1, steps) for _ in range(self.plan.kills)]
                different = [kill for kill in kills if self._finished(task, work / f"killed-{kill}", kill) != expected]
                return {"kills": kills, "different": different, "files": len(expected) - 1}

        answer = stored(self.runs / f"resumed-{self.digest}.json", self.check, make)
        note = f"killed after {', '.join(map(str, answer['kills']))} lines of metrics; {answer['files']} tensors"
        return Measured(len(answer["different"]), note)

    def _finished(self, task: Task, folder: Path, kill: int) -> dict[str, Any]:
        """The weights and the metrics of a run, killed once unless `kill` is 0, and resumed."""
        document = contestant.document(replace(task, folder=str(folder)))
        document["run"]["resume"] = "auto"
        document["checkpoint"] = {"plain": {"every": 3}}
        file = folder.with_suffix(".toml")
        file.write_text(tomli_w.dumps(document))
        if kill:
            contestant.killed_run(str(file), kill)
        run_command(contestant.command(str(file)), env=os.environ | {"PYTHONPATH": contestant.path()})
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        exact = {
            (row["step"], name, value)
            for row in rows
            for name, value in row.items()
            if "loss" in name or "reward" in name or "kl" in name
        }
        # The bytes of the tensors: safetensors writes the entries of a file's metadata in an order of its own.
        weights = {
            f"{path.relative_to(folder)}: {name}": hashlib.sha256(tensor.tobytes()).hexdigest()
            for path in (folder / "model").rglob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        return {**weights, "metrics": sorted(exact)}


def _size(engine: Any, record: Mapping[str, Any]) -> int:
    """Tokens of a chat, or of a pair, whose answers share their prompt, but for its last token."""
    if "messages" in record:
        prompt, answer = record["messages"]
        return len(encoded(engine, {"prompt": [prompt], "chosen": [answer], "rejected": [answer]})[0][1])
    pair = encoded(engine, record)
    return sum(len(tokens) for _, tokens in pair) - (pair[0][0] - 1)


def as_chats(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chats of a question and the answer that was chosen."""
    return [{"messages": [*record["prompt"], *record["chosen"]]} for record in records]


def _described(library: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """Medians of what trainings took."""
    seconds, began, ended, peak, imported, steps = (
        statistics.median(answer[key] for answer in answers)
        for key in ("seconds", "began", "ended", "peak", "imported", "steps")
    )
    return (
        f"{'ours' if library == 'shoestring' else 'TRL'}: {seconds:.1f} s, of which imports {began:.1f} s, and "
        f"{ended:.1f} s to the end of the process; {peak / 2**20:.0f} MiB at most and {imported / 2**20:.0f} MiB after "
        f"imports, {steps:.0f} steps"
    )


# -- the bars ----------------------------------------------------------------------------------------------------------


def rows(contest: Callable[[], Contest]) -> list[Bar]:
    """The bars of trainings."""

    def beside(measure: Callable[[Contest], Measured], _: Deadline) -> Measured | NotRun:
        return peer.missing() or measure(contest())

    def alone(measure: Callable[[Contest], Measured], _: Deadline) -> Measured:
        return measure(contest())

    def ratio(kind: str, what: str) -> Callable[[Contest], Measured]:
        return lambda contest: contest.ratio(kind, what)

    even = "answers of one length, one pair a micro-batch, and ours reads a prompt once and holds activations"
    mixed = "answers of 5 to 80 words, four pairs a micro-batch, packed by ours, which holds activations"
    one = "chats of one length, one a micro-batch, and ours holds activations"
    several = "chats with answers of 5 to 80 words, four a micro-batch, packed by ours, which holds activations"
    settings = "TRL with PEFT, precomputed references and gradient checkpointing (its default), on the same pairs"
    tasks: list[tuple[str, str, float, str]] = [
        ("memory", f"peak memory of the process over TRL's: {even}", 1.0, "even peak"),
        ("time", f"seconds from the start of the process to the adapter over TRL's: {even}", 0.8, "even seconds"),
        ("memory-packed", f"peak memory of the process over TRL's: {mixed}", 1.0, "mixed peak"),
        (
            "time-packed",
            f"seconds from the start of the process to the adapter over TRL's: {mixed}",
            0.8,
            "mixed seconds",
        ),
        ("chats-memory", f"peak memory of the process over TRL's: {one}", 1.0, "chats-even peak"),
        (
            "chats-time",
            f"seconds from the start of the process to the adapter over TRL's: {one}",
            0.8,
            "chats-even seconds",
        ),
        ("chats-memory-packed", f"peak memory of the process over TRL's: {several}", 1.0, "chats-mixed peak"),
        (
            "chats-time-packed",
            f"seconds from the start of the process to the adapter over TRL's: {several}",
            0.8,
            "chats-mixed seconds",
        ),
    ]
    return [
        Bar(
            "preference.accuracy",
            "difference of held-out reward accuracy to TRL's with the same settings and 2,000 pairs, three seeds", "<=",
            0.02, partial(beside, Contest.beside), baseline="TRL with PEFT", peers=peer.PEERS, kind="drawn",
        ),
        *(
            Bar(
                f"preference.{name}", what, "<=", limit, partial(beside, ratio(*how.split())),
                baseline=SFT if name.startswith("chats-") else settings, peers=peer.PEERS,
            )
            for name, what, limit, how in tasks
        ),
        Bar(
            "preference.known", "held-out reward accuracy on 5,000 pairs of a known preference, lowest of three seeds",
            ">=", 0.65, partial(alone, Contest.learned), baseline="0.5 before training", peers=("transformers",),
            kind="drawn",
        ),
        Bar(
            "preference.kl", "KL divergence from the reference on held-out answers in those trainings, nats a token",
            "<=", KL_BOUND, partial(alone, Contest.moved), peers=("transformers",), kind="drawn",
        ),
        Bar(
            "preference.resumed", "killed and resumed runs that are not bitwise the run that was not killed", "<=", 0,
            partial(alone, Contest.resumed), peers=("transformers",), kind="exact",
        ),
    ]  # fmt: skip
