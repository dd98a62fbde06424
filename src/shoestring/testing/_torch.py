"""What torch keeps to itself and the conformance suite looks at; the product's own are in `shoestring/_torch.py`.

Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def process_groups() -> int:
    """How many process groups this process is in, the default one included."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def saved_tensor_hooks() -> bool:
    """Whether hooks for what autograd saves (`saved_tensors_hooks`) are on for this thread."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    return top(False) is not None


def global_module_hooks() -> dict[str, int]:
    """The kinds of hooks that run on every module, with their numbers."""
    found = {name: hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")}
    return {name: len(hooks) for name, hooks in found.items() if isinstance(hooks, dict) and hooks}
