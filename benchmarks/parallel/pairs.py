"""Pairs of a run and a cluster, each with plans written by hand, against which the planner is measured.

The plans were written before the planner was run on any of the pairs, by someone who did not know it. All of them
compute the result of one process, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tables = Mapping[str, Any]

MODELS = "benchmarks.parallel.models"
RECOMPUTE: Tables = {"memory": {"recompute": {}}}
RECOMPUTE_HALF: Tables = {"memory": {"recompute": {"every_nth": 2}}}


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


def micro_batches(count: int) -> Tables:
    return {"run": {"accumulate": count}}


def ddp(**settings: Any) -> Tables:
    return {"parallel": {"ddp": settings}}


def fsdp(**settings: Any) -> Tables:
    return {"parallel": {"fsdp": settings}}


def zero(stage: int, **settings: Any) -> Tables:
    return {"memory": {"zero": {"stage": stage, **settings}}}


def pipeline(micro: int, **settings: Any) -> Tables:
    return merged(micro_batches(micro), {"parallel": {"pipeline": settings}})


def split(**settings: Any) -> Tables:
    return {"parallel": {"tensor": {"ways": 2, **settings}}}


def dense(**transport: Any) -> Tables:
    """Exact gradients, summed inside hosts before they are exchanged between them."""
    return {"parallel": {"ddp": {}}, "comm": {"dense": {"transport": transport}}}


# -- tables of runs ---------------------------------------------------------------------------------------------------


def run_of(model: str, data: str, batch: int, arguments: Tables, data_arguments: Tables) -> Tables:
    return {
        "run": {"model": model, "data": f"{MODELS}:{data}", "batch": batch, "steps": 100},
        "model": arguments,
        "data": {"arguments": data_arguments},
    }


def gpt(batch: int, length: int, vocabulary: int, **shape: Any) -> Tables:
    """A run of the built-in GPT; its embeddings are tied to the output layer unless `shape` says otherwise."""
    arguments = {"vocab_size": vocabulary, "context": length, **shape}
    data = {"length": length, "vocabulary": vocabulary}
    return run_of("shoestring.models.gpt:tiny", "token_data", batch, arguments, data)


def wide_resnet(batch: int, depth: int, widen: int) -> Tables:
    return run_of(f"{MODELS}:wide_resnet", "image_data", batch, {"depth": depth, "widen": widen}, {"size": 32})


def vit(batch: int, width: int, layers: int, heads: int, patch: int = 8) -> Tables:
    shape = {"size": 64, "patch": patch, "width": width, "layers": layers, "heads": heads, "classes": 100}
    return run_of(f"{MODELS}:vit", "image_data", batch, shape, {"size": 64, "classes": 100})


def mixer(batch: int, **shape: int) -> Tables:
    shape = {"size": 64, "classes": 100, **shape}
    return run_of(f"{MODELS}:mixer", "image_data", batch, shape, {"size": 64, "classes": 100})


def classifier(batch: int, length: int, **shape: int) -> Tables:
    """A run of an encoder of entries of a table."""
    data = {"length": length, "rows": shape["rows"], "classes": shape["classes"]}
    return run_of(f"{MODELS}:rows_classifier", "row_data", batch, shape, data)


_SPLIT_MIXER = split(
    columns=["blocks.*.token_up", "blocks.*.channel_up"], rows=["blocks.*.token_down", "blocks.*.channel_down"]
)

PAIRS: tuple[Pair, ...] = (
    # -- measured -----------------------------------------------------------------------------------------------------
    Pair(  # 1 M weights in 20 narrow blocks, network-bound: DDP sends 5.7 MB a host in 2.3 s, a boundary 0.5 MB
        name="gpt deep and narrow, 4x1, 20mbit",
        run=gpt(16, 128, 512, dim=64, layers=20, heads=4, kv_heads=2, hidden=176),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "4 stages, 8 micro-batches": pipeline(8, stages=4),
            "4 stages, 8 micro-batches, tied gradients": pipeline(8, stages=4, cuts=[5, 10, 15], embeddings="first"),
            "4 stages, 8 micro-batches, tied gradients, 2 ahead": pipeline(
                8, stages=4, cuts=[5, 10, 15], embeddings="first", ahead=2
            ),
            "4 stages, 4 micro-batches, tied gradients": pipeline(4, stages=4, cuts=[5, 10, 15], embeddings="first"),
            "4 stages, 16 micro-batches, tied gradients": pipeline(16, stages=4, cuts=[5, 10, 15], embeddings="first"),
            "4 stages, 8 micro-batches, fewer blocks last": pipeline(8, stages=4, cuts=[5, 10, 16], embeddings="first"),
            "4 stages, gpipe, 8 micro-batches": pipeline(
                8, stages=4, cuts=[5, 10, 15], embeddings="first", schedule="gpipe"
            ),
            "2 stages beside ddp, 4 micro-batches": merged(ddp(), pipeline(4, stages=2, cuts=[10])),
        },
    ),
    Pair(  # 20.8 M weights, compute-bound; the output layer has the work of a block, so two stages balance at block 2
        name="gpt shallow and wide, 2x1, 1gbit",
        run=gpt(16, 64, 6144, dim=640, layers=3, heads=10, kv_heads=2, hidden=1728, tied=False),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 10 MB": ddp(bucket_mb=10.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "pipeline, 4 micro-batches, two blocks first": pipeline(4, cuts=[2]),
            "pipeline, 8 micro-batches, two blocks first": pipeline(8, cuts=[2]),
            "pipeline, 16 micro-batches, two blocks first": pipeline(16, cuts=[2]),
            "pipeline, 8 micro-batches, one block first": pipeline(8, cuts=[1]),
        },
    ),
    Pair(  # 1.5 M weights, network-bound: DDP sends 5.9 MB in 2.3 s, boundaries in the three groups 2.1, 1 and 0.5 MB
        name="wide resnet 28-2, 2x1, 20mbit",
        run=wide_resnet(16, depth=28, widen=2),
        hosts=2,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "zero 1": zero(1),
            "pipeline, 8 micro-batches": pipeline(8),
            "pipeline, 8 micro-batches, even blocks": pipeline(8, cuts=[6]),
            "pipeline, 8 micro-batches, cut in front of the last group": pipeline(8, cuts=[8]),
            "pipeline, 8 micro-batches, narrow cut": pipeline(8, cuts=[9]),
            "pipeline, 4 micro-batches, narrow cut": pipeline(4, cuts=[9]),
            "pipeline, 16 micro-batches, narrow cut": pipeline(16, cuts=[9]),
            "pipeline, 8 micro-batches, narrow cut, 2 ahead": pipeline(8, cuts=[9], ahead=2),
        },
    ),
    Pair(  # 4.4 M weights in equal blocks, network-bound: DDP sends 26 MB a host in 2.1 s, a boundary 2.1 MB
        name="mixer, 4x1, 100mbit",
        run=mixer(32, patch=8, width=256, layers=8, token_hidden=128, channel_hidden=1024),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 4 MB": ddp(bucket_mb=4.0),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches": pipeline(8, stages=4),
            "4 stages, 16 micro-batches": pipeline(16, stages=4),
            "4 stages, 16 micro-batches, 2 ahead": pipeline(16, stages=4, ahead=2),
            "4 stages, interleaved, 16 micro-batches": pipeline(16, stages=4, chunks=2),
            "4 stages, gpipe, 8 micro-batches": pipeline(8, stages=4, schedule="gpipe"),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2)),
            "2 stages beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2)),
        },
    ),
    Pair(  # 8.8 M weights, 4 M in a table without work; a replica has 140 MB of state, and the limit is 129 MB
        name="table of 250,000 rows, 2x2, 1gbit, 0.12 GiB",
        run=classifier(32, 32, rows=250_000, row_width=16, width=256, layers=6, heads=8, classes=50),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=True,
        gib=0.12,
        plans={
            "fsdp": fsdp(),
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1": zero(1),
            "2 stages beside ddp, 4 micro-batches, two blocks first": merged(ddp(), pipeline(4, stages=2, cuts=[2])),
            "2 stages beside zero 1, 4 micro-batches, two blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[2])
            ),
            "2 stages beside zero 1, 4 micro-batches, even blocks": merged(zero(1), pipeline(4, stages=2, cuts=[3])),
            "2 stages beside zero 1, 8 micro-batches, even blocks": merged(zero(1), pipeline(8, stages=2, cuts=[3])),
            "2 stages beside zero 1, 8 micro-batches, even blocks, 2 ahead": merged(
                zero(1), pipeline(8, stages=2, cuts=[3], ahead=2)
            ),
            "interleaved beside zero 1, 4 micro-batches": merged(zero(1), pipeline(4, stages=2, chunks=2)),
        },
    ),
    Pair(  # 4.5 M weights, 4.2 M in one layer, and no blocks; network-bound: DDP sends 27 MB a host in 2.1 s
        name="convolutions before a huge layer, 2x2, 100mbit",
        run=run_of(
            f"{MODELS}:huge_layer",
            "image_data",
            64,
            {"size": 64, "channels": 64, "hidden": 512, "classes": 100},
            {"size": 64, "classes": 100},
        ),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 4 MB": ddp(bucket_mb=4.0),
            "dense exchange": dense(),
            "dense exchange in 1 part": dense(parts=1),
            "zero 1": zero(1),
            "zero 1 inside hosts": zero(1, hosts="replicate"),
            "fsdp inside hosts": fsdp(hosts="replicate"),
            "split huge layer beside ddp": merged(split(columns=["huge"], rows=["head"]), ddp()),
            "split huge layer beside a dense exchange": merged(split(columns=["huge"], rows=["head"]), dense()),
        },
    ),
    # -- simulated ----------------------------------------------------------------------------------------------------
    Pair(  # 18.9 M weights, compute-bound; a replica has 302 MB of state and 180 MB of activations a text; limit 285 MB
        name="gpt of long texts, 2x2, 1gbit, 0.265 GiB",
        run=gpt(16, 512, 8192, dim=384, layers=10, heads=6, kv_heads=2, hidden=1024),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=False,
        gib=0.265,
        plans={
            "fsdp, 4 micro-batches, with recomputation": merged(fsdp(), micro_batches(4), RECOMPUTE),
            "fsdp, 4 micro-batches, half recomputed": merged(fsdp(), micro_batches(4), RECOMPUTE_HALF),
            "split layers beside ddp, 8 micro-batches, with recomputation": merged(
                split(), ddp(), micro_batches(8), RECOMPUTE
            ),
            "2 stages beside zero 1, 8 micro-batches, with recomputation": merged(
                zero(1), pipeline(8, stages=2), RECOMPUTE
            ),
            "2 stages beside zero 1, 8 micro-batches, half recomputed": merged(
                zero(1), pipeline(8, stages=2, ahead=0), RECOMPUTE_HALF
            ),
            "pipeline of split layers, 16 micro-batches": merged(split(), pipeline(16, stages=2)),
            "pipeline of split layers, 8 micro-batches, with recomputation": merged(
                split(), pipeline(8, stages=2), RECOMPUTE
            ),
        },
    ),
    Pair(  # 5.4 M weights in 12 blocks, network-bound: DDP sends 32 MB a host in 13 s, a boundary 1.6 MB in 0.6 s
        name="vit deep, 4x1, 20mbit",
        run=vit(32, width=192, layers=12, heads=3),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches": pipeline(8, stages=4, cuts=[3, 6, 9]),
            "4 stages, 8 micro-batches, 2 ahead": pipeline(8, stages=4, cuts=[3, 6, 9], ahead=2),
            "4 stages, 16 micro-batches": pipeline(16, stages=4, cuts=[3, 6, 9]),
            "4 stages, 16 micro-batches, 2 ahead": pipeline(16, stages=4, cuts=[3, 6, 9], ahead=2),
            "4 stages, 32 micro-batches, 2 ahead": pipeline(32, stages=4, cuts=[3, 6, 9], ahead=2),
            "4 stages, gpipe, 16 micro-batches": pipeline(16, stages=4, cuts=[3, 6, 9], schedule="gpipe"),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2, cuts=[6])),
        },
    ),
    Pair(  # 13 M weights, network-bound: DDP sends 78 MB a host; a replica has 209 MB of state, and the limit is 123 MB
        name="vit shallow and wide, 2x2, 100mbit, 0.115 GiB",
        run=vit(64, width=512, layers=4, heads=8, patch=16),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=False,
        gib=0.115,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "fsdp": fsdp(),
            "2 stages beside zero 1, 4 micro-batches": merged(zero(1), pipeline(4, stages=2, cuts=[2])),
            "2 stages beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2, cuts=[2])),
            "2 stages beside zero 1, 16 micro-batches": merged(zero(1), pipeline(16, stages=2, cuts=[2])),
            "2 stages beside zero 1, 8 micro-batches, 2 ahead": merged(
                zero(1), pipeline(8, stages=2, cuts=[2], ahead=2)
            ),
            "interleaved beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2, chunks=2)),
            "pipeline of split layers, 8 micro-batches": merged(split(), pipeline(8, stages=2, cuts=[2])),
            "pipeline of split layers, 16 micro-batches": merged(split(), pipeline(16, stages=2, cuts=[2])),
        },
    ),
    Pair(  # 21 M weights, 8.4 M in the output layer, which has two thirds of the work; DDP sends 126 MB a host in 10 s
        name="gpt of 32,768 tokens, 4x1, 100mbit",
        run=gpt(16, 64, 32_768, dim=256, layers=6, heads=8, kv_heads=2, hidden=704, tied=False),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches": pipeline(8, stages=4),
            "4 stages, 4 micro-batches, one block last": pipeline(4, stages=4, cuts=[2, 4, 5]),
            "4 stages, 8 micro-batches, one block last": pipeline(8, stages=4, cuts=[2, 4, 5]),
            "4 stages, 16 micro-batches, one block last": pipeline(16, stages=4, cuts=[2, 4, 5]),
            "4 stages, 8 micro-batches, one block first and last": pipeline(8, stages=4, cuts=[1, 3, 5]),
            "2 stages beside ddp, 4 micro-batches, one block last": merged(ddp(), pipeline(4, stages=2, cuts=[5])),
            "2 stages beside zero 1, 4 micro-batches, one block last": merged(zero(1), pipeline(4, stages=2, cuts=[5])),
        },
    ),
    Pair(  # 2.1 M weights, network-bound: DDP sends 13 MB a host in 5.1 s, a boundary 2.1 MB in 0.8 s
        name="mixer of small patches, 2x2, 20mbit",
        run=mixer(16, patch=4, width=128, layers=8, token_hidden=256, channel_hidden=512),
        hosts=2,
        ranks=2,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "dense exchange": dense(),
            "zero 1 inside hosts": zero(1, hosts="replicate"),
            "fsdp inside hosts": fsdp(hosts="replicate"),
            "split layers beside a dense exchange": merged(_SPLIT_MIXER, dense()),
            "2 stages beside ddp, 4 micro-batches": merged(ddp(), pipeline(4, stages=2)),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2)),
            "2 stages beside ddp, 8 micro-batches, 2 ahead": merged(ddp(), pipeline(8, stages=2, ahead=2)),
            "2 stages beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2)),
            "interleaved beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2, chunks=2)),
            "pipeline of split layers, 8 micro-batches": merged(_SPLIT_MIXER, pipeline(8, stages=2)),
            "pipeline of split layers, 16 micro-batches": merged(_SPLIT_MIXER, pipeline(16, stages=2)),
        },
    ),
    Pair(  # 6.5 M weights, 5.2 M in the output layer, which has less work than a block; 0.2 s to send and to compute
        name="encoder with 40,000 classes, 2x1, 1gbit",
        run=classifier(64, 32, rows=4096, row_width=32, width=128, layers=6, heads=4, classes=40_000),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 5 MB": ddp(bucket_mb=5.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "pipeline, 8 micro-batches": pipeline(8),
            "pipeline, 4 micro-batches, three blocks first": pipeline(4, cuts=[3]),
            "pipeline, 8 micro-batches, three blocks first": pipeline(8, cuts=[3]),
            "pipeline, 4 micro-batches, four blocks first": pipeline(4, cuts=[4]),
            "pipeline, 8 micro-batches, four blocks first": pipeline(8, cuts=[4]),
            "interleaved, 8 micro-batches, four blocks first": pipeline(8, chunks=2, cuts=[2, 3, 5]),
        },
    ),
)

NO_GAIN: tuple[Pair, ...] = (
    # The plans beside DDP are the best of their kind on the map (`benchmarks.parallel.no_gain`), and ones by hand.
    Pair(  # 6.9 M weights: a step has 0.35 TFLOP, and DDP sends 28 MB in 0.24 s
        name="gpt tied, 2x1, 1gbit",
        run=gpt(64, 128, 2048, dim=256, layers=8, heads=8, kv_heads=8, hidden=704),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "pipeline, 8 micro-batches": pipeline(8),
            "pipeline, 16 micro-batches": pipeline(16),
            "interleaved, 32 micro-batches": pipeline(32, chunks=2, ahead=2, cuts=[2, 4, 6], embeddings="first"),
        },
    ),
    Pair(  # 2.7 M weights: a step has 0.14 TFLOP, and DDP sends 16 MB a host
        name="vit, 2x2, 1gbit",
        run=vit(128, width=192, layers=6, heads=4),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "pipeline beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2)),
            "pipeline beside zero 1, 32 micro-batches": merged(zero(1), pipeline(32, stages=2, ahead=2)),
            "split layers beside ddp": merged(split(), ddp()),
            "pipeline of split layers, 8 micro-batches": merged(split(), pipeline(8, stages=2)),
            "pipeline of split layers, 32 micro-batches": merged(split(), pipeline(32, stages=2, ahead=2)),
        },
    ),
    Pair(  # 6.2 M weights; a step has 0.17 TFLOP
        name="wide resnet, 2x1, 1gbit",
        run=wide_resnet(32, depth=16, widen=6),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "pipeline, 8 micro-batches, three blocks each": pipeline(8, cuts=[3]),
            "pipeline, 32 micro-batches, three blocks each": pipeline(32, cuts=[3], ahead=0),
            "interleaved, 32 micro-batches": pipeline(32, chunks=2, ahead=2, cuts=[2, 4, 5]),
        },
    ),
)
"""Pairs for which the map says that stages and split layers gain nothing."""
