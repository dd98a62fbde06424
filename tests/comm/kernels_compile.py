"""Compiles the kernels for a GPU that need not be here; a script, for interpreted kernels cannot be."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoestring.comm.codecs import bucket_kernel, fused_kernel, kernel_buckets, ternary, ternary_kernel
from shoestring.comm.codecs.grad_table import BLOCK, ROWS
from shoestring.comm.codecs.lowrank import LEFT, MOST, OUTER, WIDE
from shoestring.comm.codecs.lowrank_kernel import left, outer, right

ENTRIES = dict.fromkeys(("table", "indices", "ends"), "*i64") | dict.fromkeys(("scale", "momentum"), "fp32")
ENTRIES |= dict.fromkeys(("bits", "counts"), "*i32") | dict.fromkeys(("count", "stride", "blocks", "tensors"), "i32")
BYTES = dict.fromkeys(("codes", "sent", "fine"), "*u8")
BUCKETS = {"table": "*i64", **BYTES}
LOW_RANK = {"table": "*i64", "n": "i32", "m": "i32", "r": "i32"}


def compiled(kernel: Any, types: dict[str, str], warps: int = 4, **constants: Any) -> None:
    """For an H100, and for a GeForce, whose programs share less memory."""
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    for capability in (86, 90):
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": warps})
        assert made.metadata.shared <= 99 * 1024, (kernel, constants)


SIZES = ("tensors", "bucket", "width", "own", "low_key", "high_key", "rows", "row_buckets", "first", "last", "buckets")
BUCKETS |= dict.fromkeys((*SIZES, "stride", "code_stride", "scale_stride"), "i32")
HALF = {"DEPTH": 8, "KIND": 1, "FIRST": True, "TYPE": tl.bfloat16, "ALIGNED": True}


def bucketed(bits: int, top: int) -> None:
    """Of buckets of 512 entries in bf16, as many a program as on a GPU."""
    form = {"BITS": bits, "OFFSET": top or 1, "SHIFT": int(not top), "FEEDBACK": True, **HALF}
    form |= {"ROWS": kernel_buckets.BLOCK // 512, "PER": 8 // bits, "WIDE": 64 * bits}
    ways, warps = {"TOP": top, "STOCHASTIC": top > 0}, kernel_buckets.WARPS
    for measure in (False, True):
        compiled(bucket_kernel.encode, BUCKETS, warps, MEASURE=measure, **form, **ways)
    compiled(bucket_kernel.encode_average, BUCKETS, warps, RANKS=4, **form, **ways)
    compiled(bucket_kernel.decode, BUCKETS, warps, **form)


def keys_are_numbers() -> None:
    """Whatever they are: a key that is 1 is no constant, and one that is a multiple of 16 nothing new."""
    for kernel in (bucket_kernel.encode, bucket_kernel.encode_average, ternary_kernel.encode):
        assert {each.name for each in kernel.params if each.do_not_specialize} == set(bucket_kernel.KEYS)


def ternary_ones() -> None:
    form = {**HALF, "PER": 4, "WIDE": ternary.BUCKET // 4}
    large, small = ternary.LARGE["block"] // ternary.BUCKET, kernel_buckets.BLOCK // ternary.BUCKET
    compiled(ternary_kernel.measure, BUCKETS, ternary.LARGE["warps"], ROWS=large, **form)
    compiled(ternary_kernel.scale, {**BUCKETS, "clip": "fp32"}, BLOCK=ternary.BLOCK)
    compiled(ternary_kernel.encode, BUCKETS, ternary.LARGE["warps"], ROWS=large, **form)
    compiled(ternary_kernel.decode, BUCKETS, kernel_buckets.WARPS, RANKS=4, ROWS=small, **form)


def low_rank(aligned: bool) -> None:
    form = {"TYPE": tl.bfloat16, "ALIGNED": aligned}
    for way in (False, True):
        compiled(outer, LOW_RANK, OUTER.num_warps, LEAVE=way, R=MOST, BN=OUTER.BN, BM=OUTER.BM, **form)
    compiled(left, LOW_RANK, LEFT.num_warps, STEPS=4, R=MOST, BN=LEFT.BN, BM=LEFT.BM, **form)
    compiled(right, LOW_RANK, WIDE.num_warps, STEPS=4, R=MOST, BN=WIDE.BN, BM=WIDE.BM, **form)
    compiled(right, LOW_RANK, STEPS=4, R=4, BN=16, BM=128, **form)


def tables() -> None:
    """Of gradients where they lie."""
    for way in (False, True):
        form = {"ALIGNED": way, "KIND": 1, "TYPE": tl.bfloat16, "DEPTH": 7, "BLOCK": BLOCK}
        compiled(fused_kernel.split, ENTRIES, MOMENTUM=way, **form)
        compiled(fused_kernel.accelerate, ENTRIES, NESTEROV=way, **form)
        del form["ALIGNED"]
        compiled(fused_kernel.sample, ENTRIES, MOMENTUM=way, **form)
        compiled(fused_kernel.scatter, ENTRIES, **form)
    compiled(fused_kernel.collect, ENTRIES, DEPTH=7, ROWS=ROWS, WORDS=BLOCK // 32)


if __name__ == "__main__":
    tables()
    for way in (False, True):
        low_rank(way)
    for bits, top in ((4, 7), (8, 127), (1, 0)):
        bucketed(bits, top)
    ternary_ones()
    keys_are_numbers()
    print("compiled")
