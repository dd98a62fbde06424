"""Exports a recording to torch's memory_viz (https://pytorch.org/memory_viz), in the format of torch's own snapshots.

The format is a pickle of plain lists, dictionaries and numbers, because memory_viz reads no other format. Shoestring
itself never reads pickles.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from shoestring.memory.tracing.recording import BlockName, MemoryProfile, MemoryWindow


def snapshot(profile: MemoryProfile) -> bytes:
    """Encode the content of NAME.pickle: the allocations of each device in order, and the blocks alive at the peak."""
    windows = [profile.windows[device] for device in sorted(profile.windows, key=lambda name: name == "cpu")]
    content = {
        "segments": [_segment(index, window) for index, window in enumerate(windows)],
        "device_traces": [_trace(window) for window in windows],
    }
    return pickle.dumps(content, protocol=2)


def _frames(name: BlockName) -> list[dict[str, Any]]:
    """Convert a block's name to a call stack for memory_viz: operator, then module; the kind is shown as the file."""
    return [{"filename": name.kind, "line": 0, "name": part} for part in (name.operator, name.name) if part]


def _segment(device: int, window: MemoryWindow) -> dict[str, Any]:
    """The blocks alive at the peak, as one segment of memory."""
    alive = window.alive(window.event)
    blocks = [
        {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
        for address, size, frames in (
            (int(address), int(size), _frames(window.names[name]))
            for address, size, name in zip(
                window.columns["address"][alive],
                window.columns["bytes"][alive],
                window.columns["name"][alive],
                strict=True,
            )
        )
    ]
    return {
        "device": device,
        "address": min((block["address"] for block in blocks), default=0),
        "total_size": window.peak,
        "allocated_size": window.peak,
        "active_size": window.peak,
        "requested_size": window.peak,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _trace(window: MemoryWindow) -> list[dict[str, Any]]:
    """The allocations and releases of a window, in order."""
    columns = window.columns
    freed = np.flatnonzero(columns["died"] >= 0)
    events = [(int(columns["born"][i]), int(i), "alloc") for i in range(len(columns["born"]))]
    events += [(int(columns["died"][i]), int(i), "free_completed") for i in freed]
    return [
        {
            "action": action,
            "addr": int(columns["address"][i]),
            "size": int(columns["bytes"][i]),
            "stream": 0,
            "time_us": int(columns["born_at" if action == "alloc" else "died_at"][i]) // 1000,
            "frames": _frames(window.names[columns["name"][i]]),
        }
        for _, i, action in sorted(events)
    ]
