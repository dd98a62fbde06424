"""The kernel does what torch's operations do; run as a script where Triton interprets it, and by a test on a GPU."""

from __future__ import annotations

import torch

from shoestring.models import rounding, rounding_kernel


def main(device: str) -> None:
    for rows, groups in ((1, 1), (16, 3), (37, 17), (64, 40)):
        for bits in (8, 4):
            weight = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(rows)) * 0.1
            packed, scales = rounding.pack(*rounding.quantize(weight, bits), bits)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                ours = rounding_kernel.dequantized(packed.to(device), scales.to(device), rows, dtype)
                wanted = rounding.plain_dequantize(packed, scales, rows, dtype)
                # Triton's interpreter cuts bits off where a GPU rounds.
                apart = 2**-7 if device == "cpu" and dtype is torch.bfloat16 else 0
                torch.testing.assert_close(ours.cpu(), wanted, rtol=apart, atol=0)


if __name__ == "__main__":
    main("cpu")
    print("as it must be")
