"""Compiles the kernel for a GPU that need not be here; a script, for an interpreted kernel cannot be."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoestring.models.rounding_kernel import GROUPS, dequantize_kernel

TYPES = {"weight": "*u8", "scales": "*fp16", "dense": "*bf16", "rows": "i32", "groups": "i32"}

if __name__ == "__main__":
    for bits in (8, 4):
        for capability in (86, 90):
            constants = {"BITS": bits, "GROUPS": GROUPS}
            source = ASTSource(dequantize_kernel, TYPES | dict.fromkeys(constants, "constexpr"), constexprs=constants)
            triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print("compiled")
