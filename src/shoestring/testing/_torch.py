"""Private interfaces of torch that only the conformance suite uses; `shoestring/_torch.py` has all others.

Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def process_groups() -> int:
    """Return the number of this process's process groups, including the default group."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def saved_tensor_hooks() -> bool:
    """Whether hooks on tensors that autograd saves (`saved_tensors_hooks`) are active in this thread."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    return top(False) is not None


def global_module_hooks() -> dict[str, int]:
    """Map the kinds of global module hooks to the number of registered hooks; kinds without hooks are left out."""
    registries = {name: hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")}
    return {name: len(hooks) for name, hooks in registries.items() if isinstance(hooks, dict) and hooks}
