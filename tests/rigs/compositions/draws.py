"""Compositions of two to four features, drawn by a seed: what spreads a model over ranks, and what is done beside it.

Settings come from lists that hold usual values and degenerate ones, at which a setting turns itself off or leaves its
usual path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from shoestring import checkpoint, comm, decode, graph, memory, optim, parallel, precision, profile, sparse
from shoestring.core.feature import Feature, Seam, splits_replicas
from shoestring.report.settings import RecordsSteps

STEPS = 7
"""Steps of each run."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What ranks run."""

    seed: int
    ranks: int
    local_size: int
    model: str
    micro_batches: int
    ragged: bool
    stop: int
    """Step after which the run that is resumed is broken off."""
    features: tuple[Feature, ...]

    @property
    def readers(self) -> int:
        """Ranks that read different samples."""
        return self.ranks // 2 ** sum(map(splits_replicas, self.features))

    def __str__(self) -> str:
        named = ", ".join(f"{each}" for each in self.features)
        hosts = f"{self.ranks // self.local_size} x {self.local_size} ranks"
        loop = f"{self.micro_batches} micro-batches{', ragged' * self.ragged}, broken off after {self.stop}"
        return f"seed {self.seed}: {hosts}, {self.model}, {loop}: {named}"


Settings = dict[str, Sequence[Any]]

EXCHANGE: Settings = {
    "parts": (1, 2, 2, 2, 5),
    "channels": (1, 1, 1, 2),
    "torus": (True, True, False),
}
BUDGETED: Settings = EXCHANGE | {
    "kb_per_step": (0.0, 0.0, 0.0, 4.0, 1e6),
    "select": ("auto", "auto", "gain", "knapsack", "uniform", "hypernetwork", "per-node"),
}
CODECS: dict[type[Feature], Settings] = {
    comm.Dense: BUDGETED,
    comm.BF16: BUDGETED,
    comm.PowerSGD: BUDGETED | {"rank": (1, 4, 100), "alternate": (False, True), "start": (0, 2, 100)},
    comm.Quantize: BUDGETED
    | {
        "bits": (8, 4),
        "group_size": (2, 64, 512),
        "rounding": ("nearest", "stochastic"),
        "feedback": (True, True, False),
    },
    comm.Sign: BUDGETED | {"group_size": (2, 512)},
    comm.TernGrad: BUDGETED | {"clip_sigmas": (2.5, 1e9), "reduce_scatter": (False, True)},
    comm.TopK: BUDGETED
    | {"density": (0.01, 0.2, 1.0), "topk_method": ("exact", "sampled", "mstopk"), "per_layer": (False, True)},
    comm.RandomK: BUDGETED | {"density": (0.05, 1.0), "block_size": (1, 16, 4096), "feedback": (True, False)},
    comm.Selective: EXCHANGE | {"codec": ("dense", "powersgd(rank=2)", "sign"), "uncompressed": ((), ("blocks.0.*",))},
    comm.DGC: EXCHANGE | {"density": (0.05, 1.0), "warmup": (0, 4), "max_norm": (0.0, 1.0), "momentum": (0.9, 0.0)},
}
EXACT_CHOICE = comm.Auto(trials=1)
ROUNDED_CHOICE = comm.Auto(allow=("bf16",), worth=(1e9,), trials=1)
CHOSEN = [EXACT_CHOICE, ROUNDED_CHOICE]
"""Choices whose results do not depend on what was measured: by what route bf16 is sent changes the order of rounded
sums, so that holds of the second on two ranks only."""
LOCAL: Settings = {
    "every": (1, 2, 3, 100),
    "start": (0, 0, 2, 100),
    "fragments": (1, 1, 2),
    "delay": (0, 0, 1),
    "codec": ("fp32", "fp32", "fp32", "bf16", "4bit"),
    "replica": ("auto", "rank", "host"),
    "second_moment": ("own", "global"),
}
LOCAL_STEPS: dict[type[Feature], Settings] = {
    comm.LocalSGD: LOCAL,
    comm.DiLoCo: LOCAL | {"outer_lr": (0.7, 1.0), "outer_momentum": (0.9, 0.0), "nesterov": (True, False)},
    comm.SparseLoCo: {key: LOCAL[key] for key in ("every", "start", "replica")}
    | {"k": (64, 4096), "residual_decay": (0.95, 1.0)},
}
SPLITS: dict[type[Feature], Settings] = {
    parallel.Pipeline: {"stages": (2,), "ahead": (0, 1, 3), "schedule": ("1f1b", "gpipe")},
    parallel.Tensor: {
        "ways": (2,),
        "columns": (("blocks.*.up",),),
        "rows": (("blocks.*.down",),),
        "gathered": ((), (), ("head", "embedding")),
    },
}
ZERO: Settings = {"stage": (1, 2), "bucket_mb": (4.0, 1e-3), "in_flight_mb": (100.0, 1e-3), "master": ("fp32", "none")}

OPTIMIZERS: dict[type[Feature], Settings] = {
    optim.SGD: {"lr": (0.05,), "momentum": (0.9, 0.0), "nesterov": (True, False), "weight_decay": (0.0, 0.1)},
    optim.AdamW: {"lr": (3e-3,), "betas": ((0.9, 0.95), (0.0, 0.0)), "weight_decay": (0.0, 0.1)},
    optim.AdamW8bit: {"lr": (3e-3,)},
    optim.LARS: {
        "lr": (1.0,),
        "vector_lr": (0.05,),
        "trust_coefficient": (0.02,),
        "momentum": (0.9, 0.0),
        "ratio_clip": ("none", "larc", "dynamic"),
        "bound_warmup": (0, 3),
        "rate_in_velocity": (True, False),
        "share_norms": (True, True, False),
    },
    optim.LAMB: {"lr": (0.01,), "max_ratio": (10.0, 1.0), "share_norms": (True, True, False)},
    optim.Muon: {"lr": (0.01,), "share_steps": (True, True, False), "iterations": (1, 5), "nesterov": (True, False)},
    optim.ScheduleFree: {"lr": (0.01,), "weight_decay": (0.0, 0.1)},
}
AROUND: dict[type[Feature], Settings] = {
    optim.Clip: {"max_norm": (float("inf"), 0.5, 1e-9)},
    optim.Schedule: {"shape": ("cosine", "trapezoid", "constant"), "warmup": (0, 1, 3), "final": (0.0, 0.1)},
    optim.EMA: {"decay": (0.0, 0.5, 0.999)},
    optim.LAWA: {"count": (1, 3), "every": (1, 2, 50)},
    optim.AdaScale: {
        "scale": (0.0, 0.0, 2.0, 8.0),
        "rule": ("auto", "sgd", "adam"),
        "decay": (-1.0, 0.0, 0.9),
        "consecutive": (False, False, True),
    },
}
SPARSE: dict[type[Feature], Settings] = {
    sparse.TSRSTE: {"layers": (("blocks.*",),), "refresh": (1, 3), "calibrate": (0.0, 0.5), "tail": (0.0, 0.3)},
    sparse.SSTE: {"layers": (("blocks.*",),)},
    sparse.SRSTE: {"layers": (("blocks.*",),), "masked_decay": (0.0, 1e-3)},
    sparse.STE: {"layers": (("blocks.*",),), "mask": ("rows", "greedy"), "refresh": (1, 3)},
    sparse.AST: {"layers": (("blocks.*",),), "refresh": (1, 3), "distillation": (0.0,), "slorb": (0, 8)},
    sparse.STEP: {"layers": (("blocks.*",),), "earliest": (0.1, 0.3), "latest": (0.3, 0.5)},
}
MODEL: dict[type[Feature], Settings] = {
    memory.LoRA: {
        "rank": (1, 4),
        "dora": (False, True),
        "base_bits": (0, 0, 16, 8, 4),
        "modules_to_train": ((), ("norm",)),
    },
    memory.Recompute: {"every_nth": (1, 2), "blocks": (0, 1)},
    memory.OffloadActivations: {"min_mb": (0.0, 1.0)},
    memory.ChunkedLoss: {"tokens": (1, 5, 1024)},
    precision.Autocast: {"dtype": ("bf16", "fp16")},
    decode.Distill: {
        "teacher": ("shoestring.testing.jobs:tiny",),
        "fraction": (0.0, 0.4, 1.0),
        "objective": ("kl", "reverse_kl"),
        "temperature": (1.0, 4.0),
    },
}
BESIDE: dict[type[Feature], Settings] = {
    checkpoint.Tiered: {"memory_every": (1, "auto"), "overlap": (True, False), "redundancy": ("copy", "parity")},
    memory.Tracing: {"after": (0, 2), "steps": (1,)},
    profile.CallPaths: {"after": (1,), "steps": (2,)},
    memory.Broker: {},
}
"""What should change nothing of the results."""


def draw(seed: int, split: type[Feature] | None = None) -> Composition:
    """The composition of a seed: of replicas, or of a model split in two, beside replicas where ranks are left."""
    random = Random(seed)
    ranks = random.choice((2, 4))
    local_size = random.choice((1, ranks, ranks, 2) if split is not parallel.Tensor else (ranks, 2))
    features: list[Feature] = [
        EXACT_CHOICE if ranks > 2 and feature is ROUNDED_CHOICE else feature
        for feature in (_spread(random) if split is None or ranks > 2 else [])
    ]
    if split is not None:
        features.insert(random.randint(0, len(features)), _drawn(random, split, SPLITS[split]))
    others = 1 if len(features) >= 3 else random.randint(1, 4 - len(features))
    pools: list[tuple[dict[type[Feature], Settings], float]] = [
        (OPTIMIZERS, 5),
        (AROUND, 6),
        (SPARSE, 2),
        (MODEL, 3),
        (BESIDE, 1),
    ]
    while others:
        pool = random.choices([each for each, _ in pools], [weight for _, weight in pools])[0]
        feature = _of(random, pool)
        kinds = {type(each) for each in features}
        if type(feature) in kinds or (pool is not AROUND and kinds & pool.keys()):
            continue
        features.append(feature)
        others -= 1
    if random.random() < 0.04:
        features[-1] = graph.Compile(backend="eager")
    random.shuffle(features)
    features.sort(key=_place)
    model = "tiny" if split is not None else random.choice(("tiny", "tiny", "odd", "buffers"))
    if model == "odd":  # with what a step does not use
        features = [replace(each, find_unused=True) if isinstance(each, parallel.DDP) else each for each in features]
    return Composition(
        seed=seed,
        ranks=ranks,
        local_size=local_size,
        model=model,
        micro_batches=random.choice((1, 2, 4) if split is parallel.Pipeline else (1, 1, 2)),
        ragged=random.random() < 0.5,
        stop=random.randint(1, STEPS - 1),
        features=tuple(features),
    )


def _spread(random: Random) -> list[Feature]:
    """What keeps ranks' models equal, merges them, or divides them: one feature or two."""
    ways: list[Callable[[], list[Feature]]] = [
        lambda: [_ddp(random)],
        lambda: [_fsdp(random)],
        lambda: [_fsdp(random)],
        lambda: [_drawn(random, memory.Zero, ZERO | {"hosts": ("shard", "replicate")})],
        lambda: [_drawn(random, memory.Offload, ZERO | {"hosts": ("shard",), "late": (0.0, 0.0, 0.3, 1.0)})],
        lambda: [_ddp(random), _of(random, CODECS)],
        lambda: [_of(random, CODECS)],
        lambda: [_of(random, LOCAL_STEPS)],
        lambda: [_leaving(random), _of(random, LOCAL_STEPS)],
        lambda: [_leaving(random), _of(random, CODECS)],
        lambda: [_ddp(random), random.choice(CHOSEN)],
    ]
    return random.choice(ways)()


def _ddp(random: Random) -> Feature:
    return _drawn(random, parallel.DDP, {"bucket_mb": (25.0, 1e-3), "find_unused": (True, True, False)})


def _fsdp(random: Random) -> Feature:
    settings: Settings = {"hosts": ("shard", "replicate"), "reshard_after_forward": (True, False)}
    return _drawn(random, parallel.FSDP, settings)


def _leaving(random: Random) -> Feature:
    """What leaves the axis of hosts to another feature."""
    kind = random.choice((parallel.DDP, parallel.FSDP, memory.Zero))
    return kind(hosts="leave")


def _of(random: Random, pool: dict[type[Feature], Settings]) -> Feature:
    kind = random.choice(list(pool))
    return _drawn(random, kind, pool[kind])


def _drawn(random: Random, kind: type[Feature], settings: Settings) -> Feature:
    """Each setting is drawn with probability one half, and else its default; what must be given is drawn."""
    needed = {
        "lr",
        "vector_lr",
        "trust_coefficient",
        "layers",
        "find_unused",
        "every",
        "every_nth",
        "warmup",
        "teacher",
        "stages",
        "ways",
        "columns",
        "rows",
    }
    needed |= {"after", "steps"} if issubclass(kind, RecordsSteps) else set()
    chosen = {
        name: random.choice(values) for name, values in settings.items() if name in needed or random.random() < 0.5
    }
    if chosen.get("kb_per_step", 0.0) == 0.0:
        chosen.pop("select", None)
    if transport := {name: chosen.pop(name) for name in BUDGETED if name in chosen}:
        chosen["transport"] = comm.Transport(**transport)
    return kind(**chosen)


def _place(feature: Feature) -> int:
    """In a run file, tables are in the order of areas; here only what must wrap the model comes first."""
    return 0 if Seam.SHARD in feature.seams else 1
