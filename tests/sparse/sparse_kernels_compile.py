"""Compiles the kernels for a GPU that need not be here; a script, for interpreted kernels cannot be."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoestring.sparse.gate_kernels import gated_backward_kernel, gated_kernel
from shoestring.sparse.gates import ACTIVATIONS
from shoestring.sparse.kernels import COLUMNS, GROUPS, ROW_GROUPS, SQUARE, TILES, WARPS
from shoestring.sparse.triton_kernels import (
    mvue_kernel,
    prune_kernel,
    row_mask_kernel,
    shrink_kernel,
    tile_codes_kernel,
)

ROWS = {"scores": "*bf16", "mask": "*u8", "groups": "i32"}
CODES = {"weight": "*bf16", "bank": "*fp32", "codes": "*u8", "tiles": "i32", "across": "i32"}
TENSORS = {"x": "*bf16", "estimate": "*bf16", "key": "*i32", "weight": "*fp32", "mask": "*u8", "scale": "*fp32"}


def compiled(kernel: Any, types: dict[str, str], warps: int = 4, **constants: Any) -> None:
    """For an H100, and for a GeForce, whose programs share less memory."""
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    for capability in (86, 90):
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": warps})
        assert made.metadata.shared <= 99 * 1024, (kernel, constants)


def numbered(kernel: Any, tensors: dict[str, str]) -> dict[str, str]:
    """Types of what a kernel takes: tensors, and numbers of 32 bits."""
    return dict.fromkeys(kernel.arg_names, "i32") | tensors


if __name__ == "__main__":
    compiled(row_mask_kernel, ROWS, BLOCK=ROW_GROUPS)
    for squares in (False, True):
        compiled(tile_codes_kernel, CODES, SQUARES=squares, PATTERNS=90, BLOCK=TILES, BANK=128)
    for x, estimate in (("x_column", "estimate_column"), ("x_row", "estimate_row"), ("x_column", "estimate_row")):
        compiled(mvue_kernel, numbered(mvue_kernel, TENSORS), GROUPS=GROUPS, COLUMNS=COLUMNS, **{x: 1, estimate: 1})
    kinds = numbered(prune_kernel, TENSORS | {"straight": "*bf16", "transposed": "*bf16"})
    for straight, transposed in ((True, True), (True, False), (False, True)):
        compiled(prune_kernel, kinds, warps=WARPS, STRAIGHT=straight, TRANSPOSED=transposed, BLOCK=SQUARE)
    compiled(shrink_kernel, numbered(shrink_kernel, TENSORS | {"shrunk": "*bf16"}), BLOCK=ROW_GROUPS)
    tensors = dict.fromkeys(("gate", "up", "out", "grad", "of_gate", "of_up"), "*bf16")
    for kernel in (gated_kernel, gated_backward_kernel):
        for activation in ACTIVATIONS:
            for side in ("row", "column"):
                ones = {name: 1 for name in kernel.arg_names if name.endswith(f"_{side}")}
                constants = {"ACTIVATION": activation, "GATED": side == "row", "BLOCK": SQUARE}
                compiled(kernel, numbered(kernel, tensors), warps=WARPS, **constants, **ones)
    print("compiled")
