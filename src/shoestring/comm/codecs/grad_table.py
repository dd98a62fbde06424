"""Gradients as one flat vector that lies in many places, for kernels that read and write it there.

Copying them into one tensor and back moves six bytes an entry each way, where they are in bf16. With a table the sum of
gradient and residual moves ten, and what was selected is all that decoding touches, but for zeros in the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_, foreach_zero_

KINDS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 2048, 4  # entries that one program processes, all of one tensor
ROWS = 16  # blocks of which one program collects what is marked


def has_kernels(device: torch.device) -> bool:
    """Whether Triton compiles for this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def takes(tensors: Iterable[Tensor]) -> bool:
    """Whether a table can be made of these tensors."""
    return all(each.dtype in KINDS and each.is_contiguous() and has_kernels(each.device) for each in tensors)


class GradTable:
    """The entries of contiguous tensors in fp32, bf16 and fp16, numbered one tensor after the other.

    `fused_kernel` says what is in the table itself.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [each for each in tensors if each.numel()]
        device = self.tensors[0].device
        starts = list(accumulate((each.numel() for each in self.tensors), initial=0))
        first = list(accumulate((-(-each.numel() // BLOCK) for each in self.tensors), initial=0))
        places, kinds = [each.data_ptr() for each in self.tensors], [KINDS.index(each.dtype) for each in self.tensors]
        table = torch.tensor([[*places, 0], starts, first, [*kinds, 0]])
        pinned = table.pin_memory() if device.type == "cuda" else table
        self.table = pinned.to(device, non_blocking=True)
        self.n, self.blocks, self.kinds = starts[-1], first[-1], sorted(set(kinds))
        self.depth = (len(kinds) - 1).bit_length()
        self.aligned = all(place % 16 == 0 for place in places) and all(start % 8 == 0 for start in starts[:-1])

    def read_into(self, flat: Tensor) -> None:
        """Copy all entries into a flat tensor."""
        parts = flat.split([each.numel() for each in self.tensors])
        foreach_copy_([part.view(each.shape) for part, each in zip(parts, self.tensors, strict=True)], self.tensors)

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
        """Build M = scale g + e + momentum u, and mark what is above a threshold (1,).

        Returns:
            Marks, and of each block their number, and 0, or NaN if M is not finite there; see the kernel.
        """
        from shoestring.comm.codecs.fused_kernel import split

        bits = torch.empty(self.blocks, BLOCK // 32, dtype=torch.int32, device=M.device)
        outputs = bits, torch.empty_like(bits[:, 0]), M.new_empty(self.blocks)
        inputs = (M, e, e if u is None else u, threshold, scale, momentum)
        self._launch(split, self.blocks, *inputs, *outputs, MOMENTUM=u is not None, ALIGNED=self._is_aligned(M, e, u))
        return outputs

    def collect(self, M: Tensor, bits: Tensor, ends: Tensor, marks: int) -> tuple[Tensor, Tensor]:
        """Ascending indices of the marked entries of M, and these; `ends` counts the marks up to each block's end."""
        from shoestring.comm.codecs.fused_kernel import collect

        indices, values = torch.empty(marks, dtype=torch.int64, device=M.device), M.new_empty(marks)
        if marks:
            args = (self.table, M, bits, ends, indices, values, self.blocks, len(self.tensors))
            collect[(-(-self.blocks // ROWS),)](*args, DEPTH=self.depth, ROWS=ROWS, WORDS=BLOCK // 32)
        return indices, values

    def accelerate(self, u: Tensor, momentum: float, *, nesterov: bool) -> None:
        """u = m u + g, or m (u + g)."""
        from shoestring.comm.codecs.fused_kernel import accelerate

        self._launch(accelerate, self.blocks, u, momentum, NESTEROV=nesterov, ALIGNED=self._is_aligned(u))

    def write(self, indices: Tensor, flat: Tensor) -> None:
        """Replace the entries by those of `flat` at some indices, in any order, and by zero elsewhere."""
        from shoestring.comm.codecs.fused_kernel import scatter

        foreach_zero_(self.tensors)
        if indices.numel():
            self._launch(scatter, -(-indices.numel() // BLOCK), flat, indices.contiguous(), indices.numel())

    def _is_aligned(self, *flats: Tensor | None) -> bool:
        """Whether a block's first entries lie at multiples of 16 bytes, here and in flat tensors in fp32."""
        return self.aligned and all(flat is None or flat.data_ptr() % 16 == 0 for flat in flats)

    def _launch(self, kernel: Any, programs: int, *args: Any, **ways: Any) -> None:
        """Launch a kernel once for each data type."""
        import triton.language as tl

        for kind in self.kinds:
            kernel[(programs,)](
                self.table,
                *args,
                len(self.tensors),
                **ways,
                KIND=kind,
                TYPE=(tl.float32, tl.bfloat16, tl.float16)[kind],
                DEPTH=self.depth,
                BLOCK=BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,  # so that a product is rounded before it is added, as on a CPU
            )
