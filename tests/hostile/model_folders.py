"""Folders of models: our GPT in Llama's layout, and models of transformers, with something in them tampered with."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.hostile import hostile
from tests.hostile.frame import Act, command

VERBS = ("generate", "quantize", "prune", "skip", "check", "import")


def write_model(draw: Random, folder: Path, family: str) -> None:
    """A tiny model with a tokenizer, a template and a licence; weights sharded with an index, at times."""
    import torch

    from shoestring.data.tokenizer import byte_tokenizer
    from shoestring.models import llama
    from shoestring.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    if family == "ours":
        shape = GPTConfig(vocab_size=257, dim=16, layers=2, heads=2, kv_heads=1, hidden=32, context=64)
        llama.save_pretrained(GPT(shape), folder, max_shard_bytes=draw.choice((2**31, 2**14)))
    else:
        import transformers

        if family == "gpt2":
            config = transformers.GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        else:
            small = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
            more = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
            more |= {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "mixtral" else {}
            config = transformers.AutoConfig.for_model(family, **small, **more)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, max_shard_size=draw.choice(("1GB", "20KB")))
    byte_tokenizer().save_pretrained(folder, 64)
    table = json.loads((folder / "tokenizer_config.json").read_bytes())
    table["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "max_length": 64}))
    (folder / "LICENSE.md").write_text("MIT")


def act_on(draw: Random, model: str) -> Act:
    """What a user does with a model that was downloaded."""
    verb = draw.choice(VERBS)
    if verb in ("quantize", "prune"):
        return command(verb, model, "--out", "made")
    if verb == "skip":
        Path("text.txt").write_text("a text to measure on\n" * 400)
        return command("skip", model, "--data", "text.txt", "--samples", "2", "--sequence", "16")
    if verb == "import":
        return command("checkpoint", "import", model, "--to", "run")
    if verb in ("check", "plan"):
        Path("text.txt").write_text("a text to train on\n" * 400)
        table = {"model": model, "data": "text.txt", "steps": 1, "batch": 2}
        Path("run.toml").write_text(
            "[run]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            + '[data]\ntokenizer = "model"\nsequence = 16\n'
        )
        return command("check", "run.toml") if verb == "check" else command("plan", "run.toml")
    return command("generate", model, "--tokens", "2", "--prompt", "a")


def generate(draw: Random, folder: Path) -> Act:
    model = folder / "model"
    write_model(draw, model, draw.choice(("ours", "ours", "gpt2", "mixtral", "qwen2")))
    for _ in range(draw.choice((1, 1, 2))):
        files = sorted(path for path in model.iterdir() if not path.is_symlink() and path.is_file())
        path = model / "config.json" if draw.random() < 0.4 else draw.choice(files)
        if not path.is_file():
            continue
        if path.suffix == ".safetensors" and draw.random() < 0.4:
            try:
                tensors = load_file(path)
            except SafetensorError:  # tampered with already
                continue
            name = draw.choice(sorted(tensors))
            tensors[draw.choice((name, hostile.ESCAPE, "x"))] = (
                tensors[name].flatten()[: draw.choice((0, 1, 7))].clone()
            )
            save_file(tensors, path)
        else:
            hostile.tamper_file(draw, path)
    return act_on(draw, "model")
