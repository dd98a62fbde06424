"""A tiny model that was taught to call tools by `shoestring train finetune`, in Hermes's and Qwen's form or Llama 3's.

It begins with random weights, so nearly all of them are trained, and its chat template shows of each tool the name and
the parameters with their types. Words are split from punctuation and digits from each other, so that a value is
the same tokens in a question and in the JSON of a call.
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

REPEATED, TRAINED, HELD_OUT = 8000, 5000, 200
"""Conversations that repeat, those to train on, and those to test with."""
CONTEXT = 512
_TOOLS = (
    "{% macro shown(schema) %}{% if schema.anyOf %}{{ schema.anyOf | map(attribute='type') | join('/') }}"
    "{% elif schema.type == 'object' %}({% for name, part in schema.properties.items() %}"
    "{{ name }} {{ shown(part) }}{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% elif schema.type == 'array' %}{{ shown(schema['items']) }}s{% else %}{{ schema.type }}{% endif %}{% endmacro %}"
    "{% macro listed() %}{% for tool in tools %}{{ tool.function.name }} {{ shown(tool.function.parameters) }}\n"
    "{% endfor %}{% endmacro %}"
)
"""Macros that show the tools: a line for each, such as `weather (city string)`."""
_CALLS = "{{{{ '{{\"name\": \"' + call.function.name + '\", \"{key}\": ' + call.function.arguments | tojson + '}}' }}}}"
TEMPLATES = {
    "hermes": _TOOLS
    + "{% if tools %}{{ '<|im_start|>tools\n' + listed() + '<|im_end|>\n' }}{% endif %}"
    + "{% for message in messages %}{% if message.role == 'tool' %}"
    + "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    + "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    + "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    + "{{ '<tool_call>\n' }}" + _CALLS.format(key="arguments") + "{{ '\n</tool_call>' }}{% endfor %}"
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": _TOOLS
    + "{{ '<|begin_of_text|>' }}"
    + "{% if tools %}{{ '<|start_header_id|>tools<|end_header_id|>\n\n' + listed() + '<|eot_id|>' }}{% endif %}"
    + "{% for message in messages %}"
    + "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}"
    + "{{ message.content }}{% for call in message.tool_calls or [] %}" + _CALLS.format(key="parameters")
    + "{% if not loop.last %}{{ '; ' }}{% endif %}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    + "{# <|python_tag|> #}",
}  # fmt: skip
"""Chat templates by the form of calls."""
_SPECIAL = {
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
}
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of the form `hermes` that are not special ones."""
_ENDS = {"hermes": "<|im_end|>", "llama": "<|eot_id|>"}


@cache
def data() -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and others that are held out."""
    trained = conversations(TRAINED, seed=0)
    return trained, conversations(HELD_OUT, seed=1, without=frozenset(one.line for one in trained))


def tokenizer(form: str) -> Tokenizer:
    """A byte-level BPE of the conversations with the special tokens and the chat template of a form."""
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\d|[^\p{L}\d]+"), "isolated")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    config = {"eos_token": _ENDS[form], "chat_template": TEMPLATES[form]}
    companions = {"tokenizer_config.json": json.dumps(config).encode()}
    template = ChatTemplate(Tokenizer(engine, companions=companions), TEMPLATES[form])
    texts = (template.render(one.messages, {"tools": one.tools}, ask=False) for one in data()[0][:1000])
    engine.train_from_iterator(texts, trainer)
    engine.add_special_tokens(list(_SPECIAL[form]))
    if form == "hermes":
        engine.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in _MARKS])
    return Tokenizer(engine, companions=companions)


def teach(form: str, folder: Path, **settings: Any) -> Path:
    """Teach a model to repeat what it reads, and then to call tools, each in a process of its own.

    A model of random weights learns late to copy, and soon once there is little else to learn.

    Args:
        settings: flags of `shoestring train finetune`, for both.

    Returns:
        The folder of the model.
    """
    tokens = tokenizer(form)
    torch.manual_seed(0)
    shape = {"dim": 96, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 192, "context": CONTEXT, "init_std": 0.05}
    origin = {"model": "-", "arguments": {}, "offered": {"context": CONTEXT}}
    save_model(GPT(GPTConfig(vocab_size=tokens.vocab_size, **shape)), tokens, folder / "random", origin)
    repeated = conversations(REPEATED, seed=2, draw_one=repetition)
    copying = _finetune(folder / "random", repeated, folder / "copying", {"epochs": 3, **settings})
    return _finetune(copying, data()[0], folder / form, {"epochs": 2, **settings})


def _finetune(model: Path, examples: Sequence[Conversation], folder: Path, settings: Mapping[str, Any]) -> Path:
    """Train all weights of a model, those of one layer by an adapter; the folder of the model."""
    chats = folder.with_suffix(".jsonl")
    chats.write_text("".join(one.line for one in examples))
    flags = {
        "model": model, "data": chats, "folder": folder, "batch": 4, "accumulate": 1, "evaluate-every": 200,
        "data.sequence": 256, "data.held-out": 0.01, "optim.adamw.lr": 3e-3, "precision.autocast.dtype": "fp32",
        "memory.recompute.every-nth": 3, "memory.lora.layers": '["blocks.0.mlp.down"]',
        "memory.lora.modules-to-train": '["embed", "*norm*", "*.attention.*", "*.gate_up", "blocks.[12].mlp.down"]',
        **settings,
    }  # fmt: skip
    given = chain.from_iterable((f"--{name}", str(value)) for name, value in flags.items())
    run_command([sys.executable, "-m", "shoestring", "train", "finetune", *given], cwd=ROOT, env=dict(os.environ))
    return folder / "model"
