"""How fast a tuned model of transformers is served, as a multiple of its base's rate.

The base is a Llama of 188 M random weights. `finetune` tunes it for two steps; then three servers take turns: one of
the base, one of the merged model, and one of the base with the adapter beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.completions import complete
from benchmarks.decode.server import Process, served
from benchmarks.decode.weights import SHAPE
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from benchmarks.timing import Paired, paired
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPTConfig

TEMPLATE = "{% for message in messages %}{{ message.content + '<|endoftext|>' }}{% endfor %}"
CLIENTS, TOKENS, ROUNDS = 8, 64, 16


def save_base(folder: Path, shape: GPTConfig = SHAPE) -> Path:
    """A Llama in the form of transformers, whose vocabulary begins with the bytes of its tokenizer."""
    transformers, tokenizer = import_module("transformers"), byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        eos_token_id=tokenizer.end_of_text,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder, shape.context)
    return folder


def tune(home: Path, base: Path) -> Path:
    """The folder of a model that `finetune` made of the base; the adapter is in it."""
    texts = [
        {"prompt": f"Is {number} even?", "completion": " yes" if number % 2 == 0 else " no"} for number in range(64)
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (home / "chat.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "shoestring", "train", "finetune", "--model", f"hf:{base}", "--data", "rows.jsonl"]
    short = ["--epochs", "0", "--steps", "2", "--batch", "2", "--accumulate", "1", "--save_best", "false"]
    command += [*short, "--data.template", "chat.jinja", "--data.sequence", "64", "--folder", "run", "--workers", "1"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return home / "run" / "model"


@dataclass(frozen=True)
class Turns:
    """Servers that take turns; each function lets all clients ask one of them at once."""

    base: Callable[[], int]
    merged: Callable[[], int]
    adapter: Callable[[], int]


@contextmanager
def servers(shape: GPTConfig = SHAPE, tokens: int = TOKENS) -> Iterator[Turns]:
    """Start the servers."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        base = save_base(Path(folder) / "base", shape)
        tuned = tune(Path(folder), base)
        plain = stack.enter_context(served(f"hf:{base}"))
        merged = stack.enter_context(served(tuned))
        beside = stack.enter_context(served(f"hf:{base}", "--adapter", f"tuned={tuned / 'adapter'}"))
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))

        def turn(process: Process, name: str | None = None) -> Callable[[], int]:
            return lambda: sum(clients.map(lambda seed: _asked(process, name, seed, tokens), range(CLIENTS)))

        yield Turns(turn(plain), turn(merged), turn(beside, "tuned"))


def _asked(process: Process, name: str | None, seed: int, tokens: int) -> int:
    """Ask for a text, and return the number of its tokens."""
    body = {"prompt": f"Is {seed} even?", "max_tokens": tokens, "temperature": 0, "seed": seed}
    body |= {"logit_bias": {str(byte_tokenizer().end_of_text): -100}} | ({"model": name} if name else {})
    return complete(process.address, body)["usage"]["completion_tokens"]


def compared(turns: Turns, rounds: int = ROUNDS) -> dict[str, Paired]:
    """Time of the base over that of the tuned model, which is the rate of the tuned model over the base's."""
    return {
        "merged": paired(turns.base, turns.merged, rounds=rounds),
        "adapter": paired(turns.base, turns.adapter, rounds=rounds),
    }


@cache
def _once() -> dict[str, Paired]:
    with servers() as turns:
        assert turns.base() == turns.merged() == turns.adapter() == CLIENTS * TOKENS
        return compared(turns)


def rows() -> Iterator[Bar]:
    """The bars of tuned models."""

    def measure(name: str) -> Callable[[Deadline], Measured]:
        return lambda _: _once()[name].measured()

    for name, what in (("merged", "with its adapter merged"), ("adapter", "with its adapter beside the base")):
        yield Bar(
            f"models.tuned-{name}",
            f"tokens a second of a tuned Llama of 188 M weights, {what}, over those of its base; {CLIENTS} clients",
            ">=",
            0.95,
            measure=measure(name),
            baseline="its base, served by `shoestring serve`",
            peers=("transformers", "peft"),
        )
