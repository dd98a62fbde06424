"""Every private import from torch, in one place, so that a new version of torch is checked in one place.

Checked with torch 2.11 to 2.13. What the conformance suite alone looks at is in `testing/_torch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

foreach_mul_ = torch._foreach_mul_
"""(tensors, scalar or 0-d tensor): multiply each in place, in one kernel where the device has one."""

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm
foreach_add = torch._foreach_add
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_div = torch._foreach_div
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_sqrt_ = torch._foreach_sqrt_
foreach_addcdiv = torch._foreach_addcdiv
foreach_addcmul_ = torch._foreach_addcmul_
foreach_div_ = torch._foreach_div_
foreach_sqrt = torch._foreach_sqrt
foreach_sub_ = torch._foreach_sub_

foreach_sub = torch._foreach_sub
foreach_zero_ = torch._foreach_zero_

foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""(tensors, found, factor): multiply each by the 0-d tensor `factor` in place; `found` (1,) becomes 1 where an entry
is not finite. In one pass over memory, without waiting for the device."""


def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | float:
    """What losses are multiplied by in this step, without waiting for the device."""
    return scaler._scale if scaler.is_enabled() and scaler._scale is not None else 1.0


# Of 2:4 operands; cuSPARSELt's.
cslt_compress = torch._cslt_compress
cslt_sparse_mm = torch._cslt_sparse_mm
cslt_sparse_mm_search = torch._cslt_sparse_mm_search
sparse_semi_structured_tile = torch._sparse_semi_structured_tile

# torch 2.13 gave them these names, and warns of those before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer without what wrappers (DDP, torch.compile) add to it."""
    from torch.distributed.checkpoint.state_dict import _get_fqns  # takes a third of a second, which launching saves

    (own,) = _get_fqns(model, name)
    return own


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait for another rank."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


def wait_as_the_world(mesh: DeviceMesh) -> DeviceMesh:
    """Let collectives along the mesh wait for a lost rank as long as the world's do; torch says half an hour."""
    limit = timeout_of(dist.distributed_c10d._get_default_group())
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return mesh


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The mesh along several of its axes as one of a single dimension, with the same root; all ranks call it."""
    return mesh[axes[0]] if len(axes) == 1 else wait_as_the_world(mesh[axes]._flatten())


def name_groups_from(number: int) -> None:
    """Let the process groups to come be named by the numbers from this one on: equal on all ranks, or they hang."""
    dist.distributed_c10d._world.group_count = number


def after_backward(work: Callable[[], None]) -> None:
    """Do `work` at the end of the backward pass that runs now, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """For each device, 1.0 where a loss scaler has found an overflow among unscaled gradients, 0.0 elsewhere."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def unscale_before_steps(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let loss scalers treat a fused optimizer, which could unscale and skip inside its step, as any other one: they
    unscale before the step, and leave out a step that overflows with its hooks. Returns what ends it."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    setattr(optimizer, "_step_supports_amp_scaling", False)  # noqa: B010
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", fused)


def allow_any_gradient(tensor: torch.Tensor) -> None:
    """Let `tensor.grad` have another data type than the tensor."""
    tensor.grad_dtype = None


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimizer, without what is registered to happen before and after its steps."""
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Let a DDP that is put around the model later neither broadcast nor reduce its parameters and buffers of these
    names; without names it takes all of them again."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    if not names:
        del model._ddp_params_and_buffers_to_ignore


def has_hook(model: nn.Module) -> bool:
    """Whether it is in DDP, with a communication hook."""
    return isinstance(model, DistributedDataParallel) and bool(model._comm_hooks)


def rebucket(model: DistributedDataParallel, nbytes: int) -> None:
    """Let DDP form its buckets anew, of this size, as it does when it is unpickled; between steps only.

    It then exchanges the parameters that are trained now, and has no communication hook.
    """
    model.bucket_bytes_cap, model.bucket_bytes_cap_default = nbytes, False
    if "_bucket_config" in vars(model):  # since torch 2.13
        model._bucket_config = replace(model._bucket_config, bucket_bytes_cap=nbytes, first_bucket_bytes_cap=nbytes)
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model._comm_hooks.clear()
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False  # the new buckets have not seen the graph
        model.reducer._set_static_graph()
        assert model.logger is not None
        model.logger._set_static_graph()


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def activity_of(event: Any) -> str:
    """Kineto's name for what an event is: "kernel", "gpu_memcpy", "gpu_memset", or another one."""
    if hasattr(event, "activity_type"):
        return event.activity_type()
    if event.device_type() == torch.autograd.DeviceType.CPU or event.is_user_annotation():  # torch 2.11
        return "other"
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(event.name()[:6], "kernel")


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A backend of torch.compile: (graph, example inputs) -> callable."""
    if not isinstance(backend, str):
        return backend
    from torch._dynamo.backends.registry import lookup_backend  # takes seconds, which programs in eager mode save

    return lookup_backend(backend)


def compile_joint(
    backend: str | Callable[..., Any],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    work: Callable[[fx.GraphModule], fx.GraphModule],
) -> Callable[..., Any]:
    """Compile `graph` with `backend` ("inductor" or "aot_eager"), after `work` on the joint graph of its forward and
    backward pass."""
    if backend == "inductor":
        from torch._inductor import config

        def on_graph(joint: fx.Graph) -> None:
            module = joint.owning_module
            assert module is not None
            if work(module) is not module:
                raise ValueError("under inductor a pass on the joint graph must change it in place")

        with config.patch(joint_custom_pre_pass=on_graph):
            return lookup_backend(backend)(graph, inputs)
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return min_cut_rematerialization_partition(work(joint), joint_inputs, **options)

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition)(graph, inputs)


def fake_tensors() -> AbstractContextManager[Any]:
    """Within, tensors are fake: operators know shapes and types, and neither compute nor take memory.

    Asking one for its address raises RuntimeError, so that no native code writes where nothing is. Asked for a number,
    it gives 1.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FakeTensorsWithNumbers(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else 1
            return super().dispatch(func, types, args, kwargs)

    mode = FakeTensorsWithNumbers(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def real_tensors() -> AbstractContextManager[Any]:
    """Within, new tensors are real, inside of `fake_tensors` too."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is one of `fake_tensors`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def content_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on any device; none of a fake one."""
    if is_fake(tensor):
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Within, this process is the first of so many ranks, whose collectives send nothing and change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def modules_stay() -> Iterator[None]:
    """Within, modules do not move to a device: torch cannot move the fake tensors of some, even to where they are."""
    to = nn.Module.to

    def stay_or_convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return module if dtype is None else to(module, dtype, non_blocking)

    nn.Module.to = stay_or_convert  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.to = to


@contextmanager
def resizes_heard(hear: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `hear` after each change of a storage's size within, on which FSDP2 relies to free parameters."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        returned = resize(storage, size)
        hear(storage)
        return returned

    torch.UntypedStorage.resize_ = resize_and_tell  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
