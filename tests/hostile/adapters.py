"""Adapters in PEFT's format for a model beside them, and skipping plans of that model, with something tampered with."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from tests.hostile import hostile
from tests.hostile.frame import Act, command
from tests.hostile.model_folders import write_model

SLOW = ("(a+)+", "(.*)*x", ".*.*.*.*.*.*.*x", "(x|x)*y", "[", "(?P<a>", "a{100000000}", "q_proj", r"layers\.\d+")


def generate(draw: Random, folder: Path) -> Act:
    write_model(draw, folder / "model", "ours")
    if draw.random() < 0.25:
        plan = {"format": 1, "ratios": {"blocks.0.mlp": 0.5}, "context": 8, "saved": 0.2}
        (folder / "plan.json").write_text(json.dumps(plan))
        hostile.tamper_file(draw, folder / "plan.json")
        return command("generate", "model", "--tokens", "2", "--skip", "plan.json")
    adapter = folder / "adapter"
    adapter.mkdir()
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{base}.lora_A.weight": torch.ones(2, 16), f"{base}.lora_B.weight": torch.ones(16, 2)}
    if draw.random() < 0.2:
        name = draw.choice((f"{base}.lora_magnitude_vector", "base_model.model.lm_head.weight", hostile.ESCAPE))
        tensors[name] = torch.ones(draw.choice((0, 1, 16, 257)))
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(folder / "model")}
    config |= {"target_modules": ["q_proj"], "bias": "none", "use_rslora": False, "modules_to_save": None}
    config["alpha_pattern"] = {draw.choice(SLOW): draw.choice((1, 8, -1))} if draw.random() < 0.4 else {}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    path = draw.choice((adapter / "adapter_config.json", adapter / "adapter_model.safetensors"))
    if draw.random() < 0.8:
        hostile.tamper_file(draw, path)
    return command("generate", "adapter", "--tokens", "2", "--prompt", "a")
