"""Reads PEFT's adapter_config.json from untrusted folders; only adapters of linear layers are supported."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import CheckpointError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields

_REPETITIONS = 3
"""Maximum number of repetition operators in a pattern of layer names; with more, backtracking may take exponential
time."""
LONGEST = 400
"""Number of leading characters of a layer's name that patterns are matched against; bounds the time of backtracking."""


@dataclass(frozen=True)
class AdapterConfig:
    """The settings in adapter_config.json of a supported adapter."""

    base: str
    """Name of the base model; empty if the file does not state it."""
    alpha: float
    alphas: Mapping[re.Pattern[str], float]
    """Alpha of the layers whose names match a pattern."""
    root: bool
    """Whether alpha is divided by the square root of the rank (rsLoRA) instead of the rank."""
    modules_to_save: Sequence[str]
    """Names of the modules that were trained in full, in addition to the adapters."""
    ties: bool
    """Whether a tied weight that was trained in full is stored under only one of its names."""

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        """Read an adapter's settings from its adapter_config.json.

        Raises:
            CheckpointError: the file cannot be read, or an entry has a wrong type or an unsupported value.
        """
        config = adapter_fields(path)
        plain = {"peft_type": ("LORA",), "bias": ("none", None), "lora_bias": (False, None)}
        plain |= dict.fromkeys(("layer_replication", "target_parameters", "trainable_token_indices"), (None, [], {}))
        plain |= dict.fromkeys(("use_qalora", "use_bdlora"), (False, None))
        for name, values in plain.items():
            if (value := config.get(name)) not in values and name in config:
                hint = "LoRA and DoRA of linear layers are supported, without trained biases"
                raise CheckpointError(f"{config.where}: {name} is {reprlib.repr(value)}", hint=hint)
        patterns = config.entries("alpha_pattern")
        return cls(
            base=config.text("base_model_name_or_path", ""),
            alpha=config.number("lora_alpha", 8),
            alphas={_pattern(pattern, patterns.where): patterns.number(pattern) for pattern in patterns},
            root=config.flag("use_rslora", False),
            modules_to_save=config.texts("modules_to_save", []),
            ties=config.flag("ensure_weight_tying", False),
        )


def _pattern(text: str, where: str) -> re.Pattern[str]:
    """Compile a pattern of layer names as PEFT does: it must match a whole name, or the end of a name after a dot.

    Raises:
        CheckpointError: the pattern is invalid, or has so many repetitions that matching might take too long.
    """
    plain = re.sub(r"\\.", "", text)  # the pattern without its escaped characters
    if len(re.findall(r"[*+{]", plain)) > _REPETITIONS or re.search(r"\)[*+{]", plain):
        raise CheckpointError(f"{where} has a pattern with too many repetitions: {reprlib.repr(text)}")
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where} has {reprlib.repr(text)}, which is not a regular expression: {error}"
        ) from error


def adapter_fields(path: Path) -> Fields:
    """The entries of an adapter's configuration.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    folder = path.parent
    try:
        config = foreign.read_json_object(path, within=folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"`{path}`: {error}"
        raise CheckpointError(f"`{folder}` holds no adapter: {reason}", hint="name a folder that PEFT wrote") from error
    return Fields(config, f"`{path}`", CheckpointError)
