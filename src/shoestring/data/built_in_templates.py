"""Chat templates for models that come without one, such as those that only continue text."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

from shoestring.core.errors import DataError, nearest
from shoestring.data.chat_template import template_source
from shoestring.data.tokenizer import Tokenizer
from shoestring.storage import foreign

log = logging.getLogger("shoestring.data")

# In `plain`, roles stand on separate lines: with "Assistant: ", the space after the colon would be part of an answer's
# first token in training, but a separate token in a prompt. `END` is replaced by the text of the end-of-text token.
TEMPLATES = {
    "plain": (
        "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}{% for message in messages %}"
        "{{ message.role | capitalize }}:\n{{ message.content }}{% if message.role == 'assistant' %}END{% endif %}\n\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:\n{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""The templates that `data.template` knows by name."""
_CHATML = ("<|im_start|>", "<|im_end|>")
_FILE = "chat_template.jinja"
_MARKER = re.compile(r"<\|\w{1,40}\|>")
"""Pattern of the markers between messages in most templates, such as `<|im_start|>`."""


def with_template(tokenizer: Tokenizer, named: str) -> Tokenizer:
    """Give the tokenizer a chat template, which is then saved with it; returns the tokenizer.

    Args:
        named: a name in `TEMPLATES` or the path of a Jinja file. If empty, a tokenizer with a template keeps it; a
            tokenizer without one gets `chatml` if it has ChatML's tokens, otherwise `plain`.

    Raises:
        DataError: there is no such file, or the tokenizer lacks the tokens of the named template.
    """
    if not named:
        if template_source(tokenizer) is not None:
            return tokenizer
        named = "chatml" if _knows_chatml(tokenizer) else "plain"
        _warn(f'the model has no chat template, so chats are written as data.template = "{named}" does')
    if named == "chatml" and not _knows_chatml(tokenizer):
        hint = 'set data.template = "plain", which needs no tokens of its own'
        raise DataError(f"the tokenizer has no {' and no '.join(_CHATML)}", hint=hint)
    if named in TEMPLATES:
        end = tokenizer.engine.id_to_token(tokenizer.end_of_text) if named == "plain" else ""
        content = TEMPLATES[named].replace("END", end or "").encode()
    else:
        try:
            content = foreign.read_bytes(Path(named))
        except OSError as error:
            close = nearest(named, TEMPLATES) if "." not in named and "/" not in named else ""
            hint = close or f"give the path of a Jinja file, or {' or '.join(TEMPLATES)}"
            raise DataError(f"cannot read the chat template `{named}`: {error.strerror}", hint=hint) from error
    tokenizer.companions[_FILE] = content
    # If a marker is no token, the model has to generate it letter by letter.
    markers = dict.fromkeys(_MARKER.findall(template_source(tokenizer) or ""))
    for marker in [marker for marker in markers if tokenizer.engine.token_to_id(marker) is None][:1]:
        _warn(
            f"`{marker}` of the chat template `{named}` is ordinary text for this tokenizer, which takes "
            f"{len(tokenizer.encode(marker))} tokens and appears in answers; "
            'data.template = "plain" needs no tokens of its own'
        )
    return tokenizer


def _knows_chatml(tokenizer: Tokenizer) -> bool:
    return all(tokenizer.engine.token_to_id(token) is not None for token in _CHATML)


@cache
def _warn(text: str) -> None:
    """Log a warning only once per process, because several parts of a run choose the template of the same data."""
    log.warning(text)
