"""Compiles the kernel of `fused` for a GPU that need not be here; a script, for an interpreted kernel cannot be."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from shoestring.comm.fused import BLOCK
from shoestring.comm.fused_kernel import split

TYPES = {"n": "i64", "scale": "fp32", "momentum": "fp32", "room": "i32", "indices": "*i64", "count": "*i32"}

if __name__ == "__main__":
    for momentum in (False, True):
        constants = {"MOMENTUM": momentum, "BLOCK": BLOCK}
        names: list[str] = split.arg_names  # pyright: ignore[reportFunctionMemberAccess]
        signature = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in names}
        source = ASTSource(split, signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print("compiled")
