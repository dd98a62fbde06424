"""Converts settings of rotary positions between GGUF's keys and transformers' `rope_parameters`.

llama.cpp scales positions in three ways: linearly, by YaRN (Peng et al., 2023), or by a tensor with one factor for each
frequency (Llama 3, LongRoPE). Keys of the file select the first two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.storage.fields import Fields

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
"""Names of the tensors of frequency factors, which are not weights of the model."""
_ORIGINAL = "original_max_position_embeddings"
_BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
_USUAL = {"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0}


class RopeKeys(NamedTuple):
    """GGUF keys without the architecture's prefix, and tensors of frequency factors by name."""

    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]


def write_rope(entries: Mapping[str, Any]) -> RopeKeys:
    """The GGUF keys and tensors for the rotary positions in a configuration.

    Raises:
        ConfigError: llama.cpp does not support these rotary positions.
    """
    rope = entries.get("rope_parameters") or {}
    local: Mapping[str, Any] | None = None
    if "full_attention" in rope:
        rope, local = rope["full_attention"], rope.get("sliding_attention")
    theta = float(rope.get("rope_theta", 10_000.0))
    width = int(entries["head_dim"] * (rope.get("partial_rotary_factor") or 1.0))
    keys: dict[str, Any] = {"rope.freq_base": theta, "rope.dimension_count": width}
    if local is not None:
        if local.get("rope_type", "default") != "default":
            raise ConfigError("llama.cpp does not scale the positions of layers with a sliding window")
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    original = int(rope.get(_ORIGINAL) or entries.get(_ORIGINAL) or entries["max_position_embeddings"])
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    elif kind == "yarn":
        if rope.get("mscale") or rope.get("mscale_all_dim") or not rope.get("truncate", True):
            raise ConfigError("YaRN with mscale or without truncate cannot be written as GGUF")
        factor = float(rope["factor"])
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        keys["rope.scaling.original_context_length"] = original
        if (attention := rope.get("attention_factor")) is not None:
            keys["rope.scaling.attn_factor"] = attention / _yarn_attention(factor)
        keys |= {key: float(rope[name]) for key, name in _BETAS.items() if rope.get(name) is not None}
    elif kind == "llama3":
        keys["rope.scaling.original_context_length"] = original
        return RopeKeys(keys, {FREQUENCIES: factors_of(rope, theta, width)})
    elif kind == "longrope":
        factor = rope.get("factor") or entries["max_position_embeddings"] / original
        usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))  # LongRoPE's formula
        attention = rope.get("attention_factor") or usual
        keys |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(attention)}
        tensors = {LONG: rope["long_factor"], SHORT: rope["short_factor"]}
        return RopeKeys(keys, {name: np.array(values, np.float32) for name, values in tensors.items()})
    elif kind != "default":
        raise ConfigError(f"rotary positions of the type {kind!r} cannot be written as GGUF")
    return RopeKeys(keys, {})


def read_rope(
    fields: Fields, entries: Mapping[str, Any], factors: Mapping[str, np.ndarray], *, local: bool
) -> tuple[dict[str, Any], set[str]]:
    """Read `rope_parameters` of the model in a file; also returns the names of the keys that were used.

    Args:
        factors: the tensors in the file whose names are in `FACTORS`.
        local: whether layers with a sliding window use other rotary frequencies than layers with full attention.

    Raises:
        CheckpointError: a key or tensor is damaged. ConfigError: transformers does not support such rotary positions.
    """
    head, theta = entries["head_dim"], fields.number("rope.freq_base", 10_000.0)
    width = fields.count("rope.dimension_count", head, most=head)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if width != head:
        rope["partial_rotary_factor"] = width / head
    used = {"rope.freq_base", "rope.dimension_count", "rope.scaling.original_context_length"}
    used |= {"rope.scaling.attn_factor", *_SCALING, *_BETAS, *_USUAL, "rope.scaling.yarn_ext_factor"}
    kind = fields.text("rope.scaling.type", "linear")  # llama.cpp's default
    _check_usual(fields, kind)
    original = fields.count("rope.scaling.original_context_length", None)
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    factor = fields.number("rope.scaling.factor", 0.0) or fields.number("rope.scale_linear", 0.0) or 1.0
    if factor <= 0:
        raise CheckpointError(f"{fields.where}.rope.scaling.factor is {factor}")
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, _ORIGINAL: original or entries["max_position_embeddings"]}
        rope |= {name: fields.number(key) for key, name in _BETAS.items() if key in fields}
        if attention != 1.0:
            rope["attention_factor"] = attention * _yarn_attention(factor)
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "longrope"):
        raise ConfigError(f"{fields.where}.rope.scaling.type is {kind!r}", hint="none, linear and yarn are supported")
    if factors and rope["rope_type"] != "default":
        raise ConfigError(f"{fields.where}: its rotary positions are scaled twice, by a key and by {min(factors)}")
    if LONG in factors or SHORT in factors:
        rope |= _longrope(factors, width, original, attention, fields.where)
    elif attention != 1.0 and kind != "yarn":
        raise ConfigError(f"{fields.where}.rope.scaling.attn_factor is {attention}, without YaRN")
    if FREQUENCIES in factors:
        rope |= _llama3(
            _checked(factors, FREQUENCIES, width, fields.where), theta, width, original or 8192, fields.where
        )
    if local:
        used.add("rope.freq_base_swa")
        sliding = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
        return {"full_attention": rope, "sliding_attention": sliding}, used
    return rope, used


def _check_usual(fields: Fields, kind: str) -> None:
    """Raise `ConfigError` if a key changes this kind of scaling in a way that transformers does not support."""
    mixed = fields.number("rope.scaling.yarn_ext_factor", -1.0)  # -1 means that the scaling type determines the value
    usual = {**_USUAL, "rope.scaling.yarn_ext_factor": mixed if mixed < 0 else float(kind == "yarn")}
    for name, value in usual.items():
        if fields.number(name, value) != value:
            raise ConfigError(f"{fields.where}.{name} is {fields.get(name)}", hint=f"only {value} is supported")


def _checked(factors: Mapping[str, np.ndarray], name: str, width: int, where: str) -> np.ndarray:
    values = factors.get(name)
    if values is None or values.shape != (width // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(f"{where}: {name} is not a list of {width // 2} positive numbers")
    return values.astype(np.float64)


def _yarn_attention(factor: float) -> float:
    """Factor by which YaRN scales both queries and keys in ggml and, by default, in transformers."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


# -- factors for every frequency ---------------------------------------------------------------------------------------


def _longrope(
    factors: Mapping[str, np.ndarray], width: int, original: int | None, attention: float, where: str
) -> dict[str, Any]:
    if original is None:
        raise CheckpointError(f"{where}.rope.scaling.original_context_length is missing")
    long, short = (_checked(factors, name, width, where) for name in (LONG, SHORT))
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        _ORIGINAL: original,
        "attention_factor": attention,
    }


def factors_of(rope: Mapping[str, Any], theta: float, width: int) -> np.ndarray:
    """The factor by which Llama 3 divides each rotary frequency: float32 (width / 2,)."""
    factor, original = float(rope["factor"]), float(rope[_ORIGINAL])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original / _wavelengths(theta, width)  # rotations of each frequency over the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _wavelengths(theta: float, width: int) -> np.ndarray:
    return 2 * np.pi * theta ** (np.arange(0, width, 2) / width)


def _llama3(factors: np.ndarray, theta: float, width: int, original: int, where: str) -> dict[str, Any]:
    """Recover Llama 3's four rope settings from the factors; llama.cpp's files store only the factors.

    Between the low and the high limit, the reciprocal of a factor is linear in the number of rotations over the
    original context.
    """
    factor = float(np.float32(factors.max()))
    rope = {"rope_type": "llama3", "factor": factor, _ORIGINAL: original}
    limits = [(1.0, 4.0)]  # Llama 3.1's
    if factor > 1:
        turns = original / _wavelengths(theta, width)
        smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
        between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
        slow = float(turns[smooth <= 1e-4].max(initial=0))
        fast = float(turns[smooth >= 1 - 1e-4].min(initial=1e9))
        if between.sum() >= 2:
            slope, start = np.polyfit(turns[between], smooth[between], 1)
            limits.append((-start / slope, (1 - start) / slope))
        elif between.any():
            turn, share = turns[between][0], smooth[between][0]
            low = max(slow, (turn - share * fast) / (1 - share))
            limits.append((low, low + (turn - low) / share))
        else:
            limits.append((slow, fast))
    for low, high in limits:
        for digits in (3, 6, 17):  # prefers round numbers if they give the same factors
            rope |= {"low_freq_factor": float(f"{low:.{digits}g}"), "high_freq_factor": float(f"{high:.{digits}g}")}
            if low < high and np.allclose(factors_of(rope, theta, width), factors, rtol=1e-5):
                return rope
    raise ConfigError(f"{where}: its factors of rotary frequencies are not Llama 3's", hint="no others are supported")
