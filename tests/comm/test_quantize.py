"""Quantised owner-reduce: what each rounding promises, what is conserved, and what travels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ranks import totals

from shoestring.comm.codecs.buckets import BucketLayout
from shoestring.comm.codecs.codec import ExchangeContext, Grads, advance
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.native_buckets import NativeBuckets, kernels
from shoestring.comm.codecs.quantize import QuantizeCodec, TorchBuckets, add_noise_
from shoestring.comm.codecs.sign import SignCodec

SHAPES = {"matrix": (37, 40), "bias": (7,), "long": (1030,), "scalar": ()}
RANKS = 3


def gradients(seed: int, ranks: int = RANKS, dtype: torch.dtype = torch.float32) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def mean(grads: list[Grads]) -> Grads:
    return {name: torch.stack([each[name].float() for each in grads]).mean(0) for name in grads[0]}


def test_a_bucket_never_crosses_parameters():
    layout = BucketLayout([torch.randn(5), torch.randn(9), torch.randn(8)], rows=2, bucket=4)
    assert (layout.rows, layout.buckets) == (2, 4)
    assert layout.entries().flatten().tolist() == [4, 1, 4, 4, 1, 4, 4, 4]  # the last one belongs to nobody
    (whole,) = layout.parts(step=100)
    owners = [set(bucket.tolist()) - {0.0} for bucket in whole.read([[torch.full((n,), n + 0.0) for n in (5, 9, 8)]])]
    assert owners == [{5}, {5}, {9}, {9}, {9}, {8}, {8}, set()]


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    rows=st.integers(1, 4),
    bucket=st.integers(2, 9),
    step=st.integers(1, 9),
)
@settings(max_examples=60)
def test_parts_are_the_whole_and_what_is_written_is_read(sizes, rows, bucket, step):
    flats, more = ([torch.randn(size).to(dtype) for size in sizes] for dtype in (torch.bfloat16, torch.float32))
    layout = BucketLayout(flats, rows, bucket)
    (whole,) = layout.parts(step=10**6)
    sums = whole.read([flats, more])
    padded = [torch.cat([one + other, torch.zeros(-len(one) % bucket)]) for one, other in zip(flats, more, strict=True)]
    expected = torch.cat([*padded, torch.zeros(sums.numel() - sum(map(len, padded)))])
    assert torch.equal(sums.flatten(), expected)
    assert torch.equal(torch.cat([part.read([flats, more]) for part in layout.parts(step)]), sums)
    by_rows = [
        torch.cat([part.read([flats, more]) for part in layout.parts(step, row, row + 1)]) for row in range(rows)
    ]
    assert torch.equal(torch.cat(by_rows), sums)
    copies = [torch.zeros(size) for size in sizes]
    for part in layout.parts(step):
        part.write(part.read([more]), copies)
    assert all(torch.equal(copy, each) for copy, each in zip(copies, more, strict=True))


def test_bits_that_the_compiled_loops_do_not_pack_are_refused():
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        QuantizeCodec(3)


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    bucket=st.sampled_from([2, 7, 16, 33]),
    bits=st.sampled_from([1, 4, 8]),
    feedback=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_compiled_loops_do_what_torchs_operations_do(sizes, ranks, bucket, bits, feedback, seed):
    """Levels and scales are the same bits, and errors within a rounding of the product that is subtracted."""
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(size, generator=generator) * 10 ** (size % 5 - 2) for size in sizes]
    residuals = [torch.randn(size, generator=generator) for size in sizes] if feedback else []
    flats[0][::3] = 0
    codec = (
        SignCodec(bucket=bucket)
        if bits == 1
        else QuantizeCodec(bits, bucket=bucket, rounding="nearest", feedback=feedback)
    )
    layout, own = BucketLayout(flats, ranks, bucket), ranks - 1
    size = (ranks, layout.buckets, bucket)
    drawn = torch.randint(-codec.top, codec.top + 1, size, dtype=torch.int8, generator=generator)
    if bits == 1:
        drawn = drawn.new_ones(size) - 2 * torch.randint(2, size, dtype=torch.int8, generator=generator)
    of_sent = torch.rand(ranks, layout.buckets, 1, generator=generator)
    used = torch.arange(ranks * layout.buckets)[:, None] < layout.starts[-1]
    of_sent *= used.view(ranks, layout.buckets, 1)[own]
    there = (torch.arange(bucket) < layout.entries()) & used
    drawn *= there.view(ranks, layout.buckets, bucket)[own]  # nobody sends anything in the place of padding
    sent = torch.stack([codec.pack(each) for each in drawn])
    beside = torch.nn.functional.pad(sent.flatten(1), (0, 16))  # rows of what is gathered have others between them
    sent = beside[:, : sent[0].numel()].unflatten(1, sent.shape[1:])
    found = []
    for kind in ("native", "torch"):
        ours, left = [flat.clone() for flat in flats], [each.clone() for each in residuals]
        buckets = (
            NativeBuckets(layout, ours, left, bits, None)
            if kind == "native"
            else TorchBuckets(codec, layout, ours, left, generator)
        )
        count = ranks * layout.buckets
        codes, scales = torch.zeros(count, sent.shape[-1], dtype=torch.uint8), torch.zeros(count, 1)
        largest, exact = torch.zeros(layout.buckets, 1), slice(own * layout.buckets, count)
        buckets.measure(own, largest)
        buckets.encode(slice(0, own), codes[: exact.start], scales[: exact.start])
        buckets.encode_average(own, sent, of_sent, codes[exact], scales[exact])
        buckets.decode(codes.unflatten(0, (ranks, -1)), scales.unflatten(0, (ranks, -1)))
        found.append((codec.unpack(codes), scales, largest, ours, left))
    ours, torchs = found
    assert torch.equal(ours[2], torchs[2]) and torch.equal(ours[0][: exact.start], torchs[0][: exact.start])
    torch.testing.assert_close(ours[1], torchs[1], rtol=1e-6, atol=0)
    # A mean over the ranks that lies halfway between two levels may go either way: sums are rounded differently.
    apart = (ours[0].short() - torchs[0].short()).abs()
    between = 2 if bits == 1 else 1
    assert apart.max() <= between and apart.sum() <= between
    if not apart.any():
        for one, other in zip(ours[3] + ours[4], torchs[3] + torchs[4], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 20, 36])
@pytest.mark.parametrize("bits", [8, 1])
def test_the_compiled_loops_show_what_is_not_finite(wrong, at, bits):
    flat = torch.ones(37)
    flat[at] = wrong
    buckets = NativeBuckets(BucketLayout([flat], 1, 64), [flat], [], bits, None)
    codes, scales, largest = torch.ones(1, 64, dtype=torch.uint8), torch.zeros(1, 1), torch.zeros(1, 1)
    buckets.measure(0, largest)
    buckets.encode(slice(0, 1), codes, scales)
    assert not scales.isfinite().any() and not largest.isfinite().any()
    assert bits == 1 or not codes.any()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_blocks_do_not_change_what_comes_out(rounding, monkeypatch):
    """As in one block, which other devices work with; noise is drawn in the same order."""
    found: list[list[torch.Tensor]] = []
    for block in (64, 2**20):
        monkeypatch.setattr("shoestring.comm.codecs.buckets.BLOCK", block)
        codecs = [QuantizeCodec(4, bucket=7, rounding=rounding, feedback=True) for _ in range(RANKS)]
        grads = gradients(0)
        for step in range(3):
            grads = gradients(step)
            run_lockstep(codecs, grads, step)
        found.append([*grads[0].values(), *codecs[1].state["residual"].values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(bits):
    """The mean of many exchanges of the same gradients, each entry within 5 of its standard errors."""
    truth, trials = mean(gradients(0)), 250
    first, second = torch.zeros(SHAPES["matrix"]), torch.zeros(SHAPES["matrix"])
    codecs = [QuantizeCodec(bits, bucket=64) for _ in range(RANKS)]
    for step in range(trials):
        grads = gradients(0)
        run_lockstep(codecs, grads, step)
        error = grads[0]["matrix"] - truth["matrix"]
        first += error / trials
        second += error**2 / trials
    # An entry just beside a level is hardly ever rounded to the next one: the error is known no better than this.
    least = 0.05 * max(float(each["matrix"].abs().max()) for each in gradients(0)) / (2 ** (bits - 1) - 1)
    z = first / ((second - first**2).clamp(min=least**2).sqrt() / trials**0.5)
    assert z.abs().max() < 5
    assert abs(float(z.mean())) < 5 / z.numel() ** 0.5  # all entries together: a bias common to them


@pytest.mark.parametrize("bits", [4, 8])
def test_nearest_rounding_errs_at_most_half_a_step_at_each_end(bits):
    grads = gradients(1)
    truth, largest = mean(grads), max(float(g.abs().max()) for each in grads for g in each.values())
    run_lockstep([QuantizeCodec(bits, rounding="nearest") for _ in range(RANKS)], grads)
    step = largest / (2 ** (bits - 1) - 1)
    for name, grad in grads[0].items():
        assert (grad - truth[name]).abs().max() <= step * 1.0001
    worst = max(float((grad - truth[name]).abs().max()) for name, grad in grads[0].items())
    assert worst > step / 8  # the bound is not idle


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
@settings(max_examples=20)
def test_nearest_rounding_contracts(bits, seed, scale):
    """‖x - C(x)‖² <= ‖x‖² - max x² in each bucket: no entry errs by more than itself, and the largest is exact."""
    grads = {"x": torch.randn(700, generator=torch.Generator().manual_seed(seed)) ** 3 * scale}
    x = grads["x"].clone()
    run_lockstep([QuantizeCodec(bits, rounding="nearest")], [grads])
    left, whole = (x.double() - grads["x"].double()) ** 2, x.double() ** 2
    for errors, squares in zip(left.split(512), whole.split(512), strict=True):
        assert errors.sum() <= squares.sum() - squares.max() * (1 - 1e-5)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [4, 8])
def test_conserves_what_it_does_not_send(bits, rounding):
    codecs = [QuantizeCodec(bits, bucket=32, rounding=rounding, feedback=True) for _ in range(RANKS)]
    sent, total = totals(codecs, gradients, steps=8)
    for name in SHAPES:
        left = torch.stack([codec.state["residual"][name] for codec in codecs]).mean(0)
        torch.testing.assert_close(sent[name] + left, total[name], rtol=1e-5, atol=1e-5)
        assert name == "scalar" or left.abs().max() > 1e-4  # else the test would pass idly


def test_the_residual_stays_small():
    """Each step adds a new gradient and takes most of it away; both compressions' errors are in it."""
    codecs = [QuantizeCodec(4, rounding="nearest", feedback=True) for _ in range(8)]
    norms = []
    for step in range(60):
        run_lockstep(codecs, gradients(step, ranks=8), step)
        norms.append(max(codec.norm("residual") for codec in codecs))
    assert max(norms[30:]) < 1.2 * max(norms[10:30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_are_equal_bit_by_bit(dtype):
    codecs = [QuantizeCodec(8, bucket=64, feedback=True) for _ in range(RANKS)]
    for step in range(50):
        grads = gradients(step, dtype=dtype)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)


def test_zeros_stay_zeros():
    grads = gradients(0)
    for each in grads:
        each["matrix"][5] = 0
        each["bias"].zero_()
    run_lockstep([QuantizeCodec(4, bucket=64) for _ in range(RANKS)], grads)
    assert not grads[0]["matrix"][5].any()
    assert not grads[0]["bias"].any()
    assert grads[0]["matrix"][6].any()


@pytest.mark.parametrize(("bits", "ranks"), [(8, 2), (8, 4), (4, 3)])
def test_bytes(bits, ranks):
    """bits / 8 and one fp32 scale for each bucket of 512, both ways round a ring, and one number for each pair."""
    n = ranks * 2048
    grads = [{"w": torch.randn(n)} for _ in range(ranks)]
    traffic = run_lockstep([QuantizeCodec(bits) for _ in range(ranks)], grads)
    encoded = n * bits / 8 + n / 512 * 4
    assert traffic.sent(ranks) == 2 * (ranks - 1) / ranks * encoded + (ranks - 1) * 4
    assert len(traffic.stages) == QuantizeCodec.stages
    if bits == 8:
        assert encoded / n < 1.016


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_not_finite_shows_on_every_rank_before_anything_is_kept(value, rank):
    codecs = [QuantizeCodec(8, bucket=64, rounding="nearest", feedback=True) for _ in range(RANKS)]
    run_lockstep(codecs, gradients(0))
    before = {name: tensor.clone() for name, tensor in codecs[0].state["residual"].items()}
    coding = codecs[0].code(gradients(1)[0], ExchangeContext(0, RANKS, 1))
    advance(coding)
    coding.close()
    assert all(torch.equal(before[name], tensor) for name, tensor in codecs[0].state["residual"].items())

    grads = gradients(1)
    grads[rank]["long"][1000] = value  # in the part of the last rank alone
    asked = [
        advance(codec.code(each, ExchangeContext(r, RANKS, 1)))
        for r, (codec, each) in enumerate(zip(codecs, grads, strict=True))
    ]
    for reader in range(RANKS):
        answers = [torch.stack([requests[i].tensor[reader] for requests in asked]) for i in range(len(asked[0]))]
        assert not all(answer.isfinite().all() for answer in answers if answer.is_floating_point())


def test_errors_of_one_rank_reach_half_a_step():
    """So the levels are 2^bits - 1, and none is wasted."""
    grads = {"x": torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 2 - 1}
    grads["x"][::512] = 1.0
    x = grads["x"].clone()
    run_lockstep([QuantizeCodec(8, rounding="nearest")], [grads])
    assert 0.499 < float((x - grads["x"]).abs().max()) * 127 < 0.5001


def test_noise_leaves_whole_numbers_as_they_are():
    q = torch.zeros(200_000)
    add_noise_(q, torch.Generator().manual_seed(0))
    assert -0.5 < float(q.min()) < -0.4999
    assert 0.4999 < float(q.max()) < 0.5
    assert abs(float(q.mean())) < 5 * (1 / 12 / q.numel()) ** 0.5
    assert abs(float(q.var()) - 1 / 12) < 0.001


def test_nothing_to_send():
    run_lockstep([QuantizeCodec(8) for _ in range(2)], [{"none": torch.zeros(0, 4)} for _ in range(2)])


def test_merged_conserves_the_residual():
    codecs = [QuantizeCodec(4, rounding="nearest", feedback=True) for _ in range(RANKS)]
    run_lockstep(codecs, gradients(0))
    residual = torch.stack([codec.state["residual"]["matrix"] for codec in codecs]).mean(0)
    state = codecs[0].merge_states([codec.state_dict() for codec in codecs])
    fewer = [QuantizeCodec(4, rounding="nearest", feedback=True) for _ in range(2)]
    for codec in fewer:
        codec.load_state_dict(state)
    grads = gradients(1, ranks=2)
    total = mean(grads)["matrix"] + residual
    run_lockstep(fewer, grads, 1)
    left = torch.stack([codec.state["residual"]["matrix"] for codec in fewer]).mean(0)
    torch.testing.assert_close(grads[0]["matrix"] + left, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feedback", [False, True])
def test_what_is_too_small_for_a_scale_waits_in_the_residual(feedback):
    """Below about 1e-36 the scale of a bucket has no reciprocal in fp32: zeros travel."""
    codecs = [QuantizeCodec(8, rounding="nearest", feedback=feedback, bucket=8) for _ in range(2)]
    sent = [{"weight": torch.full((16,), 1e-38)} for _ in range(2)]
    run_lockstep(codecs, sent)
    assert not any(average["weight"].any() for average in sent)
    if feedback:
        residuals = [codec.get_states("residual", own)[0] for codec, own in zip(codecs, sent, strict=True)]
        assert (torch.stack(residuals).mean(0) / 1e-38 - 1).abs().max() < 1e-5
