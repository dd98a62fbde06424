"""Runs all layers of a decoder in one native call, for passes over few tokens, as in decoding on a CPU.

With one token, matrix products are memory-bound, and the other operators and Python's overhead take as long as the
products. `native/decoder_layers.c` avoids this overhead; it uses the modules' own weights and the same cache. The
modules themselves run whenever native code cannot, as with other data types, hooks, replaced forward passes or long
prompts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from shoestring import native
from shoestring.models import adapters_by_row, decoder_parts, quantized, skinny
from shoestring.models.adapters_by_row import RowProduct
from shoestring.models.cache import CachePlace, KVCache
from shoestring.models.decoder_parts import Decoder, Norm
from shoestring.models.gpt import GPT
from shoestring.models.quantized import QuantizedLinear
from shoestring.models.sublayers import SkippedForward

MOST_TOKENS = 64
"""Maximum number of tokens in a native pass, summed over all rows; long prompts exceed it."""
LIBRARIES = ("decoder_layers", "skinny_dense", "skinny_attention")
"""Native libraries that decoding uses for every data type of the weights."""
_OTHERWISE = "a pass runs its layers operator by operator, which is slower than one native call"
_DTYPES = (torch.float32, torch.bfloat16)


# -- the structures of decoder_layers.c --------------------------------------------------------------------------------


def _fields(integers: str, doubles: str = "", pointers: str = "") -> list[tuple[str, Any]]:
    kinds = ((integers, ctypes.c_int64), (doubles, ctypes.c_double), (pointers, ctypes.c_void_p))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _CKernels(ctypes.Structure):
    _fields_ = _fields("", pointers="dense few many attention low_rank")


class _CLinear(ctypes.Structure):
    _fields_ = _fields("bits outputs inputs few groups", pointers="weight scales places bias group rows")


class _CNorm(ctypes.Structure):
    _fields_ = _fields("", "eps offset", "weight")


_NORMS = ("attention_norm", "q_norm", "k_norm", "attention_end", "mlp_norm", "mlp_end")


class _CLayer(ctypes.Structure):
    _fields_ = [
        *(("window", ctypes.c_int64), ("skipped", ctypes.c_int64 * 2), ("ratio", ctypes.c_double * 2)),
        *_fields("", pointers="cos sin k v"),
        *((name, _CNorm) for name in _NORMS),
        *(("qkv", _CLinear * 3), ("out", _CLinear), ("gate_up", _CLinear * 2), ("down", _CLinear)),
    ]


class _CDecoder(ctypes.Structure):
    _fields_ = _fields(
        "layers width heads kv_heads head_width rotated hidden tanh_gelu norm_whole bf16", "scale", "kernels layer"
    )


_WORKSPACES = "normed q k v turned mixed gate up narrow_in narrow_out room low"


class _CPass(ctypes.Structure):
    _fields_ = _fields(
        "rows tokens threads positions_stride row_stride head_stride stride", pointers=f"positions x {_WORKSPACES}"
    )


# -- passes ------------------------------------------------------------------------------------------------------------


class _UnfitError(Exception):
    """Native code cannot compute a module of the model."""


def of(model: nn.Module) -> DecoderLayers | None:
    """Make the object that runs a model's layers by native code; None if the model is not supported or not on a CPU."""
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    decoder = decoder_parts.find(model) if is_on_cpu else None
    return None if decoder is None else DecoderLayers(model, decoder)


class DecoderLayers:
    """Runs the layers of a decoder by native code; only one thread may use it at a time.

    `fits` checks before every pass whether native code may be used, because hooks may be added, and forward passes,
    modules and weights may be replaced.
    """

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        self.model = model
        self.dtype = torch.float32
        self._workspace: dict[str, Tensor] = {}
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        """Rotary cosines and sines of each position, by the name of the layer's rotation."""
        self._layers: Any = None
        self._struct, self._kernels = _CDecoder(), _CKernels()
        self._look_at(decoder)

    def _look_at(self, decoder: Decoder) -> None:
        """Record the modules and tensors of the layers, so that `fits` notices when they are replaced."""
        self.decoder = decoder
        inside = [module for block in decoder.blocks for module in block.modules()]
        self._linears = [
            linear for layer in decoder.layers for linear in (*layer.qkv, layer.out, *layer.gate_up, layer.down)
        ]
        linears = {id(linear) for linear in self._linears}
        self._others = [*decoder.around, *(module for module in inside if id(module) not in linears)]
        self._modules = [
            (module._modules, name, child)
            for module in (*decoder.around, decoder.holder, *inside)
            for name, child in module._modules.items()
        ]
        self._tensors: list[tuple[dict[str, Any], str]] = [
            (held, name) for module in inside for held in (module._parameters, module._buffers) for name in held
        ]
        self._addresses: list[int] = []
        self._products: list[RowProduct | None] = []
        self._ratios: dict[int, float] = {}
        self._low = 0

    def fits(self, tokens: Tensor, cache: KVCache) -> bool:
        """Whether native code can run a pass over tokens (B, T) of the model in its present state."""
        if not 0 < tokens.numel() <= MOST_TOKENS or tokens.shape[1] > skinny.FEW_ROWS or torch.is_grad_enabled():
            return False
        if self.model.training and not isinstance(self.model, GPT):  # such models may have dropout
            return False
        if (
            torch.compiler.is_compiling()
            or global_hooks._global_forward_hooks
            or global_hooks._global_forward_pre_hooks
        ):
            return False
        if any(held.get(name) is not module for held, name, module in self._modules):
            if (decoder := decoder_parts.find(self.model)) is None:
                return False
            self._look_at(decoder)
        ratios, products = _skipped(self._others), _row_products(self._linears)
        if ratios is None or products is None:
            return False
        try:
            addresses = [0 if held[name] is None else held[name].data_ptr() for held, name in self._tensors]
            if addresses != self._addresses:
                self._describe()
                self._addresses = addresses
            if products != self._products:
                self._adapt(products)
            if ratios != self._ratios:
                self._skip(ratios)
        except (_UnfitError, KeyError, RuntimeError):  # a tensor without storage raises RuntimeError
            self._addresses = []
            return False
        return all(keys.dtype is self.dtype and keys.device.type == "cpu" for keys, _ in cache.layers.values())

    def run(self, tokens: Tensor, cache: KVCache, place: CachePlace) -> Tensor:
        """Read tokens (B, T) into the cache at `place`; returns the residual stream (B, T, C) after the last layer."""
        decoder, (batch, count) = self.decoder, tokens.shape
        x = decoder.embed(tokens)
        dtype = x.dtype
        x = x.float().contiguous()
        if len(cache.layers) < len(decoder.layers):
            for index in range(len(decoder.layers)):
                cache.allocate(index, decoder.kv_heads, decoder.head_width, self.dtype, torch.device("cpu"))
        first = cache.layers[0][0]
        self._make_room(batch * count)
        for layer, struct in zip(decoder.layers, self._layers, strict=True):
            if (name := layer.rotation) is not None:
                table = self._tables.get(name)
                if table is None or len(table[0]) < cache.length + 1:
                    table = self._tables[name] = decoder.angles(name, torch.arange(cache.length + 1))
                    self._struct.rotated = 2 * table[0].shape[1]
                struct.cos, struct.sin = table[0].data_ptr(), table[1].data_ptr()
        positions = place.positions.contiguous()
        strides = first.stride()
        at = place.rows.indices(cache.rows)[0] * strides[0] * first.itemsize
        for layer, pair in zip(self._layers, (cache.layers[index] for index in range(len(self._layers))), strict=True):
            layer.k, layer.v = pair[0].data_ptr() + at, pair[1].data_ptr() + at
        work = _CPass(
            rows=batch,
            tokens=count,
            threads=torch.get_num_threads(),
            positions_stride=count if len(positions) > 1 else 0,
            row_stride=strides[0],
            head_stride=strides[1],
            stride=strides[2],
            positions=positions.data_ptr(),
            x=x.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self._workspace.items()},
        )
        _kernel()(ctypes.byref(self._struct), ctypes.byref(work))
        return x.to(dtype)

    def _make_room(self, count: int) -> None:
        """Allocate the workspaces for a number of tokens."""
        decoder, low = self.decoder, self._low * count
        held = self._workspace.get("normed")
        if held is not None and len(held) >= count and len(self._workspace["low"]) >= low:
            return
        queries, keys = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
        inputs = max(decoder.width, queries, decoder.hidden)
        outputs = max(decoder.width, queries + 2 * keys, 2 * decoder.hidden)
        widths = {
            "normed": decoder.width,
            "q": queries + 2 * keys,
            "k": keys,
            "v": keys,
            "turned": queries,
            "mixed": queries,
            "gate": 2 * decoder.hidden,
            "up": decoder.hidden,
            "narrow_in": inputs,
            "narrow_out": outputs,
        }
        self._workspace = {name: torch.empty(count, width) for name, width in widths.items()}
        self._workspace["room"] = torch.empty(quantized.room(count, inputs), dtype=torch.uint8)
        self._workspace["low"] = torch.empty(low)

    # -- structures ----------------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Fill the C structures with the sizes and addresses of the modules' tensors.

        Raises:
            _UnfitError: native code cannot compute a module.
        """
        decoder = self.decoder
        if decoder.head_width % 16 or decoder.head_width > 256:
            raise _UnfitError
        # data type of the weights that are not quantised, which is the data type of the residual stream
        dtype = next(iter(decoder.blocks[0].parameters())).dtype
        if dtype not in _DTYPES:
            raise _UnfitError
        self.dtype = dtype
        self._layers = (_CLayer * len(decoder.layers))()
        for layer, struct in zip(decoder.layers, self._layers, strict=True):
            struct.window = layer.window or 0
            for name in _NORMS:
                norm: Norm | None = getattr(layer, name)
                if norm is not None:  # otherwise, the structure's zeros stand for no norm
                    weight = self._address(norm.module, "weight")
                    setattr(struct, name, _CNorm(eps=norm.eps, offset=norm.offset, weight=weight))
            for own, modules in ((struct.qkv, layer.qkv), (struct.gate_up, layer.gate_up)):
                for index, module in enumerate(modules):
                    own[index] = self._linear(module)
            struct.out, struct.down = self._linear(layer.out), self._linear(layer.down)
        self._products, self._ratios, self._low = [], {}, 0
        linears = {struct.bits in (4, 8) for layer in self._layers for struct in _structs_of(layer)}
        self._need(
            "attention", *(("few", "many") if True in linears else ()), *(("dense",) if False in linears else ())
        )
        self._struct = _CDecoder(
            layers=len(decoder.layers),
            width=decoder.width,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_width=decoder.head_width,
            rotated=self._struct.rotated,
            hidden=decoder.hidden,
            tanh_gelu=decoder.tanh_gelu,
            norm_whole=decoder.norm_whole,
            bf16=self.dtype is torch.bfloat16,
            scale=decoder.scale * decoder.head_width**0.5,
            kernels=ctypes.addressof(self._kernels),
            layer=ctypes.addressof(self._layers),
        )

    def _linear(self, module: nn.Module) -> _CLinear:
        if type(module) is QuantizedLinear:
            places = module.places
            return _CLinear(
                bits=module.bits,
                outputs=module.out_features,
                inputs=module.in_features,
                few=quantized.few_rows(places is None),
                weight=module.weight.data_ptr(),
                scales=module.scales.data_ptr(),
                places=None if places is None else places.data_ptr(),
                bias=None if module.bias is None else self._address(module, "bias"),
            )
        if not (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward):
            raise _UnfitError
        return _CLinear(
            bits=8 * self.dtype.itemsize,
            outputs=module.out_features,
            inputs=module.in_features,
            weight=self._address(module, "weight"),
            bias=None if module.bias is None else self._address(module, "bias"),
        )

    def _address(self, module: nn.Module, name: str) -> int:
        tensor = module._parameters.get(name, module._buffers.get(name))  # None if torch parametrizes the weight
        if tensor is None or type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype is not self.dtype:
            raise _UnfitError
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise _UnfitError
        return tensor.data_ptr()

    def _adapt(self, products: list[RowProduct | None]) -> None:
        """Set the low-rank factors that the rows of the next passes use.

        Raises:
            _UnfitError: the data type of the factors is not the type of the layer's inputs.
        """
        if any(products):
            self._need("low_rank")
        structs = (struct for layer in self._layers for struct in _structs_of(layer))
        for struct, product in zip(structs, products, strict=True):
            if product is not None and product.dtype is not (torch.bfloat16 if struct.bits == 16 else torch.float32):
                raise _UnfitError
            table = (0, None, None) if product is None else product.table
            struct.groups, struct.group, struct.rows = table
        self._products = products  # the structures contain addresses of tables that these objects own
        self._low = max((product.room for product in products if product), default=0)

    def _need(self, *names: str) -> None:
        """Load these native functions, so that decoder_layers.c can call them.

        Raises:
            _UnfitError: a function cannot be compiled.
        """
        for name in names:
            if (function := _FUNCTIONS[name]()) is None or _kernel() is None:
                raise _UnfitError
            setattr(self._kernels, name, ctypes.cast(function, ctypes.c_void_p).value)

    def _skip(self, ratios: dict[int, float]) -> None:
        """Set which sublayers the next passes skip."""
        for layer, struct in zip(self.decoder.layers, self._layers, strict=True):
            for index, module in enumerate((layer.attention, layer.mlp)):
                struct.skipped[index] = id(module) in ratios
                struct.ratio[index] = ratios.get(id(module), 1.0)
        self._ratios = ratios


def _skipped(modules: Sequence[nn.Module]) -> dict[int, float] | None:
    """The ratios of the sublayers to skip, by the `id()` of the module; None if a module has hooks or its forward pass
    was replaced by another one."""
    ratios: dict[int, float] = {}
    for module in modules:
        forward = module.__dict__.get("forward")
        if module._forward_hooks or module._forward_pre_hooks or not isinstance(forward, SkippedForward | None):
            return None
        if forward is not None:
            ratios[id(module)] = float(forward.ratio)
    return ratios


def _row_products(linears: Sequence[nn.Module]) -> list[RowProduct | None] | None:
    """For each linear layer, the `RowProduct` of its adapters, or None if it has no adapters; None instead of the list
    if a layer has hooks or another forward pass."""
    products: list[RowProduct | None] = []
    for linear in linears:
        forward = linear.__dict__.get("forward")
        is_known = forward is None or (isinstance(forward, RowProduct) and forward.is_plain())
        if linear._forward_hooks or linear._forward_pre_hooks or not is_known:
            return None
        products.append(forward)
    return products


def _structs_of(layer: Any) -> Iterator[Any]:
    """Iterate over the C structures of a layer's linear layers, in the order of `DecoderLayers._linears`."""
    yield from (struct for struct in (*layer.qkv, layer.out, *layer.gate_up, layer.down) if struct.bits)


@cache
def _kernel() -> Any:
    """The C function in decoder_layers.c; None if it cannot be compiled."""
    return native.function("decoder_layers", [ctypes.c_void_p, ctypes.c_void_p], _OTHERWISE)


_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "dense": skinny.kernel,
    "few": partial(quantized.kernel, "skinny_quantized"),
    "many": partial(quantized.kernel, "blocked_quantized"),
    "attention": skinny.attention_kernel,
    "low_rank": adapters_by_row.kernel,
}
"""Maps the name of each C function that decoder_layers.c calls to its loader, which compiles it when first needed."""
