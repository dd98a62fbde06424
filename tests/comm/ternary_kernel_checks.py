"""What the kernels of `ternary` must do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

import os
from functools import partial

import torch
from bucket_kernel_checks import HALF, RANKS, SEED, assert_knows_what_it_knew, assert_tells, drawn, gradients, noise_of

from shoestring.comm.codecs import fused, ternary
from shoestring.comm.codecs.bits import unpack
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.terngrad import TernGradCodec


def assert_does_what_the_formulas_say(sizes: list[int], dtypes: list[torch.dtype], device: str) -> None:
    """Levels bit by bit for the scales that were found, which are within a rounding of sums."""
    flats = drawn(sizes, dtypes, device)
    flats[1].zero_()
    whole, ours = [flat.float() for flat in flats], ternary.TernaryEntries(flats)
    found = ours.scales(2.5)
    expected = [torch.minimum(each.abs().amax(), 2.5 * each.square().mean().sqrt()) for each in whole]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=0)

    layout = ours.layout
    M = layout.parts(10**9)[0].read([whole])
    s = found.repeat_interleave(torch.tensor(layout.starts, device=device).diff())[:, None]
    noise = noise_of(layout, 0, layout.buckets, SEED)
    q = ((torch.where(s > 0, M * (1 / s), 0).clamp(-2, 2) + noise) + 2.0**-17).round().clamp(-1, 1)
    codes = ours.encode(found, SEED)
    assert torch.equal(unpack(codes, 2, ternary.BUCKET).float() - 1, q)

    others = torch.randint(3, (3, layout.buckets, ternary.BUCKET), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    planes = others.unflatten(2, (4, -1))
    packed = sum(planes[:, :, plane] << 2 * plane for plane in range(4)).to(torch.uint8)
    ours.decode(packed, found)
    expected = [torch.empty_like(flat) for flat in flats]
    layout.parts(10**9)[0].write((others - 1).sum(0).float() * (s / 3), expected)
    for one, other in zip(flats, expected, strict=True):  # the interpreter cuts bf16 off where a GPU rounds
        cut = 2.0**-7 if one.dtype == torch.bfloat16 and device == "cpu" else 0.0
        torch.testing.assert_close(one, other, rtol=cut, atol=0)


def assert_is_unbiased(device: str) -> None:
    """The mean of many exchanges is the mean of the clipped gradients, and all ranks have the same bits."""
    codecs, rounds = [TernGradCodec() for _ in range(RANKS)], 10
    total = torch.zeros(130, device=device)
    for step in range(rounds):
        grads = gradients(0, device)
        run_lockstep(codecs, grads, step)
        assert torch.equal(grads[0]["long"], grads[1]["long"])
        total += grads[0]["long"]
    fresh = torch.stack([each["long"] for each in gradients(0, device)])
    s = (2.5 * fresh.square().mean(1).sqrt()).minimum(fresh.abs().amax(1)).amax()
    error = total / rounds - fresh.clamp(-s, s).mean(0)
    assert error.abs().max() < 5 * s / (rounds * RANKS) ** 0.5
    assert error.square().mean().sqrt() < 0.6 * s / (rounds * RANKS) ** 0.5


def main(device: str) -> None:
    usual = ternary.BLOCK
    for ternary.BLOCK in (2, usual):  # few buckets at once take many steps
        assert_does_what_the_formulas_say([3, 8, 5000, 1030], [torch.float32, *HALF], device)
    assert_does_what_the_formulas_say([2048, 16], [torch.bfloat16], device)
    assert_is_unbiased(device)
    assert_tells(partial(TernGradCodec), device)
    assert_knows_what_it_knew(partial(TernGradCodec), device, 1, bad=True, waits=False)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"]
    fused.is_available = lambda device: True
    main("cpu")
    print("as it must be")
