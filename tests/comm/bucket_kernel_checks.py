"""What the kernels of `kernel_buckets` must do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
from torch import Tensor

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.bits import packed_bytes
from shoestring.comm.codecs.buckets import BucketLayout
from shoestring.comm.codecs.codec import Codec, ExchangeContext, Grads, advance
from shoestring.comm.codecs.kernel_buckets import KernelBuckets, keys
from shoestring.comm.codecs.lockstep import answer_all, run_lockstep
from shoestring.comm.codecs.quantize import QuantizeCodec, ReduceScatterCodec
from shoestring.comm.codecs.sign import SignCodec
from shoestring.comm.codecs.verdict import ExchangeVerdict

SEED = 0x1234_5678_9ABC
HALF = torch.bfloat16, torch.float16


def drawn(sizes: list[int], dtypes: list[torch.dtype], device: str, seed: int = 0) -> list[Tensor]:
    """From the second entry of their memory on, where it is odd: nothing is aligned then."""
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    found = []
    for number, size in enumerate(sizes):
        drawn = torch.randn(size + 1, generator=generator) * 10 ** (number % 5 - 2)
        found.append(drawn.to(device, dtypes[number % len(dtypes)])[size % 2 :][:size])
    return found


def hashed(h: Tensor) -> Tensor:
    """`bucket_kernel.mix`, in int64."""
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return h ^ (h >> 15)


def noise_of(layout: BucketLayout, first: int, last: int, seed: int) -> Tensor:
    one, other = keys(seed)
    numbers = torch.arange(first * layout.bucket, last * layout.bucket, device=layout.device)
    h = hashed((hashed((numbers & 0xFFFFFFFF) ^ one) + other) & 0xFFFFFFFF)
    return ((h >> 16) - 32768).float().view(-1, layout.bucket) * 2.0**-16


def levels(x: Tensor, count: Tensor, codec: ReduceScatterCodec, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Levels and scales of buckets, each operation rounded by itself."""
    if not codec.top:
        return torch.where(x >= 0, 1.0, -1.0), x.abs().sum(-1, keepdim=True) / count.clamp(min=1)
    scale = (x.abs().amax(-1, keepdim=True) + (x * 0).sum(-1, keepdim=True)) / codec.top
    inverse = torch.where(scale > 0, 1 / scale, 0)
    q = x * torch.where(inverse.isfinite() & scale.isfinite(), inverse, 0)
    if noise is not None:
        q = (q + noise) + 2.0**-17
    return q.nan_to_num_(0, 0, 0).round_().clamp_(-codec.top, codec.top), scale


def assert_does_what_the_formulas_say(
    codec: ReduceScatterCodec, sizes: list[int], dtypes: list[torch.dtype], ranks: int, device: str
) -> None:
    """Bit by bit, but for the sums of magnitudes that scale signs."""
    flats = drawn(sizes, dtypes, device)
    flats[0][::3] = 0
    residuals = [each.float() for each in drawn(sizes, [torch.float32], device, 7)] if codec.feedback else []
    layout, own, width = BucketLayout(flats, ranks, codec.bucket), ranks // 2, packed_bytes(codec.bucket, codec.bits)
    whole = layout.parts(10**9)[0]
    M, count = whole.read([flats, residuals] if residuals else [flats]), layout.entries()
    count[layout.starts[-1] :] = 0
    before = [each.clone() for each in flats]
    kernels = KernelBuckets(codec, layout, flats, residuals, SEED if codec.stochastic else None, ExchangeVerdict())
    codes = torch.zeros(ranks, layout.buckets, width, dtype=torch.uint8, device=device)
    scales, first = torch.full((ranks, layout.buckets, 1), -1.0, device=device), own * layout.buckets
    last = first + layout.buckets
    kernels.measure(own, scales[own])
    assert torch.equal(scales[own], M[first:last].abs().amax(-1, keepdim=True))
    for rows in (slice(0, own), slice(own + 1, ranks)):
        kernels.encode(rows, codes[rows].flatten(0, 1), scales[rows].flatten(0, 1))
    assert all(torch.equal(one, other) for one, other in zip(flats, before, strict=True))

    noise = noise_of(layout, 0, ranks * layout.buckets, SEED) if codec.stochastic else None
    q, scale = levels(M, count, codec, noise)
    others = torch.ones(ranks, layout.buckets, dtype=torch.bool, device=device)
    others[own] = False
    their, close = others.flatten(), 0.0 if codec.top else 1e-6
    torch.testing.assert_close(scales.view(-1, 1)[their], scale[their], rtol=close, atol=0)
    assert torch.equal(codec.unpack(codes).flatten(0, 1)[their].float(), q[their])
    left = M - q * scales.view(-1, 1)

    generator = torch.Generator().manual_seed(1)
    sent = torch.randint(256, codes.shape, dtype=torch.uint8, generator=generator).to(device)
    of_sent = torch.rand(scales.shape, generator=generator).to(device)
    apart = torch.nn.functional.pad(sent.flatten(1), (0, 16))[:, : sent[0].numel()].unflatten(1, sent.shape[1:])
    total = torch.zeros_like(M[first:last])
    for rank in range(ranks):
        total += M[first:last] if rank == own else codec.unpack(sent[rank]).float() * of_sent[rank]
    average = torch.where(torch.arange(codec.bucket, device=device) < count[first:last], total / ranks, 0)
    kernels.encode_average(own, apart, of_sent, codes[own], scales[own])
    q, scale = levels(average, count[first:last], codec, None if noise is None else noise[first:last])
    torch.testing.assert_close(scales[own], scale, rtol=close, atol=0)
    assert torch.equal(codec.unpack(codes[own]).float(), q)
    left[first:last] = (average - q * scales[own]) * ranks

    kernels.remember(codes, scales)
    decoded = codec.unpack(sent).float() * of_sent
    kernels.decode(apart, of_sent)
    expected = [torch.empty_like(flat) for flat in flats]
    whole.write(decoded.flatten(0, 1), expected)
    for one, other in zip(flats, expected, strict=True):  # the interpreter cuts bf16 off where a GPU rounds
        cut = 2.0**-7 if one.dtype == torch.bfloat16 and device == "cpu" else 0.0
        torch.testing.assert_close(one, other, rtol=cut, atol=0)
    if residuals:
        errors = [torch.empty_like(each) for each in residuals]
        whole.write(left, errors)
        assert all(torch.equal(one, other) for one, other in zip(residuals, errors, strict=True))


RANKS = 2
SHAPES = {"matrix": (9, 15), "bias": (7,), "none": (0, 4), "long": (130,), "scalar": ()}


def gradients(seed: int, device: str) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}
        for _ in range(RANKS)
    ]


def assert_the_codec_does_the_same(make: Callable[[], Codec], device: str) -> None:
    """Over steps of some ranks, as by torch's operations: averages, and residuals."""
    kernels, found = fused.is_available, []
    for available in (kernels, lambda device: False):
        fused.is_available = available
        codecs = [make() for _ in range(RANKS)]
        for step in range(2):
            grads = gradients(step, device)
            run_lockstep(codecs, grads, step)
            assert all(torch.equal(each[name], grads[0][name]) for each in grads for name in SHAPES)
        found.append([*grads[0].values(), *(each for of in codecs[1].state.values() for each in of.values())])
    fused.is_available = kernels
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def assert_knows_what_it_knew(
    make: Callable[[], Codec], device: str, yields: int, bad: bool, waits: bool, size: float = 1.0
) -> None:
    """Given up at a yield; by its driver, or by a verdict on the device, which makes the gradients NaN, too.

    Beside gradients of great `size` residuals may be lost to rounding, but nothing is added to them.
    """
    codecs = [make() for _ in range(RANKS)]
    run_lockstep(codecs, gradients(0, device), 0)
    before = copy.deepcopy([codec.state_dict() for codec in codecs])
    grads, verdicts = gradients(2, device), [ExchangeVerdict() for _ in codecs]
    if size > 1:
        grads = [{name: (grad.float() * size).to(grad.dtype) for name, grad in own.items()} for own in grads]
    if bad:
        grads[1]["matrix"][0, 0] = torch.inf  # in a row that this rank sends
    codings = [
        codec.code(own, ExchangeContext(rank, RANKS, 2, verdict=verdicts[rank]))
        for rank, (codec, own) in enumerate(zip(codecs, grads, strict=True))
    ]
    requests = [advance(coding) for coding in codings]
    for number in range(1, codecs[0].stages + 1):
        if waits and number == yields:
            break
        for verdict in verdicts:
            verdict.fine = torch.tensor(number < yields, device=device)
        answers = answer_all([own for own in requests if own is not None])
        requests = [advance(coding, own) for coding, own in zip(codings, answers, strict=True)]
    for coding in codings:
        coding.close()
    assert waits or all(each.isnan().all() for own in grads for each in own.values())
    for codec, state in zip(codecs, before, strict=True):
        if size > 1:
            pairs = zip(codec.state_dict()["residual"].values(), state["residual"].values(), strict=True)
            assert all((now.abs() <= 1.001 * was.abs()).all() for now, was in pairs)
        else:
            torch.testing.assert_close(codec.state_dict(), state, rtol=1e-5, atol=1e-5)


def assert_tells(make: Callable[[], Codec], device: str) -> None:
    """What is not finite on one rank reaches all in the first answers."""
    whole = float("inf")
    for value, name, place in ((float("nan"), "matrix", 0), (float("nan"), "long", 129), (whole, "matrix", 134)):
        grads, codecs = gradients(0, device), [make() for _ in range(RANKS)]
        grads[1][name].view(-1)[place] = value  # of a row that it sends, of its own, and of a bucket's end
        context = [ExchangeContext(rank, RANKS, 0) for rank in range(RANKS)]
        codings = [codec.code(own, at) for codec, own, at in zip(codecs, grads, context, strict=True)]
        answers = answer_all([advance(coding) or [] for coding in codings])
        for own, coding in zip(answers, codings, strict=True):
            assert not all(each.isfinite().all() for each in own if each.is_floating_point())
            coding.close()


def quantise(bits: int, rounding: str, bucket: int = 32) -> Callable[[], QuantizeCodec]:
    return lambda: QuantizeCodec(bits, bucket=bucket, rounding=rounding, feedback=rounding == "nearest")  # pyrefly: ignore


def main(device: str) -> None:
    sizes, mixed = [1, 70, 33, 100], [torch.float32, *HALF]
    for bits, rounding, dtypes, bucket, ranks in (
        (4, "nearest", mixed, 32, 1),
        (4, "nearest", [torch.bfloat16], 32, 3),
        (4, "stochastic", [torch.float32], 7, 2),
        (8, "nearest", [torch.float32], 7, 3),
        (8, "stochastic", mixed, 32, 2),
    ):
        make = quantise(bits, rounding, bucket)
        assert_does_what_the_formulas_say(make(), sizes, dtypes, ranks, device)
    assert_does_what_the_formulas_say(quantise(4, "nearest", 256)(), [2048, 512], [torch.float32], 2, device)
    for bucket, ranks in ((64, 3), (20, 1)):
        assert_does_what_the_formulas_say(
            SignCodec(bucket=bucket), sizes, [torch.float32, torch.bfloat16], ranks, device
        )
    guarding = [quantise(4, "nearest"), lambda: SignCodec(bucket=32), quantise(8, "nearest")]
    for make in guarding[:2]:
        assert_the_codec_does_the_same(make, device)
    assert_tells(guarding[0], device)
    assert_knows_what_it_knew(guarding[0], device, 1, bad=True, waits=True)
    assert_knows_what_it_knew(guarding[2], device, 1, bad=True, waits=False)
    assert_knows_what_it_knew(guarding[0], device, 2, bad=False, waits=True)
    assert_knows_what_it_knew(guarding[1], device, 2, bad=False, waits=False)
    assert_knows_what_it_knew(guarding[1], device, 2, bad=False, waits=False, size=1e36)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"]
    fused.is_available = lambda device: True
    main("cpu")
    print("as it must be")
