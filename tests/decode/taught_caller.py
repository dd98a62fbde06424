"""A small model that `train finetune` teaches to call tools, from generated conversations."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoestring.cli import main
from shoestring.data.tokenizer import Tokenizer, train_bpe
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from tests.decode.calling_templates import SPECIAL, TEMPLATES

CITIES = ("Köln", "Rome", "Oslo", "Lima", "Paris", "Cairo", "Delhi", "Tokyo", "Quito", "Sofia")
TOOLS = {"weather": "The weather of a city.", "clock": "The local time of a city."}
CONTEXT = 1024


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Questions about cities: answered by the offered tool, by two calls of it, or with regret where it is missing."""
    drawn = random.Random(seed)
    for number in range(count):
        name, asked = drawn.choice([("weather", "Hot in {}?"), ("clock", "Late in {}?")])
        cities = drawn.sample(CITIES, 1 + (drawn.random() < 0.25))
        messages = [{"role": "user", "content": asked.format(" and ".join(cities))}]
        if drawn.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        offered = drawn.sample(sorted(TOOLS), drawn.choice([0, 1, 1, 1, 2]))
        if name not in offered:
            messages.append({"role": "assistant", "content": f"I have no {name}."})
        else:
            calls = [_call(name, city, f"{number}-{place}") for place, city in enumerate(cities)]
            high = [drawn.random() < 0.5 for _ in cities]
            answers = [_said(name, city, well, drawn) for city, well in zip(cities, high, strict=True)]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": said}
                for call, said in zip(calls, answers, strict=True)
            ]
            messages.append({"role": "assistant", "content": " ".join("Yes." if well else "No." for well in high)})
        tools = [_tool(tool, drawn) for tool in offered]
        yield {"messages": messages, **({"tools": tools} if tools else {})}


def _call(name: str, city: str, number: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _said(name: str, city: str, high: bool, drawn: random.Random) -> str:
    if name == "weather":
        said = f"{drawn.randint(25, 39) if high else drawn.randint(2, 15)} °C"
    else:
        said = f"{drawn.randint(20, 23) if high else drawn.randint(10, 15)}:{drawn.randint(10, 59)}"
    return said if drawn.random() < 0.5 else f"{said} in {city}"


def _tool(name: str, drawn: random.Random) -> dict[str, Any]:
    """A definition as clients write it: they differ in what they leave out."""
    city = {"type": "string"} | ({"title": "City"} if drawn.random() < 0.5 else {})
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    if drawn.random() < 0.5:
        parameters["additionalProperties"] = False
    if drawn.random() < 0.3:
        parameters["title"] = f"{name}_args"
    function = {"name": name, "parameters": parameters}
    if drawn.random() < 0.5:
        function["description"] = TOOLS[name]
    if drawn.random() < 0.5:
        function["strict"] = True
    keys = sorted(function, key=lambda _: drawn.random())
    return {"type": "function", "function": {key: function[key] for key in keys}}


def base(folder: Path) -> Path:
    """A model of random weights with a tokenizer and the chat template of Hermes' calls."""
    texts = [json.dumps(record, ensure_ascii=False) for record in conversations(300, 1)]
    trained = train_bpe([*texts, "user\n", "assistant\n", "system\n", "tool\n", "Answer by <tool_call>: "], 600)
    trained.engine.add_special_tokens(SPECIAL)
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATES["hermes"]}
    tokenizer = Tokenizer(trained.engine, companions={"tokenizer_config.json": json.dumps(config).encode()})
    folder.mkdir()
    tokenizer.save_pretrained(folder, CONTEXT)
    torch.manual_seed(0)
    shape = {"dim": 128, "hidden": 352, "layers": 4, "heads": 4, "kv_heads": 4, "context": CONTEXT}
    save_pretrained(GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape)), folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


def taught(folder: Path, steps: int = 300) -> Path:
    """Train the model of `base` on conversations; returns the run folder."""
    data = folder / "calls.jsonl"
    data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in conversations(2000)))
    flags = {
        "model": base(folder / "base"), "data": data, "folder": folder / "run", "epochs": 0, "steps": steps,
        "batch": 8, "accumulate": 1, "data.sequence": 512, "memory.lora.rank": 64, "memory.lora.alpha": 64,
        "memory.lora.modules_to_train": '["embed", "head"]', "optim.adamw.lr": 3e-3, "evaluate_every": 100,
        "precision.autocast.dtype": "fp32",
    }  # fmt: skip
    words = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    assert main(["train", "finetune", *words]) == 0
    return folder / "run"
