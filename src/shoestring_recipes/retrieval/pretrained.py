"""Loads a pretrained BERT or RoBERTa from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoestring.core.errors import ConfigError
from shoestring.models.hf import quiet_transformers
from shoestring.storage import foreign

FAMILIES = ("bert", "roberta")
"""Values of `model_type` in the configuration of pretrained models that can be used."""


def pretrained(folder: str) -> Any:
    """Load a BERT or RoBERTa from its folder; no code of the folder is run.

    Raises:
        ConfigError: transformers is not installed, or the folder holds no such model.
    """
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ConfigError("a pretrained encoder needs transformers", hint='pip install "shoestring[hf]"') from error
    root = Path(folder)
    try:
        kind = foreign.read_json_object(root / "config.json", within=root).get("model_type")
        for file in root.glob("*.safetensors"):
            foreign.check_within(file, root)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{folder}` has no readable config.json: {error}", hint="name a model's folder") from error
    if kind not in FAMILIES:
        raise ConfigError(f"`{folder}` is of the kind `{kind}`", hint=f"name a folder of {' or '.join(FAMILIES)}")
    options = {"add_pooling_layer": False, "attn_implementation": "sdpa"}
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if torch.get_default_device().type == "meta":  # only shapes are needed; transformers cannot load to meta
                return AutoModel.from_config(config, **options)
            safe = {"trust_remote_code": False, "use_safetensors": True, "output_loading_info": True}
            model, info = AutoModel.from_pretrained(folder, config=config, **options, **safe)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"`{folder}` cannot be loaded: {str(error).splitlines()[0]}", hint="check it") from error
    if missing := sorted(info["missing_keys"]):  # transformers would initialise them at random
        raise ConfigError(f"`{folder}` lacks the weight `{missing[0]}`", hint="name the folder of a complete model")
    return model
