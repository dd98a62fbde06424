"""Treats gradients scattered in memory as one flat vector, for kernels that read and write them in place.

Copying bf16 gradients into one fp32 tensor and back would move six bytes per entry each way. With a table of addresses,
adding gradient and residual moves ten bytes per entry, and decoding writes only zeros and the selected entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_, foreach_zero_
from shoestring.naming import installed

KINDS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 2048, 4  # entries per program (all of one tensor), and warps per program
ROWS = 16  # blocks that one Triton program reads when it collects marked entries


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels can run on this device."""
    return device.type == "cuda" and installed("triton")


def takes(tensors: Iterable[Tensor]) -> bool:
    """Whether a `GradTable` can be built from these tensors."""
    return all(tensor.dtype in KINDS and tensor.is_contiguous() and has_kernels(tensor.device) for tensor in tensors)


class GradTable:
    """Table of contiguous tensors in fp32, bf16 or fp16; entries are numbered consecutively across the tensors.

    `fused_kernel` describes the layout of the table.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        device = self.tensors[0].device
        starts = list(accumulate((tensor.numel() for tensor in self.tensors), initial=0))
        first = list(accumulate((-(-tensor.numel() // BLOCK) for tensor in self.tensors), initial=0))
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        kinds = [KINDS.index(tensor.dtype) for tensor in self.tensors]
        table = torch.tensor([[*addresses, 0], starts, first, [*kinds, 0]])
        pinned = table.pin_memory() if device.type == "cuda" else table  # so that the copy is asynchronous
        self.table = pinned.to(device, non_blocking=True)
        self.n, self.blocks, self.kinds = starts[-1], first[-1], sorted(set(kinds))
        self.depth = (len(kinds) - 1).bit_length()
        self.aligned = all(address % 16 == 0 for address in addresses) and all(start % 8 == 0 for start in starts[:-1])

    def read_into(self, flat: Tensor) -> None:
        """Copy the entries of all tensors into a flat tensor."""
        parts = flat.split([tensor.numel() for tensor in self.tensors])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]
        foreach_copy_(views, self.tensors)

    def sample(self, stride: int, e: Tensor, u: Tensor | None, scale: float, momentum: float) -> Tensor:
        """Every stride-th entry of M = scale g + e + momentum u."""
        from shoestring.comm.codecs.fused_kernel import sample

        out = e.new_empty(-(-self.n // stride))
        inputs = (e, e if u is None else u, out, len(out), stride, scale, momentum)
        self._launch(sample, -(-len(out) // BLOCK), *inputs, MOMENTUM=u is not None)
        return out

    def split(
        self, M: Tensor, e: Tensor, u: Tensor | None, threshold: Tensor, scale: float, momentum: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build M = scale g + e + momentum u, and mark the entries above a threshold (1,).

        Returns:
            Marks as bits; the number of marks in each block; and for each block 0, or NaN if an entry of the block is
            not finite.
        """
        from shoestring.comm.codecs.fused_kernel import split

        bits = torch.empty(self.blocks, BLOCK // 32, dtype=torch.int32, device=M.device)
        outputs = bits, torch.empty_like(bits[:, 0]), M.new_empty(self.blocks)
        inputs = (M, e, e if u is None else u, threshold, scale, momentum)
        self._launch(split, self.blocks, *inputs, *outputs, MOMENTUM=u is not None, ALIGNED=self._is_aligned(M, e, u))
        return outputs

    def collect(self, M: Tensor, bits: Tensor, ends: Tensor, marks: int) -> tuple[Tensor, Tensor]:
        """Return the ascending indices and the values of the marked entries; `ends` counts the marks up to the end of
        each block."""
        from shoestring.comm.codecs.fused_kernel import collect

        indices, values = torch.empty(marks, dtype=torch.int64, device=M.device), M.new_empty(marks)
        if marks:
            args = (self.table, M, bits, ends, indices, values, self.blocks, len(self.tensors))
            collect[(-(-self.blocks // ROWS),)](*args, DEPTH=self.depth, ROWS=ROWS, WORDS=BLOCK // 32)
        return indices, values

    def accelerate(self, u: Tensor, momentum: float, *, nesterov: bool) -> None:
        """Set u to momentum u + g, or to momentum (u + g) if `nesterov`."""
        from shoestring.comm.codecs.fused_kernel import accelerate

        self._launch(accelerate, self.blocks, u, momentum, NESTEROV=nesterov, ALIGNED=self._is_aligned(u))

    def write(self, indices: Tensor, flat: Tensor) -> None:
        """Copy the entries of `flat` at `indices` (in any order) into the tensors, and write zeros elsewhere."""
        from shoestring.comm.codecs.fused_kernel import scatter

        foreach_zero_(self.tensors)
        if indices.numel():
            self._launch(scatter, -(-indices.numel() // BLOCK), flat, indices.contiguous(), indices.numel())

    def _is_aligned(self, *flats: Tensor | None) -> bool:
        """Whether every block starts at a multiple of 16 bytes, in the table's tensors and in the fp32 tensors
        `flats`."""
        return self.aligned and all(flat is None or flat.data_ptr() % 16 == 0 for flat in flats)

    def _launch(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """Launch a kernel once for each data type."""
        import triton.language as tl

        for kind in self.kinds:
            kernel[(programs,)](
                self.table,
                *args,
                len(self.tensors),
                **constants,
                KIND=kind,
                TYPE=(tl.float32, tl.bfloat16, tl.float16)[kind],
                DEPTH=self.depth,
                BLOCK=BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,  # so that a product is rounded before it is added, as on a CPU
            )
