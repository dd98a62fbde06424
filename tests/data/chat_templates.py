"""Chat templates in the forms of known families, shortened to what decides which tokens are learnt.

`⟦` and `⟧` stand around what a template marks by `{% generation %}`; `compared` and `tagged` fill them in.
"""

import json

import tokenizers

from shoestring.data.tokenizer import Tokenizer, byte_tokenizer

TOKENS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|observation|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
]  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}⟦{{ m.content }}<|im_end|>⟧"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}"
    "{% set content = system + m.content if loop.index0 == 0 else m.content %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}⟦{{ ' ' + content | trim + ' ' + eos_token }}⟧{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}⟦{{ m.content | trim + '<|eot_id|>' }}⟧"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (  # tools stand before the last question; ids of calls have nine characters
    "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}⟦[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.function | tojson }}{{ c.id }}"
    "{% endfor %}]{{ eos_token }}⟧{% elif m.role == 'assistant' %}⟦{{ ' ' + m.content + eos_token }}⟧"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if m.role == 'assistant' %}⟦{{ m.content | trim }}<end_of_turn>\n⟧"
    "{% else %}{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (  # the end of the text is written, too, unless an answer is asked for
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}⟦{{ m.content }}⟧{% else %}"
    "{{ m.content }}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # reasoning stays behind the last question alone, where its marks are written even if there is none
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}⟦{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].replace('<think>', '').strip() if parts | length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].lstrip('\n') }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}⟧"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = (  # reasoning is left out everywhere; the prompt asks for it
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' }}"
    "⟦{{ m.content.split('</think>')[-1] }}{{ '<｜end▁of▁sentence｜>' }}⟧{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' }}⟦{{ m.content + eos_token }}⟧{{ '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}\n{% endif %}{% endfor %}"
)
GLM = (  # an answer ends where the mark of the next role begins, and nowhere else
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}⟦{{ m.content }}⟧{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ALPACA = (  # no special tokens at all
    "{% for m in messages %}{{ '### ' + m.role + ':\n' }}{% if m.role == 'assistant' %}⟦{{ m.content }}\n\n⟧{% else %}"
    "{{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
TEMPLATES = {
    name.lower(): source
    for name, source in list(globals().items())
    if isinstance(source, str) and "⟦" in source and name.isupper()
}


def compared(source: str) -> str:
    return source.replace("⟦", "").replace("⟧", "")


def tagged(source: str) -> str:
    return source.replace("⟦", "{% generation %}").replace("⟧", "{% endgeneration %}")


def tokenizer(template: str) -> Tokenizer:
    """Bytes, and the special tokens of all families."""
    engine = tokenizers.Tokenizer.from_str(byte_tokenizer().engine.to_str())
    engine.add_special_tokens(TOKENS)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return Tokenizer(engine, companions={"tokenizer_config.json": json.dumps(config).encode()})
