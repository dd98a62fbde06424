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


PAIRS: tuple[Pair, ...] = (
    # -- measured -----------------------------------------------------------------------------------------------------
    Pair(  # 0.94 M weights in eight equal blocks, network-bound: DDP sends 3.8 MB in 1.6 s, a boundary 0.46 MB in
        # 0.19 s, three times that if interleaved; 6.1 GFLOP are 0.43 s a host
        name="mixer narrow, 2x1, 20mbit",
        run=mixer(16, patch=8, width=112, layers=8, token_hidden=96, channel_hidden=448),
        hosts=2,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "zero 1": zero(1),
            "pipeline, 2 micro-batches": pipeline(2, cuts=[4]),
            "pipeline, 4 micro-batches": pipeline(4, cuts=[4]),
            "pipeline, 8 micro-batches": pipeline(8, cuts=[4]),
            "pipeline, 16 micro-batches": pipeline(16, cuts=[4]),
            "pipeline, 8 micro-batches, 2 ahead": pipeline(8, cuts=[4], ahead=2),
            "interleaved, 8 micro-batches": pipeline(8, chunks=2, cuts=[2, 4, 6]),
        },
    ),
    Pair(  # 0.59 M weights, network-bound: DDP sends 3.6 MB a host in 1.5 s, 2.4 MB in 1 s where hosts sum first;
        # stages on hosts send 0.65 MB in 0.27 s, twice that where layers are split, and 0.3 MB for the tied embeddings,
        # which have the work of a block: four blocks first; 7.7 GFLOP are 0.55 s a host
        name="gpt narrow, 2x2, 20mbit",
        run=gpt(32, 64, 1024, dim=80, layers=7, heads=4, kv_heads=2, hidden=224),
        hosts=2,
        ranks=2,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "dense exchange": dense(),
            "zero 1 inside hosts": zero(1, hosts="replicate"),
            "split layers beside a dense exchange": merged(split(), dense()),
            "2 stages beside ddp, 2 micro-batches, four blocks first": merged(ddp(), pipeline(2, stages=2, cuts=[4])),
            "2 stages beside ddp, 4 micro-batches, four blocks first": merged(ddp(), pipeline(4, stages=2, cuts=[4])),
            "2 stages beside ddp, 8 micro-batches, four blocks first": merged(ddp(), pipeline(8, stages=2, cuts=[4])),
            "2 stages beside zero 1, 4 micro-batches, four blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[4])
            ),
            "pipeline of split layers, 8 micro-batches, four blocks first": merged(
                split(), pipeline(8, stages=2, cuts=[4])
            ),
        },
    ),
    Pair(  # 1.1 M weights, 0.8 M in the last group; DDP sends 6.5 MB a host in 0.5 s, 4.3 MB in 0.4 s where hosts sum
        # first, and 7.6 GFLOP are 0.55 s a host, half of which may hide them; a boundary in the second group has
        # 0.5 MB; by multiplications two stages balance between four and five blocks first
        name="wide resnet 22-2, 2x2, 100mbit",
        run=wide_resnet(8, depth=22, widen=2),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "dense exchange": dense(),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1 inside hosts": zero(1, hosts="replicate"),
            "2 stages beside ddp, 2 micro-batches, four blocks first": merged(ddp(), pipeline(2, stages=2, cuts=[4])),
            "2 stages beside ddp, 4 micro-batches, four blocks first": merged(ddp(), pipeline(4, stages=2, cuts=[4])),
            "2 stages beside ddp, 4 micro-batches, five blocks first": merged(ddp(), pipeline(4, stages=2, cuts=[5])),
            "2 stages beside zero 1, 4 micro-batches, four blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[4])
            ),
        },
    ),
    Pair(  # 1.4 M weights: DDP sends 8.3 MB a host in 0.7 s, which is the time of its arithmetic too (18.6 GFLOP);
        # a boundary has 0.8 MB; eight parts of one, one, two, two, two, two, one and one blocks balance if interleaved
        name="vit deep and narrow, 4x1, 100mbit",
        run=vit(32, width=96, layers=12, heads=4),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 4 micro-batches": pipeline(4, stages=4, cuts=[3, 6, 9]),
            "4 stages, 8 micro-batches": pipeline(8, stages=4, cuts=[3, 6, 9]),
            "4 stages, 16 micro-batches": pipeline(16, stages=4, cuts=[3, 6, 9]),
            "4 stages, interleaved, 8 micro-batches": pipeline(8, stages=4, chunks=2, cuts=[1, 2, 4, 6, 8, 10, 11]),
            "2 stages beside ddp, 4 micro-batches": merged(ddp(), pipeline(4, stages=2, cuts=[6])),
        },
    ),
    Pair(  # 5.2 M weights, 3 M in a table, which only the optimizer works on; 10 GFLOP are 0.37 s a host, and ZeRO 1
        # sends 31 MB in 0.26 s; a replica has 83 MB of state, a rank of ZeRO 1 52 MB and 17 MB of activations, a first
        # stage of one block 53 MB, a replicated one of three blocks 47 MB; the limit is 75 MB
        name="table of 250,000 narrow rows, 4x1, 1gbit, 0.07 GiB",
        run=classifier(32, 24, rows=250_000, row_width=12, width=160, layers=7, heads=4, classes=60),
        hosts=4,
        ranks=1,
        rate="1gbit",
        measured=True,
        gib=0.07,
        plans={
            "fsdp, 2 micro-batches": merged(fsdp(), micro_batches(2)),
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1, 2 micro-batches": merged(zero(1), micro_batches(2)),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "4 stages, 4 micro-batches, one block first": pipeline(4, stages=4, cuts=[1, 3, 5]),
            "4 stages, 8 micro-batches, one block first": pipeline(8, stages=4, cuts=[1, 3, 5]),
            "4 stages, 16 micro-batches, one block first": pipeline(16, stages=4, cuts=[1, 3, 5]),
            "2 stages beside zero 1, 4 micro-batches, three blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[3])
            ),
            "2 stages beside zero 1, 8 micro-batches, three blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[3])
            ),
        },
    ),
    Pair(  # 3.1 M weights, compute-bound: 13 GFLOP are 0.9 s a host; the output layer has the work of a block, so that
        # four blocks first balance; a replica has 50 MB of state, half a replica 25 MB, the first stage 28 MB, and a
        # text 1.5 MB of activations a block; the limit is 49 MB: two texts under way, or recomputation
        name="gpt untied, 2x1, 1gbit, 0.046 GiB",
        run=gpt(8, 96, 2048, dim=176, layers=7, heads=8, kv_heads=4, hidden=480, tied=False),
        hosts=2,
        ranks=1,
        rate="1gbit",
        measured=True,
        gib=0.046,
        plans={
            "fsdp, 2 micro-batches, with recomputation": merged(fsdp(), micro_batches(2), RECOMPUTE),
            "fsdp, 4 micro-batches, with recomputation": merged(fsdp(), micro_batches(4), RECOMPUTE),
            "pipeline, 8 micro-batches, four blocks first, none ahead": pipeline(8, cuts=[4], ahead=0),
            "pipeline, 8 micro-batches, four blocks first, half recomputed": merged(
                pipeline(8, cuts=[4]), RECOMPUTE_HALF
            ),
            "pipeline, 8 micro-batches, four blocks first, half recomputed, none ahead": merged(
                pipeline(8, cuts=[4], ahead=0), RECOMPUTE_HALF
            ),
            "pipeline, 8 micro-batches, four blocks first, with recomputation": merged(
                pipeline(8, cuts=[4]), RECOMPUTE
            ),
            "pipeline, 4 micro-batches, four blocks first, with recomputation": merged(
                pipeline(4, cuts=[4]), RECOMPUTE
            ),
            "pipeline, 8 micro-batches, three blocks first": pipeline(8, cuts=[3]),
        },
    ),
    # -- simulated ----------------------------------------------------------------------------------------------------
    Pair(  # 4.6 M weights, compute-bound: 29 GFLOP are 1 s a host, in which DDP hides nearly all of 28 MB in 0.23 s;
        # four stages balance at 3, 6 and 9, for the tied embeddings have the work of 1.4 blocks: at least 1.2 s
        name="gpt tied, 4x1, 1gbit",
        run=gpt(16, 64, 3072, dim=192, layers=10, heads=6, kv_heads=3, hidden=512),
        hosts=4,
        ranks=1,
        rate="1gbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 4 MB": ddp(bucket_mb=4.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches, three blocks each but the last": pipeline(8, stages=4, cuts=[3, 6, 9]),
            "4 stages, 16 micro-batches, three blocks each but the last": pipeline(16, stages=4, cuts=[3, 6, 9]),
            "2 stages beside ddp, 4 micro-batches, six blocks first": merged(ddp(), pipeline(4, stages=2, cuts=[6])),
            "2 stages beside zero 1, 4 micro-batches, six blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[6])
            ),
            "2 stages beside zero 1, 8 micro-batches, six blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[6])
            ),
        },
    ),
    Pair(  # 7.2 M weights: DDP sends 43 MB a host in 3.6 s, stages 0.66 MB, twice that where layers are split; 26 GFLOP
        # are 1.9 s a host; a replica has 115 MB of state, a first stage of five blocks beside ZeRO 1 47 MB, of split
        # layers 31 MB; a text has 0.9 MB of activations a block, and the limit is 75 MB
        name="gpt untied, 2x2, 100mbit, 0.07 GiB",
        run=gpt(16, 40, 2048, dim=256, layers=9, heads=8, kv_heads=2, hidden=672, tied=False),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=False,
        gib=0.07,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "2 stages beside zero 1, 4 micro-batches, five blocks first, none ahead": merged(
                zero(1), pipeline(4, stages=2, cuts=[5], ahead=0)
            ),
            "2 stages beside zero 1, 8 micro-batches, five blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[5])
            ),
            "2 stages beside zero 1, 8 micro-batches, five blocks first, none ahead": merged(
                zero(1), pipeline(8, stages=2, cuts=[5], ahead=0)
            ),
            "2 stages beside zero 1, 4 micro-batches, five blocks first, with recomputation": merged(
                zero(1), pipeline(4, stages=2, cuts=[5]), RECOMPUTE
            ),
            "interleaved beside zero 1, 8 micro-batches": merged(
                zero(1), pipeline(8, stages=2, chunks=2, cuts=[2, 4, 7])
            ),
            "pipeline of split layers, 4 micro-batches, five blocks first, none ahead": merged(
                split(), pipeline(4, stages=2, cuts=[5], ahead=0)
            ),
            "pipeline of split layers, 8 micro-batches, five blocks first": merged(
                split(), pipeline(8, stages=2, cuts=[5])
            ),
            "pipeline of split layers, 16 micro-batches, five blocks first": merged(
                split(), pipeline(16, stages=2, cuts=[5])
            ),
        },
    ),
    Pair(  # 2.7 M weights, 2.1 M in the last two blocks; 19 GFLOP are 0.7 s a host, and ZeRO 1 sends 16 MB in 0.14 s;
        # a replica has 44 MB of state and 5 MB of activations an image, and the limit is 39 MB; six blocks of about
        # equal work do not fill four stages; of two stages with three blocks, the second has 29 MB of state with ZeRO 1
        name="wide resnet 16-4, 4x1, 1gbit, 0.036 GiB",
        run=wide_resnet(8, depth=16, widen=4),
        hosts=4,
        ranks=1,
        rate="1gbit",
        measured=False,
        gib=0.036,
        plans={
            "fsdp": fsdp(),
            "fsdp, 2 micro-batches": merged(fsdp(), micro_batches(2)),
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1, 2 micro-batches": merged(zero(1), micro_batches(2)),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "4 stages, 8 micro-batches, narrow cuts": pipeline(8, stages=4, cuts=[2, 4, 5]),
            "2 stages beside zero 1, 2 micro-batches, three blocks each": merged(
                zero(1), pipeline(2, stages=2, cuts=[3])
            ),
            "2 stages beside zero 1, 4 micro-batches, three blocks each": merged(
                zero(1), pipeline(4, stages=2, cuts=[3])
            ),
        },
    ),
    Pair(  # 3.8 M weights, network-bound: DDP sends 15 MB in 6.4 s, a boundary 0.7 MB in 0.3 s, three times that if
        # interleaved, which 1.8 s of arithmetic a host hide; parts of three, two, two and three blocks balance
        name="vit, 2x1, 20mbit",
        run=vit(16, width=176, layers=10, heads=4),
        hosts=2,
        ranks=1,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "pipeline, 2 micro-batches": pipeline(2, cuts=[5]),
            "pipeline, 4 micro-batches": pipeline(4, cuts=[5]),
            "pipeline, 8 micro-batches": pipeline(8, cuts=[5]),
            "pipeline, 16 micro-batches": pipeline(16, cuts=[5]),
            "pipeline, 8 micro-batches, 2 ahead": pipeline(8, cuts=[5], ahead=2),
            "interleaved, 8 micro-batches": pipeline(8, chunks=2, cuts=[3, 5, 7]),
            "interleaved, 16 micro-batches": pipeline(16, chunks=2, cuts=[3, 5, 7]),
        },
    ),
    Pair(  # 6.2 M weights, 3.5 M in a table on the first stage; ZeRO 1 over hosts sends 37 MB a host in 3.1 s, stages
        # 0.8 MB; 17 GFLOP are 1.2 s a host; a replica has 99 MB of state, a rank of ZeRO 1 62 MB, a first stage of
        # three blocks beside ZeRO 1 58 MB and 0.5 MB of activations a block and sequence, and the limit is 86 MB
        name="table of 250,000 rows, 2x2, 100mbit, 0.08 GiB",
        run=classifier(32, 32, rows=250_000, row_width=14, width=192, layers=6, heads=6, classes=150),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=False,
        gib=0.08,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "2 stages beside zero 1, 4 micro-batches, even blocks, none ahead": merged(
                zero(1), pipeline(4, stages=2, cuts=[3], ahead=0)
            ),
            "2 stages beside zero 1, 4 micro-batches, two blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[2])
            ),
            "2 stages beside zero 1, 8 micro-batches, two blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[2])
            ),
            "2 stages beside zero 1, 8 micro-batches, even blocks": merged(zero(1), pipeline(8, stages=2, cuts=[3])),
            "2 stages beside zero 1, 16 micro-batches, even blocks": merged(zero(1), pipeline(16, stages=2, cuts=[3])),
            "2 stages beside zero 1, 4 micro-batches, even blocks, with recomputation": merged(
                zero(1), pipeline(4, stages=2, cuts=[3]), RECOMPUTE
            ),
            "interleaved beside zero 1, 8 micro-batches": merged(
                zero(1), pipeline(8, stages=2, chunks=2, cuts=[1, 3, 5])
            ),
        },
    ),
    Pair(  # 6.9 M weights and 512 patches, network-bound: DDP sends 41 MB a host in 17 s, two stages beside DDP 14 MB;
        # a boundary has 0.65 MB in 0.27 s, a host twice that if interleaved; 22 GFLOP are 0.8 s a host
        name="mixer of large patches, 4x1, 20mbit",
        run=mixer(32, patch=16, width=320, layers=8, token_hidden=64, channel_hidden=1280),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "zero 1": zero(1),
            "4 stages, 4 micro-batches": pipeline(4, stages=4, cuts=[2, 4, 6]),
            "4 stages, 8 micro-batches": pipeline(8, stages=4, cuts=[2, 4, 6]),
            "4 stages, 8 micro-batches, 2 ahead": pipeline(8, stages=4, cuts=[2, 4, 6], ahead=2),
            "4 stages, 16 micro-batches": pipeline(16, stages=4, cuts=[2, 4, 6]),
            "4 stages, 16 micro-batches, 2 ahead": pipeline(16, stages=4, cuts=[2, 4, 6], ahead=2),
            "4 stages, 32 micro-batches, 2 ahead": pipeline(32, stages=4, cuts=[2, 4, 6], ahead=2),
            "4 stages, interleaved, 16 micro-batches": pipeline(16, stages=4, chunks=2),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2, cuts=[4])),
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
