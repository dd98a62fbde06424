"""Reads the end-of-text tokens and the default sampling settings from generation_config.json and config.json.

End-of-text tokens are chosen as in transformers' `generate`: from generation_config.json, or else from config.json (its
top level, or its text part). The tokenizer's own end-of-text token is added, as in vLLM, because many files name no
end-of-text token or a different one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

GENERATION = "generation_config.json"
"""File in a model's folder with the model's end-of-text tokens and default sampling settings."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TEXT_PARTS = ("decoder", "generator", "text_config")
"""Parts of a config.json in which transformers looks for end-of-text tokens if the top level names none."""
_LARGEST = 2.0**64
"""Upper bound of the numbers that are accepted here; `SamplingRule` checks the range of each setting."""


def ends_of(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    end_of_text: int | None = None,
    vocabulary: int | None = None,
    notes: list[str] | None = None,
) -> list[int]:
    """Ids of the tokens that end a text, without duplicates.

    Args:
        generation: content of generation_config.json; empty if there is none.
        config: content of config.json.
        end_of_text: the tokenizer's end-of-text token, which comes first.
        vocabulary: size of the model's vocabulary; larger ids are ignored. None if unknown.
        notes: receives a sentence for each entry that is ignored.
    """
    ends = [] if end_of_text is None else [end_of_text]
    listed: list[Any] = []
    for table in (generation, config, config.get(_text_part(config), {})):  # the first place that names any
        entry = table.get("eos_token_id")
        if listed := [named for named in (entry if isinstance(entry, list) else [entry]) if named is not None]:
            break
    for named in listed:
        if type(named) is not int or named < 0 or (vocabulary is not None and named >= vocabulary):
            if notes is not None and named != -1:  # -1 means "none" in some files
                of = f" of {vocabulary}" if vocabulary is not None else ""
                notes.append(f"eos_token_id {_shown(named)} is no token{of}, and ends no text")
        elif named not in ends:
            ends.append(named)
    return ends


def sampling_of(generation: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, float]:
    """The sampling settings in a generation_config.json, by the field names of `SamplingRule`.

    `do_sample: false` sets the temperature to 0; `do_sample: true` sets it to 1 unless the file has a temperature.
    """
    sampling: dict[str, float] = {}
    for name in _SAMPLING:
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            if notes is not None:
                notes.append(f"{name} {_shown(value)} is no finite number, and is ignored")
        elif name == "top_k":
            sampling[name] = max(int(value), 0)  # -1, like 0, means all tokens
        else:
            sampling[name] = float(value)
    samples = generation.get("do_sample")
    if samples is False:
        return {name: value for name, value in sampling.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    if samples is True:
        sampling.setdefault("temperature", 1.0)
    return sampling


def with_ends(
    generation: Mapping[str, Any], config: Mapping[str, Any], ends: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add `ends` to the end-of-text tokens in the contents of generation_config.json and config.json; returns both
    contents.

    Contents that need no change are returned unchanged. The tokens are added to config.json too, because some programs
    read only that file.
    """
    named = ends_of(generation, config)
    every = list(dict.fromkeys([*named, *ends]))
    value: int | list[int] = every[0] if len(every) == 1 else every
    if (generation or every != named) and not set(ends) <= set(ends_of(generation, {})):
        generation = {**generation, "eos_token_id": value}
    if every == named or set(every) <= set(ends_of({}, config)):
        return dict(generation), dict(config)
    part = _text_part(config)
    if config.get("eos_token_id") is None and config.get(part, {}).get("eos_token_id") is not None:
        return dict(generation), {**config, part: {**config[part], "eos_token_id": value}}
    return dict(generation), {**config, "eos_token_id": value}


def _text_part(config: Mapping[str, Any]) -> str:
    """Name of the text part of a config.json; empty if it has none."""
    return next((name for name in _TEXT_PARTS if isinstance(config.get(name), Mapping) and config[name]), "")


def _shown(value: Any) -> str:
    return "a huge number" if isinstance(value, int) and abs(value) >= 2**256 else reprlib.repr(value)
