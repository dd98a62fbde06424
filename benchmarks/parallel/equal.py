"""Pipelines and split layers beside one process, in fp64: after five steps, and after resuming."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Deadline
from benchmarks.models import zoo
from benchmarks.rows import Measured
from shoestring.testing.pool import Pool
from tests.rigs import families, pipelines

CLOSE = 1e-10
MODELS = ("tied", "untied", "grouped", "llama", "tied llama", "qwen3", "gpt2", "vit", "frozen")
WHOLE = ("frozen",)
"""Models whose layers are not split: with frozen weights that is refused."""
WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "2 stages": (2, {"pipeline": {}}),
    "4 stages": (4, {"pipeline": {}}),
    "2 stages, 2 parts each": (2, {"pipeline": {"chunks": 2}}),
    "2 stages beside DDP": (4, {"pipeline": {"stages": 2}, "over": "ddp"}),
    "2 stages beside ZeRO 1": (4, {"pipeline": {"stages": 2}, "over": "zero 1"}),
    "2 stages beside ZeRO 2": (4, {"pipeline": {"stages": 2}, "over": "zero"}),
    "2 stages beside an exchange": (4, {"pipeline": {"stages": 2}, "over": "dense"}),
    "layers split in 2": (2, {"tensor": {}}),
    "layers split in 2, the vocabulary whole": (2, {"tensor": {"vocabulary_layers": "whole"}}),
    "layers split in 2 beside DDP": (4, {"tensor": {"ways": 2}, "over": "ddp"}),
    "layers split in 2 beside an exchange": (4, {"tensor": {"ways": 2}, "over": "dense"}),
    "2 stages of layers split in 2": (4, {"pipeline": {"stages": 2}, "tensor": {"ways": 2}}),
}
"""Ranks and arguments of each way to train."""
PAIRS = 20


def worst(results: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]) -> float:
    """The largest difference of a loss, norm, held-out loss, or sum over a weight, of all ranks from one process."""
    weights = dict[str, list[float]]()
    off = [0.0]
    for result in results:
        weights |= result["weights"]
        begun = result["began"] or 0
        for name, start in (("losses", begun), ("norms", begun), ("held out", 0)):
            off += [abs(one - other) for one, other in zip(result[name], wanted[name][start:], strict=True)]
    if weights.keys() != wanted["weights"].keys():
        return float("inf")
    off += [
        abs(one - other) for name in weights for one, other in zip(weights[name], wanted["weights"][name], strict=True)
    ]
    return max(off)


@cache
def alone(model: str, micro: int) -> Mapping[str, Any]:
    """What one process trains, with clipping."""
    return pipelines.train(model=model, micro=micro, beside="clip")


def equal(deadline: Deadline) -> Measured:
    """The largest difference over all models and ways, with clipping, four ragged micro-batches, ignored targets."""
    off = dict[str, float]()
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four:
        for model, (way, (ranks, arguments)) in product(MODELS, WAYS.items()):
            deadline.check()
            if "tensor" in arguments and model in WHOLE:
                continue
            results = (two if ranks == 2 else four).call(pipelines.train, model=model, beside="clip", **arguments)
            off[f"{model}, {way}"] = worst(results, alone(model, 4))
    return Measured(max(off.values()), f"{len(off)} cases; the worst: {max(off, key=off.__getitem__)}")


def drawn(draw: random.Random, model: str) -> tuple[int, dict[str, Any]]:
    """A number of ranks, and a split of the model over them."""
    ranks = draw.choice([1, 2, 4])
    if ranks > 1 and model not in WHOLE and draw.random() < 0.5:
        beside = {"pipeline": {"stages": 2}} if ranks == 4 and draw.random() < 0.5 else {}
        vocabulary = draw.choice(["split", "whole"])
        return ranks, {
            "tensor": {"ways": 2, "vocabulary_layers": vocabulary},
            **beside,
            "over": draw.choice(["ddp", "dense"]),
        }
    stages = draw.choice([count for count in (1, 2, 4) if count <= ranks])
    over = draw.choice(["ddp", "zero", "zero 1", "dense"])
    if stages == 1:
        return ranks, {"over": over}
    chunks = draw.choice([1, 2]) if stages == 2 and over != "ddp" else 1
    return ranks, {"over": over, "pipeline": {"stages": stages, "chunks": chunks}}


def resumed(deadline: Deadline) -> Measured:
    """The largest difference over pairs of splits: one trains three steps, and another resumes."""
    draw, off, told = random.Random(0), [], []
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four, tempfile.TemporaryDirectory() as folder:
        for _ in range(PAIRS):
            deadline.check()
            model, micro = draw.choice(MODELS), draw.choice([1, 2, 4])
            before = after = drawn(draw, model)
            while after == before:
                after = drawn(draw, model)
            for (ranks, split), others in ((before, {"stop": 3}), (after, {"resume": True})):
                given: dict[str, Any] = {
                    "model": model,
                    "micro": micro,
                    "beside": "clip",
                    "folder": folder,
                    **split,
                    **others,
                }
                pool = {1: None, 2: two, 4: four}[ranks]
                results = [pipelines.train(**given)] if pool is None else pool.call(pipelines.train, **given)
                shutil.rmtree(Path(folder) / "memory", ignore_errors=True)
            off.append(worst(results, alone(model, micro)))
            told.append(f"{before[0]} to {after[0]} ranks")
            shutil.rmtree(Path(folder) / "checkpoints")
    return Measured(max(off), f"{PAIRS} drawn pairs, the worst {told[off.index(max(off))]}")


def same_split(deadline: Deadline) -> Measured:
    """The number of splits that resume with other bits than those of a run that is not interrupted."""
    different = []
    ways: list[dict[str, Any]] = [
        *({"pipeline": {"stages": 2}, "over": over} for over in ("ddp", "zero", "dense")),
        {"tensor": {"ways": 2}, "over": "ddp"},
        {"tensor": {"ways": 2}, "pipeline": {"stages": 2}},
    ]
    cases = [(way, model) for way, model in product(ways, MODELS) if "tensor" not in way or model not in WHOLE]
    with Pool(4, timeout=120) as pool:
        for way, model in cases:
            deadline.check()
            given: dict[str, Any] = {"model": model, **way}
            with tempfile.TemporaryDirectory() as folder:
                whole = pool.call(pipelines.train, **given)
                pool.call(pipelines.train, folder=folder, stop=3, **given)
                rest = pool.call(pipelines.train, folder=folder, resume=True, **given)
            same = all(
                one["losses"][3:] == other["losses"] and one["weights"] == other["weights"]
                for one, other in zip(whole, rest, strict=True)
            )
            different += [] if same else [f"{model}, {way}"]
    return Measured(len(different), f"of {len(cases)}: {different or 'none'}")


def families_split(deadline: Deadline) -> Measured:
    """The number of families of transformers that train otherwise with their layers split, and are not refused."""
    kinds = dict[str, str]()
    with Pool(2, timeout=120) as two:
        for name in sorted(set(zoo.CASES) - set(zoo.missing()) - {"xglm"}):  # which overflows in double precision
            deadline.check()
            kinds[name] = families.kind(two, name)
    wrong = [f"{name}: {kind}" for name, kind in kinds.items() if kind not in ("equal", "refused")]
    equal = [*kinds.values()].count("equal")
    return Measured(
        len(wrong), f"of {len(kinds)}: {equal} equal, the others refused{'; ' if wrong else ''}{wrong or ''}"
    )


def rows() -> list[Bar]:
    """The bars of equality."""
    names = ", ".join(MODELS)
    what = (
        "largest difference of pipelines and split layers from one process after five clipped steps in fp64 "
        f"({names}; {len(WAYS)} ways)"
    )
    drawn_pairs = f"largest difference from one process of {PAIRS} drawn pairs of splits over 1, 2 and 4 ranks, resumed"
    others = "cases of transformers' models that train otherwise with their layers split, and are not refused"
    bits = "splits that resume with other bits than an uninterrupted run of the same split"
    return [
        Bar("parallel.equal", what, "<=", CLOSE, equal, kind="exact"),
        Bar("parallel.families", others, "<=", 0, families_split, kind="exact"),
        Bar("parallel.resumed", drawn_pairs, "<=", CLOSE, resumed, kind="exact"),
        Bar("parallel.resumed-same", bits, "<=", 0, same_split, kind="exact"),
    ]
