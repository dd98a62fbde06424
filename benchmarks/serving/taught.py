"""A tiny model that was taught to call tools by `shoestring train finetune`, in Hermes's and Qwen's form or Llama 3's.

It begins with random weights, so nearly all of them are trained, and its chat template shows of each tool the name and
the parameters with their types. Words and numbers up to 99 are single tokens, split from punctuation, so that a value
is the same tokens in a question and in the JSON of a call. A model learns to repeat what it reads first, then to call
tools in the form `hermes`, and then in the other form, which takes fewer conversations.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from benchmarks.machine import ROOT
from benchmarks.serving.conversations import Conversation, conversations, repetition
from benchmarks.timing import run_command
from shoestring.data.chat_template import ChatTemplate
from shoestring.data.tokenizer import END, Tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.saving import save_model

REPEATED, HELD_OUT = 20_000, 200
"""Conversations that repeat, and those to test with."""
TRAINED = {"hermes": 40_000, "llama": 16_000}
"""Conversations to train on by the form of calls, in the order in which a model learns the forms."""
CONTEXT = 512
_TOOLS = (
    "{% macro shown(schema) %}{% if schema.anyOf %}{{ schema.anyOf | map(attribute='type') | join('/') }}"
    "{% elif schema.type == 'object' %}({% for name, part in schema.properties.items() %}"
    "{{ name }} {{ shown(part) }}{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% elif schema.type == 'array' %}{{ shown(schema['items']) }}s{% else %}{{ schema.type }}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '<|im_start|>tools\n' }}"
    "{% for tool in tools %}{{ tool.function.name }} {{ shown(tool.function.parameters) }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
"""Shows the tools: a line for each, such as `weather (city string)`."""
_ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CALLS = "{{{{ '{{\"name\": \"' + call.function.name + '\", \"{key}\": ' + call.function.arguments | tojson + '}}' }}}}"
TEMPLATES = {
    "hermes": _TOOLS
    + "{% for message in messages %}{% if message.role == 'tool' %}"
    + "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    + "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    + "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    + "{{ '<tool_call>\n' }}" + _CALLS.format(key="arguments") + "{{ '\n</tool_call>' }}{% endfor %}"
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _ASKED,
    "llama": _TOOLS
    + "{% for message in messages %}"
    + "{{ '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\n' + message.content }}"
    + "{% for call in message.tool_calls or [] %}" + _CALLS.format(key="parameters")
    + "{% if not loop.last %}{{ '; ' }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    + _ASKED + "{# <|python_tag|> #}",
}  # fmt: skip
"""Chat templates by the form of calls."""
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of the form `hermes` that are not special ones."""


@cache
def data() -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and others that are held out."""
    trained = conversations(max(TRAINED.values()), seed=0)
    return trained, conversations(HELD_OUT, seed=1, without=frozenset(one.line for one in trained))


def tokenizer() -> Tokenizer:
    """A byte-level BPE of the conversations, with ChatML's special tokens and the marks of calls."""
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\d{1,2}|[^\p{L}\d]+"), "isolated")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    template = ChatTemplate(Tokenizer(engine), TEMPLATES["hermes"])
    texts = (template.render(one.messages, {"tools": one.tools}, ask=False) for one in data()[0][:3000])
    engine.train_from_iterator(texts, trainer)
    engine.add_special_tokens(list(_SPECIAL))
    engine.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in _MARKS])
    return Tokenizer(engine, companions={"tokenizer_config.json": json.dumps({"eos_token": _SPECIAL[1]}).encode()})


def teach_to_repeat(folder: Path, examples: int = REPEATED, **settings: Any) -> Path:
    """Teach a model of random weights to repeat what it reads, from which it learns other things sooner.

    Args:
        examples: number of conversations. settings: flags of `shoestring train finetune`.

    Returns:
        The folder of the model.
    """
    tokens = tokenizer()
    torch.manual_seed(0)
    shape = {"dim": 96, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 192, "context": CONTEXT, "init_std": 0.05}
    origin = {"model": "-", "arguments": {}, "offered": {"context": CONTEXT}}
    save_model(GPT(GPTConfig(vocab_size=tokens.vocab_size, **shape)), tokens, folder / "random", origin)
    repeated = conversations(examples, seed=2, draw_one=repetition)
    return _finetune(folder / "random", repeated, "hermes", folder / "repeating", {"epochs": 2, **settings})


def teach(form: str, model: Path, folder: Path, examples: int = 0, **settings: Any) -> Path:
    """Teach a model that can repeat, or that knows the other form, to call tools in a form; the folder of the model.

    Args:
        examples: number of conversations; 0 means all that there are for the form.
    """
    taught = data()[0][: examples or TRAINED[form]]
    return _finetune(model, taught, form, folder / form, {"epochs": 1, **settings})


def _finetune(
    model: Path, examples: Sequence[Conversation], form: str, folder: Path, settings: Mapping[str, Any]
) -> Path:
    """Train all weights of a model, those of one layer by an adapter, in a process of its own; the model's folder."""
    chats, template = folder.with_suffix(".jsonl"), folder.with_suffix(".jinja")
    template.write_text(TEMPLATES[form])
    chats.write_text("".join(one.line for one in examples))
    flags = {
        "model": model, "data": chats, "data.template": template, "folder": folder, "batch": 2, "accumulate": 1,
        "evaluate-every": 200, "data.sequence": CONTEXT, "data.held-out": 0.01,
        "optim.adamw.lr": 2e-3, "optim.schedule.warmup": 50, "precision.autocast.dtype": "fp32",
        "memory.recompute.every-nth": 3,
        "memory.lora.layers": '["blocks.0.mlp.down"]',
        "memory.lora.modules-to-train": '["embed", "*norm*", "*.attention.*", "*.gate_up", "blocks.[12].mlp.down"]',
        **settings,
    }  # fmt: skip
    given = chain.from_iterable((f"--{name}", str(value)) for name, value in flags.items())
    run_command([sys.executable, "-m", "shoestring", "train", "finetune", *given], cwd=ROOT, env=dict(os.environ))
    return folder / "model"
