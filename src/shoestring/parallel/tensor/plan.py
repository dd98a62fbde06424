"""Plans which layers of a model are split, and how: from built-in tables, transformers' tables, or the user's names.

The terms are those of Megatron-LM (Shoeybi et al., 2019). Layers that read the residual stream are split by their
outputs (`columns`). Layers that write to the residual stream are split by their inputs (`rows`). Between such layers,
each rank works on its own heads or features, and nothing is exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models import hf
from shoestring.models.blocks import is_transposed
from shoestring.models.gpt import GPT, Attention

if TYPE_CHECKING:
    from shoestring.parallel.settings import Tensor

Way = Literal["columns", "rows", "vocabulary", "gathered"]
"""How a layer is split. "columns": by its outputs. "rows": by its inputs. "vocabulary": an embedding, by its entries.
"gathered": by its outputs, which all ranks then gather (logits)."""
_FUSED = re.compile(r"(?P<pattern>.+?):(?P<sections>\d+(\+\d+)*)")
_STYLES: dict[str, Way] = {"colwise": "columns", "rowwise": "rows"}
_SUMMED = "replicated_with_grad_allreduce"
_OTHERS = ("replicate", "embedding_rowwise", "colwise_gather_output", _SUMMED)  # see also `_vocabulary`


@dataclass(frozen=True)
class Cut:
    """How one layer is split."""

    way: Way
    sections: tuple[int, ...] = ()
    """For a fused layer, the sizes of its sections (such as queries, keys and values), in order."""


@dataclass(frozen=True)
class SplitPlan:
    """The plan of how a model's layers are split."""

    layers: Mapping[str, Cut] = field(default_factory=dict)
    """Name of a module -> how the module is split."""
    divided: Mapping[str, int] = field(default_factory=dict)
    """Name of a module's attribute -> its value, a number of heads or features that the ranks share equally."""
    summed: tuple[str, ...] = ()
    """Names of modules that each rank applies to its own heads, so that their parameters' gradients must be summed."""


def plan_of(model: nn.Module, settings: Tensor, vocabulary: bool) -> SplitPlan:
    """Plan how a model's layers are split.

    Args:
        vocabulary: whether token embeddings and the output layer are split as well.

    Raises:
        ConfigError: there is no table for this model, or the layers that the user named do not fit the model.
    """
    if settings.columns or settings.rows or settings.gathered or settings.heads:
        if settings.vocabulary_layers != "auto":
            message = (
                f"`{settings.name}.vocabulary_layers` works only with the built-in tables, but layers are named here"
            )
            raise ConfigError(
                message, hint=f"to split embeddings and the output layer, name them in `{settings.name}.gathered`"
            )
        return _by_user(model, settings)
    table = _table(model)
    if table is None:
        raise ConfigError(
            f"there is no table of how {type(model).__name__} is split",
            hint=f"name its layers in `{settings.name}.columns` and `{settings.name}.rows`",
        )
    entries = _vocabulary(model) if vocabulary else {}
    if settings.vocabulary_layers == "split" and not entries:
        message = f"{type(model).__name__} has no embeddings of tokens with an output layer to split"
        raise ConfigError(message, hint=f"remove `{settings.name}.vocabulary_layers`")
    return SplitPlan({**table.layers, **entries}, table.divided, table.summed)


def _table(model: nn.Module) -> SplitPlan | None:
    if isinstance(model, GPT):
        return _of_gpt(model)
    kinds = {type(module).__name__ for module in model.modules()}
    if "GPT2Attention" in kinds:
        return _of_gpt2(model)
    if "ViTAttention" in kinds:
        columns = ("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1")
        return SplitPlan(
            {**_matching(model, columns, Cut("columns")), **_matching(model, ("*.o_proj", "*.fc2"), Cut("rows"))}
        )
    return _of_transformers(model) if hf.is_pretrained(model) else None


def _of_gpt(model: GPT) -> SplitPlan:
    config, layers, divided = model.config, dict[str, Cut](), dict[str, int]()
    heads = tuple(count * config.head_dim for count in (config.heads, config.kv_heads, config.kv_heads))
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            layers |= {f"{name}.qkv": Cut("columns", heads), f"{name}.out": Cut("rows")}
            divided |= {f"{name}.heads": module.heads, f"{name}.kv_heads": module.kv_heads}
    layers |= _matching(model, ("*.gate_up",), Cut("columns", (config.hidden, config.hidden)))
    return SplitPlan({**layers, **_matching(model, ("*.down",), Cut("rows"))}, divided)


def _of_gpt2(model: nn.Module) -> SplitPlan:
    layers, divided = dict[str, Cut](), dict[str, int]()
    for name, module in model.named_modules():
        attention: Any = module
        if type(module).__name__ == "GPT2Attention" and not attention.is_cross_attention:
            layers |= {f"{name}.c_attn": Cut("columns", (attention.embed_dim,) * 3), f"{name}.c_proj": Cut("rows")}
            divided |= {f"{name}.num_heads": attention.num_heads, f"{name}.split_size": attention.split_size}
        elif type(module).__name__ == "GPT2MLP":
            layers |= {f"{name}.c_fc": Cut("columns"), f"{name}.c_proj": Cut("rows")}
    return SplitPlan(layers, divided)


def _of_transformers(model: nn.Module) -> SplitPlan | None:
    """The plan from transformers' table for a model; None if there is no table, or one that splits experts."""
    pretrained: Any = model
    table = {**(getattr(pretrained, "tp_plan", None) or {})}
    if not table or any(style not in _STYLES and style not in _OTHERS for style in table.values()):
        return None
    layers, summed = dict[str, Cut](), list[str]()
    for pattern, style in table.items():
        if style in _STYLES:
            layers |= _matching(model, (pattern,), Cut(_STYLES[style]))
        elif style == _SUMMED:
            summed += [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
    # Numbers that must be multiples of the number of ranks, although no module has them as attributes.
    heads = {
        f"config.{name}": number
        for name in ("num_attention_heads", "num_key_value_heads")
        if (number := getattr(pretrained.config, name, None))
    }
    return SplitPlan(layers, heads, tuple(summed))


def _vocabulary(model: nn.Module) -> dict[str, Cut]:
    """How to split the token embeddings and the output layer of a language model; empty if it has none."""
    if isinstance(model, GPT):
        return {"embed": Cut("vocabulary"), **({"head": Cut("gathered")} if model.head is not None else {})}
    pretrained: Any = model
    output = pretrained.get_output_embeddings() if hasattr(pretrained, "get_output_embeddings") else None
    if output is None:
        return {}
    ways = {output: Cut("gathered"), pretrained.get_input_embeddings(): Cut("vocabulary")}
    return {name: ways[module] for name, module in model.named_modules() if module in ways}


def _by_user(model: nn.Module, settings: Tensor) -> SplitPlan:
    layers = dict[str, Cut]()
    ways: tuple[tuple[Way, Sequence[str]], ...] = (
        ("columns", settings.columns), ("rows", settings.rows), ("gathered", settings.gathered),
    )  # fmt: skip
    for way, patterns in ways:
        for text in patterns:
            fused = _FUSED.fullmatch(text) if way == "columns" else None
            pattern = fused["pattern"] if fused else text
            layer_names = [name for name, module in model.named_modules() if fnmatchcase(name, pattern) and name]
            if not layer_names:
                names = [name for name, module in model.named_modules() if hasattr(module, "weight")]
                message = f"`{settings.name}.{way}`: no layer is called `{pattern}`"
                raise ConfigError(message, hint=nearest(pattern, names))
            for name in layer_names:
                module = model.get_submodule(name)
                if way == "gathered" and isinstance(module, nn.Embedding):
                    layers[name] = Cut("vocabulary")
                else:
                    layers[name] = Cut(way, _sections(module, fused["sections"], name) if fused else ())
    return SplitPlan(layers, dict(_attributes(model, settings)))


def _sections(module: nn.Module, text: str, name: str) -> tuple[int, ...]:
    shares, outputs = [int(share) for share in text.split("+")], outputs_of(module)
    if not sum(shares) or outputs % sum(shares) or 0 in shares:
        raise ConfigError(
            f"the {outputs} outputs of `{name}` cannot be divided into {text} equal parts",
            hint="for a fused layer, give the relative sizes of its sections, such as `*.qkv:8+2+2`",
        )
    return tuple(share * (outputs // sum(shares)) for share in shares)


def _attributes(model: nn.Module, settings: Tensor) -> Iterator[tuple[str, int]]:
    for pattern in settings.heads:
        path, _, attribute = pattern.rpartition(".")
        owners = [
            name for name, module in model.named_modules() if fnmatchcase(name, path) and hasattr(module, attribute)
        ]
        if not owners:
            raise ConfigError(
                f"`{settings.name}.heads`: no module has an attribute `{pattern}`",
                hint="name attributes that hold a number of heads, such as `blocks.*.attention.heads`",
            )
        for name in owners:
            value = getattr(model.get_submodule(name), attribute)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"`{name}.{attribute}` is {value!r}, not a number that can be divided among ranks")
            yield f"{name}.{attribute}", value


def _matching(model: nn.Module, patterns: Sequence[str], cut: Cut) -> dict[str, Cut]:
    return {name: cut for name, _ in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def dim_of(module: nn.Module, way: Way) -> int:
    """The dimension of a layer's weight that is split."""
    if isinstance(module, nn.Embedding):
        return 0
    return int(is_transposed(module) == (way != "rows"))


def outputs_of(module: nn.Module) -> int:
    """Number of outputs of a linear layer."""
    weight: Any = module.weight
    return weight.shape[dim_of(module, "columns")]
