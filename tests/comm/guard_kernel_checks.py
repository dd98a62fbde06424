"""Exchanges by kernels never wait for the device, and one that fails leaves NaN and no trace in the state; run as a
script where Triton interprets the kernels, and by tests on a GPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
from bucket_kernel_checks import SHAPES, gradients, quantise
from counting import Counting

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.codec import Codec
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.sign import SignCodec
from shoestring.comm.codecs.terngrad import TernGradCodec
from shoestring.comm.exchange.wire import Wire

GUARDING: list[Callable[[], Codec]] = [
    DenseCodec,
    lambda: DenseCodec(torch.bfloat16),
    quantise(4, "nearest"),
    quantise(8, "stochastic"),
    lambda: SignCodec(bucket=32),
    TernGradCodec,
]


def assert_waits_for_nothing(make: Callable[[], Codec], device: str) -> None:
    """Whether all is well or not; where the codec does not guard, the driver waits at each stage."""
    for guards, at in ((False, 0), (True, 0), (True, 1)):
        with Wire(None, torch.device(device)) as wire:
            wire.guards_on_cpu = guards
            codec, grads = make(), gradients(0, device)[0]
            wire.run(codec, grads, 0)
            grads, before = gradients(1, device)[0], copy.deepcopy(codec.state_dict())
            grads["long"][at - 1] = torch.inf if at else 0.0
            with Counting() as count:
                fine = wire.run(codec, grads, 1)
            if device == "cpu":  # where a GPU is, its codecs guard
                assert count.waits == (0 if guards else codec.stages), (codec, count.waits)
            assert bool(fine) == (not at)
            if at:
                assert all(grads[name].isnan().all() for name in SHAPES)
                torch.testing.assert_close(codec.state_dict(), before, rtol=1e-5, atol=1e-5)


def main(device: str) -> None:
    for make in GUARDING:
        assert_waits_for_nothing(make, device)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"]
    fused.is_available = lambda device: True
    main("cpu")
    print("as it must be")
