"""Small random copies of transformers models, which handle caches and attention like the originals and run in
milliseconds.

A copy keeps every kind of layer. Attention windows and the lengths at which position embeddings change are scaled down,
so that a text of `LENGTH` tokens is longer than any of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import nn

LENGTH = 48
"""Number of tokens in a test text; larger than every attention window and every similar limit of a copy."""
MOST_WEIGHTS = 30_000_000
"""Maximum number of weights of a copy."""
_WINDOWS = {
    r"original_max_position_embeddings$": 24,
    r"attention_chunk_size$": 16,
    r"(^|_)window_size$|(^|_)sliding_window(_size)?$|^local_window": 7,
    r"chunk_size$": 8,
}
"""Patterns for names of settings that are a number of tokens, and the maximum value of each in a copy."""
_VOCABULARY = 96
_HIDDEN = re.compile(r"intermediate_size|ffn_dim|d_ff|ffn_hidden")
"""Pattern for names of the inner width of feed-forward layers; no other size depends on this width unless layers are
recurrent."""
_WIDTHS = re.compile(
    r"hidden_size|intermediate_size|^(n_embd|n_inner|d_model|d_ff|ffn_dim|n_heads?|d_inner)$|embed_proj_dim|ffn_hidden"
    r"|num_(attention_|key_value_|kv_|linear_|value_|key_)?heads|_heads$|mamba_d_ssm|conv_dim$"
)
_KINDS = ("layer_types", "layers_block_type", "attention_layers")
"""Names of configuration properties that have an entry for each layer."""
_PERIOD = re.compile(r"period|offset|interval|every|pattern|freq|first_k_dense")
_TOKEN = re.compile(r"_token_(id|ids|index)$|^image_token|^audio_token")


@dataclass(frozen=True)
class Shrunken:
    """A small random copy of a model."""

    model: nn.Module
    length: int
    """Maximum number of tokens that the copy may read."""
    scaled: dict[int, int]
    """Maps each scaled-down number of tokens in the copy's configuration to the number in the original model."""


def shrink(model: nn.Module) -> Shrunken | None:
    """Make a small random copy of a transformers model, in float64, or in float32 if it cannot run in float64; None if
    no copy runs."""
    original: Any = model.config
    for factor, fewer_layers in product(_factors(original.get_text_config()), (True, False)):
        config = copy.deepcopy(original)
        scaled: dict[int, int] = {}
        for part in _parts(config):
            _shrink_part(part, factor, scaled)
            if fewer_layers:
                _drop_layers(part)
        try:
            built = _built(type(model), config)
        except Exception:  # a model may check its configuration in any way; the next factor may fit
            continue
        if built is not None:
            return Shrunken(built, min(LENGTH, _limit(config)), scaled)
    return None


def _factors(config: Any) -> list[int]:
    """Factors by which widths may be divided, largest first."""
    width, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 0)
    if not isinstance(width, int) or width <= 128:
        return [1]
    common = gcd(width, heads) if isinstance(heads, int) and heads else gcd(width, 16)
    return [*[factor for factor in range(common, 1, -1) if common % factor == 0][:6], 1]


def _drop_layers(config: Any) -> None:
    """Keep only as many of the first layers as are needed to have every kind of layer."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or getattr(config, "num_kv_shared_layers", 0):
        return
    values = {name: getattr(config, name, None) for name in (*vars(config), *_KINDS)}
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    firsts = [kinds.index(kind) for kinds in lists for kind in kinds]
    periods = [
        value for name, value in values.items() if _PERIOD.search(name) and isinstance(value, int) and value < count
    ]
    fewer = max(2, *[first + 1 for first in firsts], *[period + 1 for period in periods], 0)
    if fewer < count:
        config.num_hidden_layers = fewer
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == count:
                setattr(config, name, value[:fewer])


def _built(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """Build a random model of the configuration and run it on a short text as a test; None if it would be too large."""
    make: Any = kind
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters()) > MOST_WEIGHTS:
                return None
        torch.manual_seed(0)
        model = make(config).requires_grad_(False).eval()
        for parameter in model.parameters():
            # Larger weights than usual: with the usual initial weights, all tokens would be almost equally likely.
            if parameter.ndim > 1 and float(parameter.std()) < 0.1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        tokens = torch.arange(4)[None]
        with torch.no_grad():
            try:
                model.double()(tokens)
            except RuntimeError:  # some operators do not support float64
                model.float()(tokens)
    return model


def _parts(config: Any) -> Iterator[Any]:
    """Iterate over a configuration and the configurations nested in it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))


def _limit(config: Any) -> int:
    """Number of tokens that a copy can read: its number of positions, or `LENGTH` if the positions are not limited."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 and not _dynamic(text) else LENGTH


def _dynamic(config: Any) -> bool:
    """Whether rotary frequencies depend on the length of the text once it exceeds the configuration's number of
    positions."""
    return "dynamic" in str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))


def _shrink_part(config: Any, factor: int, scaled: dict[int, int]) -> None:
    """Scale down the settings of one configuration in place."""
    values = vars(config)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        smaller = min(positions, 24 if _dynamic(config) else 64)
        config.max_position_embeddings = smaller
    vocabulary = getattr(config, "vocab_size", None)
    recurrent = any("mamba" in name or "state" in name for name in values)
    for name, value in list(values.items()):
        if _TOKEN.search(name):
            over = isinstance(value, int) and isinstance(vocabulary, int) and value >= min(vocabulary, _VOCABULARY)
            if over or isinstance(value, list):
                setattr(config, name, 0 if over else None)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            if name.startswith("vocab_size"):
                setattr(config, name, min(value, _VOCABULARY))
            elif _WIDTHS.search(name):
                narrow = 64 if _HIDDEN.search(name) and not recurrent and factor > 1 else value
                setattr(config, name, max(1, min(value // factor, narrow)))
        elif isinstance(value, list) and _HIDDEN.search(name):
            setattr(config, name, [64 if factor > 1 else width for width in value])
    _scale_windows(values, scaled)


def _scale_windows(values: dict[str, Any], scaled: dict[int, int]) -> None:
    """Scale down all settings that are a number of tokens, also in nested objects, and record them in `scaled`."""
    for name, value in values.items():
        if isinstance(value, dict):
            _scale_windows(value, scaled)
        for pattern, most in _WINDOWS.items():
            if isinstance(value, int) and not isinstance(value, bool) and value > 0 and re.search(pattern, name):
                values[name] = min(value, most)
                scaled.setdefault(values[name], value)
                break
