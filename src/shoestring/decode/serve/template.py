"""A model's own chat template: a conversation rendered as the model was trained on it, and encoded.

Templates come with models, so they are rendered in jinja2's sandbox, as transformers does. Special tokens are those
that the template writes: text of a conversation that spells one is encoded as ordinary characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.tokenizer import Tokenizer, single_threaded

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRIVATE = range(0xF0000, 0x10FFFE)
"""Characters without a meaning, one of which marks text that spells a special token."""


class ChatTemplate:
    """Renders and encodes conversations.

    Raises:
        DataError: the template is not valid.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(f"line {error.lineno} of the chat template is not valid: {error.message}") from error
        self.tokenizer = tokenizer
        self.names = _special_names(tokenizer)
        added = tokenizer.engine.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        # The longest first, of those that begin alike.
        parts = sorted(map(re.escape, self.special), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(parts)})") if parts else None
        self._beginnings = {token[:length] for token in self.special for length in range(1, len(token))}
        self._endings = {token[-length:] for token in self.special for length in range(1, len(token))}
        self._engine = tokenizers.Tokenizer.from_str(tokenizer.engine.to_str())
        self._engine.encode_special_tokens = False

    def encode(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: with `role` and `content`, and what else the template reads.
            arguments: further variables of the template, such as enable_thinking.

        Raises:
            ConfigError: the template refuses the conversation, or text that spells a special token cannot be marked.
        """
        texts = [text for message in messages for name, text in message.items() if name != "role"]
        texts += [value for value in (arguments or {}).values() if isinstance(value, str)]
        if not any(self._may_spell(text) for text in texts):
            rendered = self.render(messages, arguments or {})
            with single_threaded():  # a batch, because that lets other threads run meanwhile
                return self._engine.encode_batch_fast([rendered], add_special_tokens=False)[0].ids
        used = set().union(*texts)
        mark = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if mark is None:
            raise ConfigError("the conversation uses every private character of Unicode")

        def marked(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: self._marked(value, mark) if isinstance(value, str) and name != "role" else value
                for name, value in values.items()
            }

        rendered = self.render([marked(message) for message in messages], marked(arguments or {}))
        tokens: list[int] = []
        assert self._pattern is not None
        for part in self._pattern.split(rendered):
            if part in self.special:
                tokens.append(self.special[part])
            else:
                tokens += self.tokenizer.encode(part.replace(mark, ""))
        return tokens

    def render(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any]) -> str:
        """The text that the template makes of a conversation.

        Raises:
            ConfigError: the template refuses it.
        """
        given = {**self.names, **arguments, "messages": [dict(message) for message in messages]}
        try:
            return self.template.render(given, add_generation_prompt=True, tools=None, documents=None)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error

    def _may_spell(self, text: str) -> bool:
        """Whether it holds a special token, or a part of one that the template might complete."""
        if self._pattern is None:
            return False
        start, end = text.lstrip(), text.rstrip()
        inner, lengths = text.strip(), range(1, max(map(len, self.special)))
        return (
            self._pattern.search(text) is not None
            or (inner != "" and any(inner in token for token in self.special))
            or any(start[:length] in self._endings for length in lengths)
            or any(end[-length:] in self._beginnings for length in lengths)
        )

    def _marked(self, text: str, mark: str) -> str:
        """With a mark inside whatever is or may become a special token; space around the text stays outside."""
        assert self._pattern is not None
        text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        inner = text.strip()
        if not inner:
            return text
        before, after = text.split(inner, 1) if inner != text else ("", "")
        return f"{before}{mark}{inner}{mark}{after}"


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template beside a tokenizer: chat_template.jinja, or the one in tokenizer_config.json; None where none is.

    Raises:
        DataError: it is not valid.
    """
    if (file := tokenizer.companions.get("chat_template.jinja")) is not None:
        return ChatTemplate(tokenizer, file.decode("utf-8", errors="replace"))
    source = _config(tokenizer).get("chat_template")
    if isinstance(source, list):  # several with names
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return ChatTemplate(tokenizer, source) if isinstance(source, str) else None


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.companions.get("tokenizer_config.json", b"{}"))


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The variables of a template that stand for special tokens."""
    config = _config(tokenizer)
    found = {name: config.get(name) for name in _SPECIAL}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without the escapes for HTML of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body: Callable[..., Any] = parser.parse_statements
        return Scope(body(("name:endgeneration",), drop_needle=True), lineno=line)
