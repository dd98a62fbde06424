"""Compiles the kernels for a GPU that need not be here; a script, for interpreted kernels cannot be."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoestring.comm.codecs.fused import BLOCK
from shoestring.comm.codecs.fused_kernel import split
from shoestring.comm.codecs.lowrank import LEFT, MOST, OUTER, WIDE
from shoestring.comm.codecs.lowrank_kernel import left, outer, right

SPLIT = {"n": "i64", "scale": "fp32", "momentum": "fp32", "room": "i32", "indices": "*i64", "count": "*i32"}
LOW_RANK = {"g": "*bf16", "n": "i32", "m": "i32", "r": "i32"}


def compiled(kernel: Any, types: dict[str, str], warps: int = 4, **constants: Any) -> None:
    """For an H100, and for a GeForce, whose programs share less memory."""
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    for capability in (86, 90):
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": warps})
        assert made.metadata.shared <= 99 * 1024, (kernel, constants)


if __name__ == "__main__":
    for way in (False, True):
        compiled(split, SPLIT, MOMENTUM=way, BLOCK=BLOCK)
        compiled(outer, LOW_RANK, OUTER.num_warps, LEAVE=way, R=MOST, BN=OUTER.BN, BM=OUTER.BM)
    compiled(left, LOW_RANK, LEFT.num_warps, STEPS=4, R=MOST, BN=LEFT.BN, BM=LEFT.BM)
    compiled(right, LOW_RANK, WIDE.num_warps, STEPS=4, R=MOST, BN=WIDE.BN, BM=WIDE.BM)
    compiled(right, LOW_RANK, STEPS=4, R=4, BN=16, BM=128)
    print("compiled")
