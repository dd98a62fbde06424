"""Chat templates of the forms in which models call tools."""

import json

import tokenizers

from shoestring.data.tokenizer import Tokenizer, byte_tokenizer

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
