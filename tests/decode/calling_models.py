"""A model that writes chosen answers, and chat templates of the forms in which models call tools."""

import json
from types import SimpleNamespace

import tokenizers
import torch
from torch import Tensor, nn

from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from tests.decode.small_server import running

_HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}"
_TAIL = (
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _template(tools: str, calls: str) -> str:
    return (
        "{% if tools %}{{ '<|im_start|>system\n' + '"
        + tools
        + "' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        + _HEAD
        + calls
        + _TAIL
    )


TEMPLATES = {
    "hermes": _template(
        "Answer by <tool_call>: ",
        "{% if m.content %}{{ m.content + '\n' }}{% endif %}{% for c in m.tool_calls %}"
        '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson'
        " + '}\n</tool_call>' }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}",
    ),
    "llama": _template(
        "Answer by name and parameters, or <|python_tag|>: ",
        '{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "parameters": \''
        " + c.function.arguments | tojson + '}' }}{% if not loop.last %}{{ '; ' }}{% endif %}{% endfor %}",
    ),
    "mistral": _template(
        "",
        "{{ m.content + '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson'
        " + ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}",
    ),
    "mistral, newer": _template(
        "",
        "{{ m.content }}{% for c in m.tool_calls %}"
        "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}",
    ),
    "json": _template(
        "Answer in JSON: ",
        "{{ '[' }}{% for c in m.tool_calls %}"
        "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}"
        "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}",
    ),
}
"""Chat templates by the form of calls. In the forms `llama` and `json`, calls stand alone."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
BEGIN = "<|im_start|>assistant\n"
"""What precedes an answer."""


def tokenizer(form: str) -> Tokenizer:
    """Bytes, special tokens, and the marks of Hermes and Qwen, which are tokens but not special ones."""
    engine = tokenizers.Tokenizer.from_str(byte_tokenizer().engine.to_str())
    engine.add_special_tokens(SPECIAL)
    engine.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATES.get(form, form)}
    return Tokenizer(engine, companions={"tokenizer_config.json": json.dumps(config).encode()})


class Scripted(nn.Module):
    """A model that almost surely writes chosen texts: the first answer of a conversation is the first of `answers`,
    and so on. Like any model, it computes the logits (B, T, V) of tokens (B, T), and knows nothing but these tokens."""

    def __init__(self, tokenizer: Tokenizer, context: int = 4096) -> None:
        super().__init__()
        self.config = SimpleNamespace(context=context, vocab_size=tokenizer.vocab_size)
        self.tokenizer = tokenizer
        self.begin = self.tokens(BEGIN)
        self.answers: list[str] = []

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode_prompt(text, add_special_tokens=False) if text else []

    def forward(self, tokens: Tensor) -> Tensor:
        answers = [[*self.tokens(answer), self.tokenizer.end_of_text] for answer in self.answers]
        following = [self._following(row, answers) for row in tokens.tolist()]
        logits = torch.full((*tokens.shape, self.config.vocab_size), -1e4)
        return logits.scatter_(2, torch.tensor(following)[..., None], 1e4)

    def _following(self, row: list[int], answers: list[list[int]]) -> list[int]:
        """For each token of a row, the token that follows it."""
        following, written, count = list[int](), list[int](), 0
        for position in range(1, len(row) + 1):
            if row[position - len(self.begin) : position] == self.begin:
                written, count = answers[count % len(answers)], count + 1
            following.append(written[0] if written else self.tokenizer.end_of_text)
            written = written[1:]
        return following


def calling_server(form: str, **settings):
    """A server of a `Scripted` model that calls tools in the given form, or by the given chat template."""
    tokens = tokenizer(form)
    return running(tokens=tokens, built=Scripted(tokens), context=4096, **settings)
