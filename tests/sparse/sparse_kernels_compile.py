"""Compiles the kernels for a GPU that need not be here; a script, for interpreted kernels cannot be."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoestring.sparse.kernels import COLUMNS, ROW_GROUPS, TILES
from shoestring.sparse.triton_kernels import mvue_kernel, row_mask_kernel, tile_codes_kernel

ROWS = {"scores": "*bf16", "mask": "*u8", "groups": "i32"}
CODES = {"weight": "*bf16", "bank": "*fp32", "codes": "*u8", "tiles": "i32", "across": "i32"}
DRAWS = {"x": "*bf16", "estimate": "*bf16", "key": "*i32", "rows": "i32", "columns": "i32", "first": "i32"}


def compiled(kernel: Any, types: dict[str, str], **constants: Any) -> None:
    """For an H100, and for a GeForce, whose programs share less memory."""
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    for capability in (86, 90):
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target)
        assert made.metadata.shared <= 99 * 1024, (kernel, constants)


if __name__ == "__main__":
    compiled(row_mask_kernel, ROWS, BLOCK=ROW_GROUPS)
    for squares in (False, True):
        compiled(tile_codes_kernel, CODES, SQUARES=squares, PATTERNS=90, BLOCK=TILES, BANK=128)
    compiled(mvue_kernel, DRAWS, BLOCK=COLUMNS)
    print("compiled")
