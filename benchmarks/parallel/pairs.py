"""Pairs of a run and a cluster, each with plans written by hand, against which the planner is measured.

The plans were written before the planner was run on any of the pairs. All of them compute the result of one process,
but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tables = Mapping[str, Any]

_MODELS = "benchmarks.parallel.models"
_RECOMPUTE: Tables = {"memory": {"recompute": {}}}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run on a cluster, and the plans that somebody would write by hand for it."""

    name: str
    run: Tables
    """Tables of the run file, without those of `parallel` and `memory`."""
    hosts: int
    ranks: int
    """Number of ranks of each host."""
    rate: str
    """Bandwidth of each host's link, in each direction."""
    measured: bool
    """Whether steps are measured on virtual hosts; otherwise they are only simulated."""
    gib: float = 0.0
    """Limit of the memory of a rank in GiB; 0 for none."""
    plans: Mapping[str, Tables]
    """Maps the name of each plan to the tables that it adds to the run file."""

    def document(self, plan: str) -> dict[str, Any]:
        """The content of the run file of a plan."""
        return merged(self.run, self.plans[plan])


def merged(*documents: Tables) -> dict[str, Any]:
    """Merge tables of run files; the later values replace the earlier ones."""
    result = dict[str, Any]()
    for document in documents:
        for key, value in document.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key, {}), Mapping)
            result[key] = merged(result.get(key, {}), value) if both else value
    return result


# -- tables of plans --------------------------------------------------------------------------------------------------


def _micro(count: int) -> Tables:
    return {"run": {"accumulate": count}}


def _ddp(**settings: Any) -> Tables:
    return {"parallel": {"ddp": settings}}


def _fsdp(**settings: Any) -> Tables:
    return {"parallel": {"fsdp": settings}}


def _zero(stage: int, **settings: Any) -> Tables:
    return {"memory": {"zero": {"stage": stage, **settings}}}


def _pipeline(micro: int, **settings: Any) -> Tables:
    return merged(_micro(micro), {"parallel": {"pipeline": settings}})


def _split(**settings: Any) -> Tables:
    return {"parallel": {"tensor": {"ways": 2, **settings}}}


# -- tables of runs ---------------------------------------------------------------------------------------------------


def _run(model: str, data: str, batch: int, arguments: Tables, data_arguments: Tables) -> Tables:
    return {
        "run": {"model": model, "data": f"{_MODELS}:{data}", "batch": batch, "steps": 100},
        "model": arguments,
        "data": {"arguments": data_arguments},
    }


def _gpt(batch: int, length: int, vocabulary: int, **shape: Any) -> Tables:
    """A run of the built-in GPT; its embeddings are tied to the output layer unless `shape` says otherwise."""
    arguments = {"vocab_size": vocabulary, "context": length, **shape}
    data = {"length": length, "vocabulary": vocabulary}
    return _run("shoestring.models.gpt:tiny", "token_data", batch, arguments, data)


def _wide_resnet(batch: int, depth: int, widen: int) -> Tables:
    return _run(f"{_MODELS}:wide_resnet", "image_data", batch, {"depth": depth, "widen": widen}, {"size": 32})


def _vit(batch: int, width: int, layers: int, heads: int) -> Tables:
    shape = {"size": 64, "patch": 8, "width": width, "layers": layers, "heads": heads, "classes": 100}
    return _run(f"{_MODELS}:vit", "image_data", batch, shape, {"size": 64, "classes": 100})


_MINI = {"dim": 256, "layers": 8, "heads": 8, "kv_heads": 8, "hidden": 704}

PAIRS: tuple[Pair, ...] = (
    # -- measured -----------------------------------------------------------------------------------------------------
    Pair(  # 1.5 M weights: DDP sends 5.9 MB a step each way, and a boundary between stages 0.5 MB
        name="gpt tied, 2x1, 20mbit",
        run=_gpt(16, 64, 2048, dim=128, layers=6, heads=4, kv_heads=4, hidden=352),
        hosts=2,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 1 MB": _ddp(bucket_mb=1.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "pipeline, 4 micro-batches": _pipeline(4),
            "pipeline, 8 micro-batches": _pipeline(8),
            "pipeline, 16 micro-batches": _pipeline(16),
            "pipeline, 8 micro-batches, tied gradients": _pipeline(8, embeddings="first"),
            "interleaved, 8 micro-batches": _pipeline(8, chunks=2),
        },
    ),
    Pair(  # 1.1 M weights: a ring of four sends 6.5 MB a step and host
        name="gpt untied, 4x1, 20mbit",
        run=_gpt(16, 64, 1024, dim=96, layers=8, heads=4, kv_heads=4, hidden=256, tied=False),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 1 MB": _ddp(bucket_mb=1.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "4 stages, 8 micro-batches": _pipeline(8, stages=4),
            "4 stages, 16 micro-batches": _pipeline(16, stages=4),
            "4 stages, 8 micro-batches, 2 ahead": _pipeline(8, stages=4, ahead=2),
            "4 stages, interleaved, 16 micro-batches": _pipeline(16, stages=4, chunks=2),
            "2 stages beside ddp, 8 micro-batches": merged(_ddp(), _pipeline(8, stages=2)),
        },
    ),
    Pair(  # 6.2 M weights in six blocks of about equal work; the middle boundary is the narrowest balanced one
        name="wide resnet, 2x1, 100mbit",
        run=_wide_resnet(16, depth=16, widen=6),
        hosts=2,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 4 MB": _ddp(bucket_mb=4.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "pipeline, 8 micro-batches": _pipeline(8),
            "pipeline, 8 micro-batches, three blocks each": _pipeline(8, cuts=[3]),
            "pipeline, 16 micro-batches, three blocks each": _pipeline(16, cuts=[3]),
            "gpipe, 8 micro-batches, three blocks each": _pipeline(8, cuts=[3], schedule="gpipe"),
        },
    ),
    Pair(  # 2.7 M weights
        name="vit, 2x2, 100mbit",
        run=_vit(32, width=192, layers=6, heads=4),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 2 MB": _ddp(bucket_mb=2.0),
            "zero 1": _zero(1),
            "zero 1 inside hosts": _zero(1, hosts="replicate"),
            "fsdp": _fsdp(),
            "fsdp inside hosts": _fsdp(hosts="replicate"),
            "split layers beside ddp": merged(_split(), _ddp()),
            "pipeline beside ddp, 4 micro-batches": merged(_ddp(), _pipeline(4, stages=2)),
            "pipeline beside ddp, 8 micro-batches": merged(_ddp(), _pipeline(8, stages=2)),
            "pipeline of split layers, 8 micro-batches": merged(_split(), _pipeline(8, stages=2)),
        },
    ),
    Pair(  # 4.8 M weights, of which 4 M are those of the table, and hardly any arithmetic
        name="table of 250,000 rows, 4x1, 100mbit",
        run=_run(
            f"{_MODELS}:rows_classifier",
            "row_data",
            32,
            {"rows": 250_000, "row_width": 16, "width": 128, "layers": 4, "heads": 4, "classes": 100},
            {"length": 32, "rows": 250_000, "classes": 100},
        ),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 4 MB": _ddp(bucket_mb=4.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "fsdp, weights kept for backward": _fsdp(reshard_after_forward=False),
            "4 stages, 4 micro-batches": _pipeline(4, stages=4),
            "4 stages, 8 micro-batches": _pipeline(8, stages=4),
            "4 stages, 16 micro-batches": _pipeline(16, stages=4),
            "2 stages beside ddp, 4 micro-batches": merged(_ddp(), _pipeline(4, stages=2)),
        },
    ),
    Pair(  # 10.6 M weights: a replica with AdamW's state takes 170 MB before any activation
        name="gpt untied, 2x2, 1gbit, 0.155 GiB",
        run=_gpt(16, 64, 8192, **_MINI, tied=False),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=True,
        gib=0.155,
        plans={
            "fsdp": _fsdp(),
            "fsdp with recomputation": merged(_fsdp(), _RECOMPUTE),
            "fsdp inside hosts with recomputation": merged(_fsdp(hosts="replicate"), _RECOMPUTE),
            "zero 1 with recomputation": merged(_zero(1), _RECOMPUTE),
            "zero 2": _zero(2),
            "pipeline beside ddp, 8 micro-batches": merged(_ddp(), _pipeline(8, stages=2)),
            "pipeline beside zero 1, 8 micro-batches": merged(_zero(1), _pipeline(8, stages=2)),
            "pipeline of split layers, 8 micro-batches": merged(_split(), _pipeline(8, stages=2)),
            "split layers with recomputation": merged(_split(), _ddp(), _RECOMPUTE),
        },
    ),
    # -- simulated ----------------------------------------------------------------------------------------------------
    Pair(  # 10.6 M weights and 4,096 tokens: compute-bound
        name="gpt untied, 2x1, 1gbit",
        run=_gpt(32, 128, 8192, **_MINI, tied=False),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=False,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 8 MB": _ddp(bucket_mb=8.0),
            "ddp, 2 micro-batches": merged(_ddp(), _micro(2)),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "pipeline, 8 micro-batches": _pipeline(8),
            "pipeline, 16 micro-batches": _pipeline(16),
            "interleaved, 8 micro-batches": _pipeline(8, chunks=2),
        },
    ),
    Pair(  # 29.9 M weights: a replica with AdamW's state takes 478 MB before any activation
        name="gpt untied, 4x1, 100mbit, 0.3 GiB",
        run=_gpt(16, 128, 4096, dim=512, layers=8, heads=8, kv_heads=8, hidden=1408, tied=False),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=False,
        gib=0.3,
        plans={
            "4 stages, 8 micro-batches, with recomputation": merged(_pipeline(8, stages=4), _RECOMPUTE),
            "4 stages, 16 micro-batches": _pipeline(16, stages=4),
            "4 stages, 16 micro-batches, with recomputation": merged(_pipeline(16, stages=4), _RECOMPUTE),
            "2 stages beside zero 1, 8 micro-batches": merged(_zero(1), _pipeline(8, stages=2)),
            "fsdp with recomputation": merged(_fsdp(), _RECOMPUTE),
            "fsdp, 4 micro-batches": merged(_fsdp(), _micro(4)),
            "zero 2 with recomputation": merged(_zero(2), _RECOMPUTE),
        },
    ),
    Pair(  # 11 M weights, most in the last blocks; 32 images take 16.8, 8.4 and 4.2 MB behind the three groups
        name="wide resnet, 4x1, 20mbit",
        run=_wide_resnet(32, depth=16, widen=8),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 4 MB": _ddp(bucket_mb=4.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "4 stages, 16 micro-batches": _pipeline(16, stages=4),
            "4 stages, 16 micro-batches, cuts by arithmetic": _pipeline(16, stages=4, cuts=[2, 3, 5]),
            "4 stages, 16 micro-batches, narrow cuts, 2 ahead": _pipeline(16, stages=4, cuts=[3, 4, 5], ahead=2),
            "2 stages beside ddp, 8 micro-batches": merged(_ddp(), _pipeline(8, stages=2, cuts=[3])),
            "2 stages beside zero 1, 16 micro-batches": merged(_zero(1), _pipeline(16, stages=2, cuts=[4])),
        },
    ),
    Pair(  # 21 M weights: DDP sends 86 MB a step, and takes about as long to send as to compute
        name="vit, 2x1, 100mbit",
        run=_vit(32, width=384, layers=12, heads=6),
        hosts=2,
        ranks=1,
        rate="100mbit",
        measured=False,
        plans={
            "ddp": _ddp(),
            "ddp, buckets of 8 MB": _ddp(bucket_mb=8.0),
            "zero 1": _zero(1),
            "fsdp": _fsdp(),
            "pipeline, 8 micro-batches": _pipeline(8),
            "pipeline, 16 micro-batches": _pipeline(16),
            "pipeline, 16 micro-batches, 2 ahead": _pipeline(16, ahead=2),
            "interleaved, 16 micro-batches": _pipeline(16, chunks=2),
        },
    ),
    Pair(  # 16 M weights, of which only 0.2 M are in the blocks: the output layer has all the work
        name="gpt of 250,000 tokens, 2x2, 1gbit",
        run=_gpt(16, 16, 250_000, dim=64, layers=4, heads=4, kv_heads=4, hidden=176),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=False,
        plans={
            "ddp": _ddp(),
            "zero 1": _zero(1),
            "zero 1 inside hosts": _zero(1, hosts="replicate"),
            "fsdp": _fsdp(),
            "fsdp inside hosts": _fsdp(hosts="replicate"),
            "split layers and vocabulary beside ddp": merged(_split(vocabulary_layers="split"), _ddp()),
            "split layers beside ddp, the vocabulary whole": merged(_split(vocabulary_layers="whole"), _ddp()),
            "pipeline beside ddp, 4 micro-batches": merged(_ddp(), _pipeline(4, stages=2)),
            "pipeline of split layers, 4 micro-batches": merged(_split(), _pipeline(4, stages=2)),
        },
    ),
    Pair(  # 6.7 M weights with grouped queries: DDP sends 40 MB a step and host, and a boundary 2.1 MB
        name="gpt tied, 2x2, 20mbit",
        run=_gpt(16, 128, 4096, **(_MINI | {"kv_heads": 2})),
        hosts=2,
        ranks=2,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": _ddp(),
            "zero 1": _zero(1),
            "zero 1 inside hosts": _zero(1, hosts="replicate"),
            "fsdp inside hosts": _fsdp(hosts="replicate"),
            "split layers beside ddp": merged(_split(), _ddp()),
            "pipeline beside ddp, 8 micro-batches": merged(_ddp(), _pipeline(8, stages=2)),
            "pipeline beside zero 1, 8 micro-batches": merged(_zero(1), _pipeline(8, stages=2)),
            "interleaved beside zero 1, 8 micro-batches": merged(_zero(1), _pipeline(8, stages=2, chunks=2)),
            "pipeline of split layers, 8 micro-batches": merged(_split(), _pipeline(8, stages=2)),
            "pipeline of split layers, 16 micro-batches": merged(_split(), _pipeline(16, stages=2)),
        },
    ),
)
