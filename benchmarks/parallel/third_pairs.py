"""The pairs on which faults of measuring were found: no fresh test of the planner any more.

The plans were written before the planner was run on any of the pairs.
"""

from __future__ import annotations

from benchmarks.parallel.pairs import (
    RECOMPUTE,
    RECOMPUTE_HALF,
    SPLIT_MIXER,
    Pair,
    classifier,
    ddp,
    dense,
    fsdp,
    gpt,
    merged,
    micro_batches,
    mixer,
    pipeline,
    split,
    vit,
    wide_resnet,
    zero,
)

THIRD: tuple[Pair, ...] = (
    # -- measured -----------------------------------------------------------------------------------------------------
    Pair(  # 1 M weights, 0.4 M in tied embeddings, which have the work of four blocks: five blocks and one balance;
        # network-bound: DDP sends 4 MB in 1.6 s, a boundary 0.3 MB, and the gradient of the embeddings is 1.6 MB
        name="gpt of 4,096 tokens, 2x1, 20mbit",
        run=gpt(16, 48, 4096, dim=96, layers=6, heads=6, kv_heads=3, hidden=256),
        hosts=2,
        ranks=1,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "pipeline, 4 micro-batches, five blocks first": pipeline(4, cuts=[5]),
            "pipeline, 8 micro-batches, five blocks first": pipeline(8, cuts=[5]),
            "pipeline, 16 micro-batches, five blocks first": pipeline(16, cuts=[5]),
            "pipeline, 8 micro-batches, five blocks first, 2 ahead": pipeline(8, cuts=[5], ahead=2),
            "pipeline, 8 micro-batches, five blocks first, tied gradients": pipeline(8, cuts=[5], embeddings="first"),
            "pipeline, 8 micro-batches, four blocks first": pipeline(8, cuts=[4]),
        },
    ),
    Pair(  # 1.5 M weights, 1.2 M in the last group, whose gradients come first: DDP sends 9.3 MB a host in 0.7 s, most
        # of it during backward passes; six blocks of about equal work do not fill four stages; boundaries 1.6 to 0.4 MB
        name="wide resnet 16-3, 4x1, 100mbit",
        run=wide_resnet(8, depth=16, widen=3),
        hosts=4,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches, narrow cuts": pipeline(8, stages=4, cuts=[2, 4, 5]),
            "4 stages, 4 micro-batches, narrow cuts": pipeline(4, stages=4, cuts=[2, 4, 5]),
            "2 stages beside ddp, 4 micro-batches, three blocks each": merged(ddp(), pipeline(4, stages=2, cuts=[3])),
            "2 stages beside ddp, 2 micro-batches, three blocks each": merged(ddp(), pipeline(2, stages=2, cuts=[3])),
            "2 stages beside zero 1, 4 micro-batches, three blocks each": merged(
                zero(1), pipeline(4, stages=2, cuts=[3])
            ),
        },
    ),
    Pair(  # 0.65 M weights, network-bound: DDP sends 3.9 MB a host in 1.6 s, 2.6 MB where hosts sum first; stages on
        # hosts send 0.3 MB in 0.13 s, and twice that where the ranks of a host split the layers
        name="vit narrow, 2x2, 20mbit",
        run=vit(16, width=80, layers=8, heads=4),
        hosts=2,
        ranks=2,
        rate="20mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 1 MB": ddp(bucket_mb=1.0),
            "dense exchange": dense(),
            "zero 1 inside hosts": zero(1, hosts="replicate"),
            "split layers beside a dense exchange": merged(split(), dense()),
            "2 stages beside ddp, 4 micro-batches": merged(ddp(), pipeline(4, stages=2, cuts=[4])),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2, cuts=[4])),
            "2 stages beside zero 1, 4 micro-batches": merged(zero(1), pipeline(4, stages=2, cuts=[4])),
            "interleaved beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2, chunks=2)),
            "pipeline of split layers, 8 micro-batches": merged(split(), pipeline(8, stages=2, cuts=[4])),
        },
    ),
    Pair(  # 4.4 M weights, 2.5 M in a table, which only the optimizer works on; DDP sends 17.5 MB in 1.4 s, a boundary
        # 0.3 MB; the optimizer's work on the table may be worth a block
        name="table of 250,000 narrow rows, 2x1, 100mbit",
        run=classifier(32, 16, rows=250_000, row_width=10, width=160, layers=6, heads=4, classes=80),
        hosts=2,
        ranks=1,
        rate="100mbit",
        measured=True,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 4 MB": ddp(bucket_mb=4.0),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "pipeline, 2 micro-batches, three blocks each": pipeline(2, cuts=[3]),
            "pipeline, 4 micro-batches, three blocks each": pipeline(4, cuts=[3]),
            "pipeline, 8 micro-batches, three blocks each": pipeline(8, cuts=[3]),
            "pipeline, 16 micro-batches, three blocks each": pipeline(16, cuts=[3]),
            "pipeline, 8 micro-batches, two blocks first": pipeline(8, cuts=[2]),
            "interleaved, 8 micro-batches": pipeline(8, chunks=2, cuts=[1, 3, 5]),
        },
    ),
    Pair(  # 3.9 M weights, compute-bound: FSDP sends 35 MB a host in 0.3 s; a replica has 62 MB of state, and the limit
        # is 48 MB; the output layer has the work of nearly a block, so that four stages balance at 2, 4 and 6
        name="gpt untied, 4x1, 1gbit, 0.045 GiB",
        run=gpt(16, 48, 2048, dim=192, layers=7, heads=6, kv_heads=6, hidden=512, tied=False),
        hosts=4,
        ranks=1,
        rate="1gbit",
        measured=True,
        gib=0.045,
        plans={
            "fsdp": fsdp(),
            "fsdp, 2 micro-batches": merged(fsdp(), micro_batches(2)),
            "fsdp, weights kept for backward, 2 micro-batches": merged(
                fsdp(reshard_after_forward=False), micro_batches(2)
            ),
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "4 stages, 8 micro-batches, one block last": pipeline(8, stages=4, cuts=[2, 4, 6]),
            "4 stages, 16 micro-batches, one block last": pipeline(16, stages=4, cuts=[2, 4, 6]),
            "2 stages beside zero 1, 4 micro-batches, four blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[4])
            ),
            "2 stages beside zero 1, 8 micro-batches, four blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[4])
            ),
        },
    ),
    Pair(  # 1.8 M weights, 1 M in tied embeddings, which have the work of nearly six blocks, so that stages do not
        # balance: the last one has 69% of the work; DDP sends 10.7 MB a host in 0.9 s, 7.2 MB where hosts sum first
        name="gpt of 8,192 tokens, 2x2, 100mbit",
        run=gpt(16, 40, 8192, dim=128, layers=4, heads=4, kv_heads=2, hidden=352),
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
            "split layers and vocabulary beside ddp": merged(split(vocabulary_layers="split"), ddp()),
            "split layers and vocabulary beside a dense exchange": merged(split(vocabulary_layers="split"), dense()),
            "split layers beside a dense exchange, the vocabulary whole": merged(
                split(vocabulary_layers="whole"), dense()
            ),
            "2 stages beside zero 1, 4 micro-batches, three blocks first": merged(
                zero(1), pipeline(4, stages=2, cuts=[3])
            ),
            "pipeline of split layers, 8 micro-batches, three blocks first": merged(
                split(), pipeline(8, stages=2, cuts=[3])
            ),
        },
    ),
    # -- simulated ----------------------------------------------------------------------------------------------------
    Pair(  # 8.9 M weights, 4 M in a table on the first stage; network-bound: DDP sends 53 MB a host in 21 s, a boundary
        # 1.8 MB in 0.7 s; a replica has 142 MB of state, a first stage of two blocks 84 MB, and the limit is 102 MB
        name="table of 250,000 rows, 4x1, 20mbit, 0.095 GiB",
        run=classifier(32, 64, rows=250_000, row_width=16, width=224, layers=8, heads=7, classes=200),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=False,
        gib=0.095,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "4 stages, 16 micro-batches, even blocks, none ahead": pipeline(16, stages=4, cuts=[2, 4, 6], ahead=0),
            "4 stages, 32 micro-batches, even blocks": pipeline(32, stages=4, cuts=[2, 4, 6]),
            "4 stages, 32 micro-batches, even blocks, none ahead": pipeline(32, stages=4, cuts=[2, 4, 6], ahead=0),
            "4 stages, 16 micro-batches, even blocks, with recomputation": merged(
                pipeline(16, stages=4, cuts=[2, 4, 6]), RECOMPUTE
            ),
            "4 stages, 16 micro-batches, even blocks, half recomputed": merged(
                pipeline(16, stages=4, cuts=[2, 4, 6]), RECOMPUTE_HALF
            ),
            "4 stages, 16 micro-batches, one block first": pipeline(16, stages=4, cuts=[1, 3, 5]),
            "2 stages beside zero 1, 8 micro-batches, with recomputation": merged(
                zero(1), pipeline(8, stages=2, cuts=[4]), RECOMPUTE
            ),
        },
    ),
    Pair(  # 5.8 M weights, compute-bound: 81 GFLOP a host, and 35 MB in 2.8 s if sent once; 94 MB of state a replica,
        # some 8 MB of activations an image, and the limit is 89 MB; the work of two stages balances at block 6
        name="wide resnet 28-4, 2x2, 100mbit, 0.083 GiB",
        run=wide_resnet(32, depth=28, widen=4),
        hosts=2,
        ranks=2,
        rate="100mbit",
        measured=False,
        gib=0.083,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "fsdp, 2 micro-batches": merged(fsdp(), micro_batches(2)),
            "fsdp inside hosts, 4 micro-batches": merged(fsdp(hosts="replicate"), micro_batches(4)),
            "zero 1 with recomputation": merged(zero(1), RECOMPUTE),
            "zero 1, 4 micro-batches": merged(zero(1), micro_batches(4)),
            "zero 1, 8 micro-batches": merged(zero(1), micro_batches(8)),
            "zero 1 inside hosts, 8 micro-batches": merged(zero(1, hosts="replicate"), micro_batches(8)),
            "2 stages beside zero 1, 8 micro-batches, six blocks first": merged(
                zero(1), pipeline(8, stages=2, cuts=[6])
            ),
            "2 stages beside zero 1, 16 micro-batches, six blocks first": merged(
                zero(1), pipeline(16, stages=2, cuts=[6])
            ),
            "2 stages beside zero 1, 8 micro-batches, narrow cut": merged(zero(1), pipeline(8, stages=2, cuts=[8])),
        },
    ),
    Pair(  # 10.2 M weights and 544 tokens: DDP sends 61 MB a host in 0.5 s, a fourth of its arithmetic or less; each of
        # its ranks updates all weights, which a stage does not; a boundary has 0.7 MB
        name="vit of few patches, 4x1, 1gbit",
        run=vit(32, width=320, layers=8, heads=8, patch=16),
        hosts=4,
        ranks=1,
        rate="1gbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 8 MB": ddp(bucket_mb=8.0),
            "dense exchange in 4 parts": dense(parts=4),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "4 stages, 8 micro-batches": pipeline(8, stages=4, cuts=[2, 4, 6]),
            "4 stages, 16 micro-batches": pipeline(16, stages=4, cuts=[2, 4, 6]),
            "4 stages, interleaved, 16 micro-batches": pipeline(16, stages=4, chunks=2),
            "2 stages beside ddp, 4 micro-batches": merged(ddp(), pipeline(4, stages=2, cuts=[4])),
            "2 stages beside ddp, 8 micro-batches": merged(ddp(), pipeline(8, stages=2, cuts=[4])),
            "2 stages beside zero 1, 8 micro-batches": merged(zero(1), pipeline(8, stages=2, cuts=[4])),
        },
    ),
    Pair(  # 16.2 M weights and 512 tokens: DDP sends 65 MB in 5.2 s, about as long as backward passes take; a boundary
        # has 0.7 MB; the output layer has the work of a block, so that seven and five blocks balance as well as six
        name="gpt of short texts, 2x1, 100mbit",
        run=gpt(16, 32, 4096, dim=320, layers=12, heads=5, kv_heads=5, hidden=864),
        hosts=2,
        ranks=1,
        rate="100mbit",
        measured=False,
        plans={
            "ddp": ddp(),
            "ddp, buckets of 4 MB": ddp(bucket_mb=4.0),
            "dense exchange in 8 parts": dense(parts=8),
            "zero 1": zero(1),
            "fsdp": fsdp(),
            "pipeline, 4 micro-batches, seven blocks first": pipeline(4, cuts=[7]),
            "pipeline, 8 micro-batches, seven blocks first": pipeline(8, cuts=[7]),
            "pipeline, 16 micro-batches, seven blocks first": pipeline(16, cuts=[7]),
            "pipeline, 8 micro-batches, six blocks first": pipeline(8, cuts=[6]),
            "pipeline, 16 micro-batches, six blocks first": pipeline(16, cuts=[6]),
            "interleaved, 8 micro-batches": pipeline(8, chunks=2, cuts=[3, 6, 10]),
        },
    ),
    Pair(  # 9.3 M weights, network-bound: DDP sends 56 MB a host in 22 s, a boundary 4.2 MB in 1.7 s; a replica has
        # 149 MB of state, a stage 41 MB and 15 MB of activations for each text under way; the limit is 107 MB
        name="gpt untied, 4x1, 20mbit, 0.1 GiB",
        run=gpt(16, 256, 2048, dim=256, layers=12, heads=8, kv_heads=4, hidden=640, tied=False),
        hosts=4,
        ranks=1,
        rate="20mbit",
        measured=False,
        gib=0.1,
        plans={
            "fsdp with recomputation": merged(fsdp(), RECOMPUTE),
            "zero 1, 4 micro-batches, with recomputation": merged(zero(1), micro_batches(4), RECOMPUTE),
            "4 stages, 16 micro-batches, none ahead": pipeline(16, stages=4, cuts=[3, 6, 9], ahead=0),
            "4 stages, 16 micro-batches, half recomputed": merged(
                pipeline(16, stages=4, cuts=[3, 6, 9]), RECOMPUTE_HALF
            ),
            "4 stages, 16 micro-batches, half recomputed, none ahead": merged(
                pipeline(16, stages=4, cuts=[3, 6, 9], ahead=0), RECOMPUTE_HALF
            ),
            "4 stages, 16 micro-batches, with recomputation": merged(pipeline(16, stages=4, cuts=[3, 6, 9]), RECOMPUTE),
            "4 stages, 8 micro-batches, with recomputation": merged(pipeline(8, stages=4, cuts=[3, 6, 9]), RECOMPUTE),
            "4 stages, 16 micro-batches, with recomputation, 2 ahead": merged(
                pipeline(16, stages=4, cuts=[3, 6, 9], ahead=2), RECOMPUTE
            ),
            "2 stages beside zero 1, 8 micro-batches, with recomputation": merged(
                zero(1), pipeline(8, stages=2, cuts=[6]), RECOMPUTE
            ),
        },
    ),
    Pair(  # 7.4 M weights, compute-bound: a replica has 118 MB of state, a rank of split stages 29 MB, of replicated
        # stages 44 MB; an image has some 11 MB of activations, and the limit is 64 MB
        name="mixer, 2x2, 1gbit, 0.06 GiB",
        run=mixer(32, patch=8, width=384, layers=6, token_hidden=192, channel_hidden=1536),
        hosts=2,
        ranks=2,
        rate="1gbit",
        measured=False,
        gib=0.06,
        plans={
            "fsdp, 4 micro-batches": merged(fsdp(), micro_batches(4)),
            "fsdp, 8 micro-batches": merged(fsdp(), micro_batches(8)),
            "fsdp, 2 micro-batches, with recomputation": merged(fsdp(), micro_batches(2), RECOMPUTE),
            "2 stages beside zero 1, 16 micro-batches, none ahead": merged(
                zero(1), pipeline(16, stages=2, cuts=[3], ahead=0)
            ),
            "2 stages beside zero 1, 8 micro-batches, with recomputation": merged(
                zero(1), pipeline(8, stages=2, cuts=[3]), RECOMPUTE
            ),
            "pipeline of split layers, 8 micro-batches, none ahead": merged(
                SPLIT_MIXER, pipeline(8, stages=2, cuts=[3], ahead=0)
            ),
            "pipeline of split layers, 16 micro-batches": merged(SPLIT_MIXER, pipeline(16, stages=2, cuts=[3])),
            "pipeline of split layers, 32 micro-batches": merged(SPLIT_MIXER, pipeline(32, stages=2, cuts=[3])),
            "pipeline of split layers, 8 micro-batches, with recomputation": merged(
                SPLIT_MIXER, pipeline(8, stages=2, cuts=[3]), RECOMPUTE
            ),
        },
    ),
)
