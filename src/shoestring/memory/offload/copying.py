"""Copies between a device and the host, on a stream of their own where the device is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoestring.memory.zero.placement import Wait


class CopyStream:
    """Copies to and from a device, one after the other and beside what the device computes; on a CPU they are plain."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Copies inside go to the stream, after what the device was told to compute before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Wait:
        """Function that lets the device compute on only when the copies so far are done; the host does not wait."""
        if self.stream is None:
            return lambda: None
        return self.stream.record_event().wait

    def synchronize(self) -> None:
        """Let the host wait for the copies so far."""
        if self.stream is not None:
            self.stream.synchronize()
