"""Wraps all uses of torch's private interfaces, so that a new version of torch has to be checked in this module only.

Checked with torch 2.11 to 2.13. Private interfaces that only the conformance suite uses are in `testing/_torch.py`.
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
"""(tensors, factor) -> multiply each tensor in place by a scalar or 0-d tensor, in one kernel if the device has one."""

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
"""(tensors, flag, factor) -> multiply each tensor in place by the 0-d tensor `factor`, and set `flag`, a tensor of
shape (1,), to 1 if an entry is not finite. Takes one pass over memory, and does not synchronise with the device."""


def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | float:
    """Return the current loss scale without synchronising with the device; 1.0 if loss scaling is off."""
    return scaler._scale if scaler.is_enabled() and scaler._scale is not None else 1.0


# cuSPARSELt's operations on 2:4 sparse operands.
cslt_compress = torch._cslt_compress
cslt_sparse_mm = torch._cslt_sparse_mm
cslt_sparse_mm_search = torch._cslt_sparse_mm_search
sparse_semi_structured_tile = torch._sparse_semi_structured_tile

# torch 2.13 renamed these two collectives, and warns if the former names are used.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names under which torch.compile, checkpoint wrappers and FSDP1 hold the module that they wrap."""


def own_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer without the prefixes that DDP and other wrappers add."""
    own, module = list[str](), model
    for part in name.split("."):
        if part not in _WRAPPERS and not (part == "module" and isinstance(module, DistributedDataParallel)):
            own.append(part)
        module = getattr(module, part, None)
    return ".".join(own)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives, after which a rank stops waiting for other ranks."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


def wait_as_the_world(mesh: DeviceMesh) -> DeviceMesh:
    """Set the timeout of the mesh's process groups to the default group's timeout, instead of torch's half an hour."""
    limit = timeout_of(dist.distributed_c10d._get_default_group())
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return mesh


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Flatten several axes of a mesh into a one-axis mesh that has the same root mesh. A collective."""
    return mesh[axes[0]] if len(axes) == 1 else wait_as_the_world(mesh[axes]._flatten())


def name_groups_from(number: int) -> None:
    """Number later process groups from `number` on. Collectives hang unless all ranks pass the same number."""
    dist.distributed_c10d._world.group_count = number


def after_backward(work: Callable[[], None]) -> None:
    """Call `work` at the end of the current backward pass, after the functions registered earlier."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return one tensor per device: 1.0 if the loss scaler found an overflow in the device's gradients, else 0.0."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def unscale_before_steps(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Make loss scalers unscale a fused optimizer's gradients and check them for overflow before the optimizer's step.

    A fused optimizer unscales inside its step by default, so step pre-hooks would see scaled gradients.

    Returns:
        A function that undoes the change.
    """
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    setattr(optimizer, "_step_supports_amp_scaling", False)  # noqa: B010
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", fused)


def call_closure_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Call the closure passed to `step` before the step hooks registered later, because those hooks need its gradients.

    torch calls the closure inside the step, after all pre-hooks. `LBFGS` is left unchanged, because its step calls the
    closure several times.

    Returns:
        A function that undoes the change.
    """

    def call(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or isinstance(optimizer, torch.optim.LBFGS):
            return None
        with torch.enable_grad():
            loss = closure()
        return args[:1], kwargs | {"closure": lambda: loss}

    return optimizer.register_step_pre_hook(call).remove


def allow_any_gradient(tensor: torch.Tensor) -> None:
    """Allow `tensor.grad` to have another data type than the tensor."""
    tensor.grad_dtype = None


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer without running its step hooks."""
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Exclude parameters and buffers by name from DDP, which then neither broadcasts nor reduces them.

    Must be called before the model is wrapped in DDP. An empty list of names undoes an earlier call.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    if not names:
        del model._ddp_params_and_buffers_to_ignore


def prepare_backward(model: DistributedDataParallel) -> None:
    """Make DDP average gradients in the next backward pass, in which every parameter must receive a gradient."""
    model.reducer.prepare_for_backward([])


def has_hook(model: nn.Module) -> bool:
    """Whether the model is wrapped in DDP and has a communication hook."""
    return isinstance(model, DistributedDataParallel) and bool(model._comm_hooks)


def rebucket(model: DistributedDataParallel, nbytes: int) -> None:
    """Rebuild DDP's buckets with at most `nbytes` each, as unpickling the model does; call it only between steps.

    Afterwards DDP reduces the gradients of the parameters that are trainable now, and has no communication hook.
    """
    model.bucket_bytes_cap, model.bucket_bytes_cap_default = nbytes, False
    if "_bucket_config" in vars(model):  # since torch 2.13
        model._bucket_config = replace(model._bucket_config, bucket_bytes_cap=nbytes, first_bucket_bytes_cap=nbytes)
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model._comm_hooks.clear()
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False  # record the graph again with the new buckets
        model.reducer._set_static_graph()
        assert model.logger is not None
        model.logger._set_static_graph()


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def activity_of(event: Any) -> str:
    """Return Kineto's type of a profiler event, such as "kernel", "gpu_memcpy" or "gpu_memset"."""
    if hasattr(event, "activity_type"):
        return event.activity_type()
    if event.device_type() == torch.autograd.DeviceType.CPU or event.is_user_annotation():  # torch 2.11
        return "other"
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(event.name()[:6], "kernel")


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Look up a backend of torch.compile by name; returns a function (graph, example inputs) -> compiled callable."""
    if not isinstance(backend, str):
        return backend
    # Imported here because the import takes seconds, and programs that do not use torch.compile should not pay for it.
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(backend)


def reorders_messages(model: nn.Module) -> bool:
    """Whether a part of the model is compiled and torch's compiler may reorder the model's messages."""
    compiled = [
        module
        for module in model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    ]
    if not compiled:
        return False
    from torch._inductor import config

    return bool(config.aten_distributed_optimizations.enable_overlap_scheduling)


def compile_joint(
    backend: str | Callable[..., Any],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    work: Callable[[fx.GraphModule], fx.GraphModule],
) -> Callable[..., Any]:
    """Compile a graph after applying `work` to the joint graph of its forward and backward pass.

    Args:
        backend: "inductor"; any other value is treated as "aot_eager".
    """
    if backend == "inductor":
        from unittest.mock import patch

        from torch._guards import detect_fake_mode
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        def on_graph(joint: fx.Graph) -> None:
            module = joint.owning_module
            assert module is not None
            if work(module) is not module:
                raise ValueError("under inductor a pass on the joint graph must change it in place")

        # By default, inductor decomposes operators while it traces. Here the decomposition comes after `work`, so that
        # `work` sees the same operators under every backend.
        def compile_decomposed(part: fx.GraphModule, part_inputs: Sequence[Any], **options: Any) -> Any:
            mode, decompose = detect_fake_mode(part_inputs), make_fx(part, decomposition_table=select_decomp_table())
            with patch.object(mode, "allow_non_fake_inputs", True):  # some decompositions make constants
                decomposed = decompose(*part_inputs)
            return compile_fx_inner(decomposed, part_inputs, **options)

        with config.patch(joint_custom_pre_pass=on_graph):
            compiled: Any = compile_fx(graph, [*inputs], inner_compile=compile_decomposed, decompositions={})
            return compiled
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return min_cut_rematerialization_partition(work(joint), joint_inputs, **options)

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition)(graph, inputs)


def run_joint(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    prepare: Callable[[fx.GraphModule], Callable[[slice, dict[str, Any]], list[Any]]],
) -> Callable[..., Any]:
    """Make a function that computes a graph and its gradients by a program that `prepare` builds from the joint graph.

    The backward pass gets the graph's inputs, and nothing else of the forward pass.

    Args:
        prepare: called with the traced joint graph; returns the program. The program takes the outputs to compute (of
            the forward pass, or gradients), and the values of placeholders by name, and returns these outputs.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    programs = list[Callable[[slice, dict[str, Any]], list[Any]]]()
    forward_outputs = list[int]()

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if not joint_inputs:  # a graph nested in the graph, which stays unchanged
            return min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        programs.append(prepare(joint))
        forward_outputs.append(num_fwd_outputs)
        primals = [node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" not in node.name]
        tensors = [node for node in primals if isinstance(node.meta.get("val"), torch.Tensor)]
        sizes = [node for node in primals if isinstance(node.meta.get("val"), torch.SymInt)]
        return _extract_fwd_bwd_modules(joint, tensors, sizes, num_fwd_outputs=num_fwd_outputs)

    def boxed(module: fx.GraphModule, compute: Callable[[dict[str, Any]], list[Any]]) -> Callable[..., Any]:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]

        def call(arguments: list[Any]) -> list[Any]:
            values = dict(zip(names, arguments, strict=True))
            arguments.clear()
            return compute(values)

        boxed_call: Any = call
        boxed_call._boxed_call = True
        return boxed_call

    def compile_forward(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if not programs:  # without gradients there is no joint graph
            return boxed(module, lambda values: list(module(*values.values())))
        (program,), (count,) = programs, forward_outputs
        returned: Any = next(node for node in module.graph.nodes if node.op == "output").args[0]
        inputs_again = [node.name for node in returned[count:]]

        def compute(values: dict[str, Any]) -> list[Any]:
            return [*program(slice(count), values), *(values[name] for name in inputs_again)]

        return boxed(module, compute)

    def compile_backward(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        (program,), (count,) = programs, forward_outputs
        return boxed(module, lambda values: program(slice(count, None), values))

    compiler = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward, partition_fn=partition)
    return compiler(graph, inputs)


def compile_call(module: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module's forward pass and hooks, without changing what a call of the module does."""
    return torch.compile(module._call_impl, backend=backend)


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which the gradients of leaf tensors call no hooks that `Tensor.register_hook` has registered."""
    hooks = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, own in hooks:
            tensor._backward_hooks = own


@contextmanager
def called_by(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Context in which a call of the module runs `call`, a compiled form of the module."""
    before = module._compiled_call_impl
    module._compiled_call_impl = call
    try:
        yield
    finally:
        module._compiled_call_impl = before


def hint_of(size: int | torch.SymInt) -> int:
    """Convert a size to an int; a symbolic size gets its value in the example inputs of the trace, or 0 if unknown."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 0 if hint is None else int(hint)


def own_device(local_rank: int) -> torch.device:
    """Make the GPU of a local rank the current device and return it; return the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def fake_tensors() -> AbstractContextManager[Any]:
    """Context in which new tensors are fake: operators compute only shapes and data types, and allocate no memory.

    Reading a fake tensor's data pointer raises RuntimeError, so that native code cannot write through the pointer.
    `item()` of a fake tensor returns 1.
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


def without_data() -> AbstractContextManager[Any]:
    """Context like `fake_tensors`, in which reading a number out of a tensor is an error.

    In `fake_tensors` the number would be 1, so the traced step could differ from the real step.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> AbstractContextManager[Any]:
    """Context in which new tensors are real, even inside the context `fake_tensors`."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in the context `fake_tensors`, and so has no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def content_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on any device; empty for a fake tensor."""
    if is_fake(tensor):
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Context in which this process is rank 0 of `size` ranks; the other ranks are fake, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def modules_stay() -> Iterator[None]:
    """Context in which `Module.to` changes data types but not devices, because torch cannot move all fake tensors."""
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
    """Context in which `hear` is called after each resize of a storage; FSDP2 frees parameters by resizing to 0."""
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
