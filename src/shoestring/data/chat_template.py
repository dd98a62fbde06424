"""A model's own chat template: a conversation rendered as the model was trained on it, and encoded.

Templates come with models, so they are rendered in jinja2's sandbox, as transformers does. Special tokens are those
that the template writes: text of a conversation that spells one is encoded as ordinary characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import If, Name, Node, Output, Scope, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.tokenizer import Tokenizer, single_threaded

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRIVATE = range(0xF0000, 0x10FFFE)
"""Characters without a meaning, one of which marks text that spells a special token."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Characters that Unicode assigns to nothing, around what the model wrote."""
_TAGGED = "shoestring_tagged"
"""The variable that lets a template write these."""
_Spans = tuple[str, list[tuple[int, int]]]


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
        functions = {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self.template = environment.from_string(source, functions)
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

    def encode(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: with `role` and `content`, and what else the template reads.
            arguments: further variables of the template, such as enable_thinking.

        Raises:
            ConfigError: the template refuses the conversation, or text that spells a special token cannot be marked.
        """
        safe, mark = self._protected({"messages": messages, "arguments": arguments or {}})
        return self._pieces(self.render(safe["messages"], safe["arguments"]), mark)[0]

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, ask: bool = True) -> str:
        """The text that the template makes of a conversation.

        Args:
            ask: end with what the model's answer follows.

        Raises:
            ConfigError: the template refuses it.
        """
        given = {**self.names, "tools": None, "documents": None, **arguments}
        given["messages"] = [dict(message) for message in messages]
        try:
            return self.template.render(given, add_generation_prompt=ask)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error

    # -- training --------------------------------------------------------------------------------------------------

    def samples(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> list[tuple[list[int], list[bool]]]:
        """The samples that a conversation is trained on: their tokens, and which of them are the assistant's.

        These are the parts that the template puts between `{% generation %}` and `{% endgeneration %}`; in a template
        without them, what an answer adds to the text that asks for it, up to the token that ends it. There is one
        sample, and another one for each answer that the template renders differently once more follows (without its
        reasoning, say). A message with a `weight` of 0 is not trained on. An answer that no special token ends is
        followed by the end-of-text token, where it is the last.

        Raises:
            ConfigError: as `encode` does, or an answer does not follow the text that asks for it.
        """
        safe, mark = self._protected({"messages": messages, "arguments": arguments or {}})
        texts = self._tagged(safe["messages"], safe["arguments"])
        found = []
        for text, spans in texts or self._compared(safe["messages"], safe["arguments"]):
            tokens, trained = self._flagged(text, spans, mark)
            if trained and trained[-1] and tokens[-1] not in self.special.values():
                tokens, trained = [*tokens, self.tokenizer.end_of_text], [*trained, True]
            found.append((tokens, trained))
        return found

    def _tagged(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[_Spans]:
        """The text, and where `{% generation %}` is in it; nothing where the template has no such tags."""
        parts = re.split(f"([{_BEGIN}{_END}])", self.render(messages, {**arguments, _TAGGED: True}, ask=False))
        text, spans = "", []
        weights = [message.get("weight", 1) for message in messages if message.get("role") == "assistant"]
        for part in parts:
            if part == _BEGIN:
                spans.append((len(text), len(text)))
            elif part == _END:
                spans[-1] = (spans[-1][0], len(text))
            else:
                text += part
        if len(spans) == len(weights):
            spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
        return [(text, spans)] if len(parts) > 1 else []

    def _compared(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[_Spans]:
        """The texts, and where answers are in them by comparing the text with the answer and without."""
        whole, spans, apart = self.render(messages, arguments, ask=False), [], []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or not message.get("weight", 1):
                continue
            asked = self.render(messages[:number], arguments)
            before = self.render(messages[:number], arguments, ask=False)
            upto = self.render(messages[: number + 1], arguments, ask=False)
            start = _common(asked, upto)
            if start < len(before):
                raise ConfigError(f"the model's chat template changes what stands before message {number + 1}")
            span = (start, len(self._without_rest(upto)))
            if whole.startswith(upto):
                spans.append(span)
            else:
                apart.append((upto, [span]))
        return [*apart, *([(whole, spans)] if spans or not apart else [])]

    def _without_rest(self, text: str) -> str:
        """Up to the special token that ends it, where nothing but space follows that."""
        stripped = text.rstrip()
        return stripped if any(stripped.endswith(token) for token in self.special) else text

    def _flagged(self, text: str, spans: Sequence[tuple[int, int]], mark: str) -> tuple[list[int], list[bool]]:
        """Tokens, and which lie in a span. Where parts of a text have the tokens of the whole, they are encoded one by
        one, as an answer follows a prompt's tokens in generation; else a token belongs to where it begins."""
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)}) if self._joins else [0, len(text)]
        tokens: list[int] = []
        trained: list[bool] = []
        for start, end in pairwise(edges):
            ids, places = self._pieces(text[start:end], mark)
            tokens += ids
            trained += [any(first <= start + place < last for first, last in spans) for place in places]
        return tokens, trained

    @cached_property
    def _joins(self) -> bool:
        """Whether the tokens of two texts, side by side, are those of both together: no space is put before a text."""
        return self.tokenizer.decode([*self.tokenizer.encode("a"), *self.tokenizer.encode("b")]) == "ab"

    # -- text that spells special tokens -----------------------------------------------------------------------------

    def _protected(self, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The values with a mark in text that spells a special token, or may come to; and the mark, empty if none is.

        Raises:
            ConfigError: there is no character that could be one.
        """
        texts = list(_texts(values))
        if any(_BEGIN in text or _END in text for text in texts):
            raise ConfigError("the conversation uses characters that have no meaning in Unicode")
        if not any(self._may_spell(text) for text in texts):
            return values, ""
        used = set().union(*texts)
        mark = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if mark is None:
            raise ConfigError("the conversation uses every private character of Unicode")
        return _mapped(values, lambda text: self._marked(text, mark)), mark

    def _pieces(self, text: str, mark: str) -> tuple[list[int], list[int]]:
        """The tokens of a text that was rendered, and where in it each begins."""
        if not mark:
            with single_threaded():  # a batch, because that lets other threads run meanwhile
                found = self._engine.encode_batch([text], add_special_tokens=False)[0]
            return found.ids, [start for start, _ in found.offsets]
        tokens: list[int] = []
        places: list[int] = []
        at = 0
        assert self._pattern is not None
        for part in self._pattern.split(text):
            if part in self.special:
                tokens.append(self.special[part])
                places.append(at)
            elif part:
                kept = [place for place, character in enumerate(part) if character != mark]
                found = self.tokenizer.engine.encode(part.replace(mark, ""), add_special_tokens=False)
                tokens += found.ids
                places += [at + kept[start] for start, _ in found.offsets]
            at += len(part)
        return tokens, places

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
    """`{% generation %}` marks what the model wrote: with characters around it in training, else it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        statements: Callable[..., Any] = parser.parse_statements
        body = Scope(statements(("name:endgeneration",), drop_needle=True), lineno=line)
        return [self._mark(_BEGIN, line), body, self._mark(_END, line)]

    def _mark(self, character: str, line: int) -> Node:
        output = Output([TemplateData(character)])
        return If(Name(_TAGGED, "load"), [output], [], [], lineno=line).set_lineno(line)


def _common(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested values, but the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name != "role":
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Nested values with each text changed, but the roles of messages."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: each if name == "role" else _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value
