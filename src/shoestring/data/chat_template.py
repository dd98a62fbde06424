"""Renders conversations by a model's own chat template, in the form that the model was trained on, and encodes them.

Templates come with models, so they are rendered in jinja2's sandbox, as transformers does. Only the template may write
special tokens: text of a conversation that spells one is encoded as ordinary characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import If, Name, Node, Output, Scope, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.learnt_tokens import BEGIN, END, FILLER, AnswerFinder
from shoestring.data.tokenizer import Tokenizer, companion_config, single_threaded, special_token

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRIVATE = range(0xF0000, 0x10FFFE)
"""Private-use characters of Unicode; one that does not occur in the conversation is used to mark text that spells a
special token."""
_TAGGED = "shoestring_tagged"
"""Template variable that makes the tag `{% generation %}` write `BEGIN` and `END`."""
_ADDED, _GROWTH = 1 << 18, 16
"""Two constants: the rendered text may have at most `_ADDED` characters plus `_GROWTH` times the conversation's length.
Known templates add up to 20,000 characters."""
_LARGEST = 1 << 20
"""Maximum number of items in a text or list that a template makes by multiplication."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which a multiplication or a power cannot use up all memory or time."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, str | bytes | list | tuple) else value for value in (left, right)]
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64 and abs(left) <= _LARGEST):
            raise TemplateError("a power is too large")
        if sizes != [left, right] and all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > _LARGEST:
            raise TemplateError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Renders and encodes conversations.

    A template is a program: compiling or rendering it may never end, or use up all memory. Run an untrusted template in
    a process with limits (`shoestring.confined`).

    Raises:
        DataError: the template is not valid.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        functions = {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        with _named():
            self.template = _environment().from_string(source, functions)
        self.tokenizer = tokenizer
        config = companion_config(tokenizer.companions, "the model")
        tokens = {name: special_token(config, name) for name in _SPECIAL}
        self.names = {name: token for name, token in tokens.items() if token is not None}
        added = tokenizer.engine.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        # Longest first, because a regular expression takes the first alternative that matches.
        parts = sorted(map(re.escape, self.special), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(parts)})") if parts else None
        self._beginnings = {token[:length] for token in self.special for length in range(1, len(token))}
        self._endings = {token[-length:] for token in self.special for length in range(1, len(token))}
        self._engine = tokenizers.Tokenizer.from_str(tokenizer.engine.to_str())
        self._engine.encode_special_tokens = False

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        opening: str = "",
    ) -> list[int]:
        """Tokens of a conversation, up to the start of the model's answer.

        Args:
            messages: mappings with `role`, `content` and whatever else the template reads.
            arguments: variables of the template other than the messages, such as enable_thinking.
            longest: limit of the rendered text, in characters.
            opening: text with which the model's answer begins; it may spell special tokens.

        Raises:
            ConfigError: the template refuses the conversation, text that spells a special token cannot be marked, or
                the rendered text is too long.
        """
        safe, mark = self._protected({"messages": messages, "arguments": arguments or {}})
        text = self.render(safe["messages"], safe["arguments"])
        if longest is not None and (length := len(text) - text.count(mark or BEGIN)) > longest:
            raise ConfigError(f"the chat template makes {length} characters of the conversation, more than {longest}")
        return self._pieces(text + opening, mark)[0]

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, ask: bool = True) -> str:
        """Render a conversation as text.

        Args:
            ask: whether to end with the prompt for the model's answer (`add_generation_prompt`).

        Raises:
            ConfigError: the template refuses the conversation.
        """
        variables = {**self.names, "tools": None, "documents": None, **arguments}
        variables["messages"] = [dict(message) for message in messages]
        try:
            text = self.template.render(variables, add_generation_prompt=ask)
        except Exception as error:  # a template is a program, which may raise anything
            reason = "it takes too much memory" if isinstance(error, MemoryError) else str(error)[:300]
            raise ConfigError(
                f"the model's chat template refuses the conversation: {reason or type(error).__name__}"
            ) from error
        size = sum(map(len, _texts([messages, arguments])))
        if len(text) > _ADDED + _GROWTH * size:
            raise ConfigError(f"the model's chat template makes {len(text):,} characters of a conversation of {size:,}")
        return text

    # -- training --------------------------------------------------------------------------------------------------

    def samples(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> list[tuple[list[int], list[bool]]]:
        """The training samples of a conversation: for each sample its tokens, and flags of the tokens that are trained
        on. A conversation makes one sample, and one more for each answer that cannot be trained on in this sample: see
        `learnt_tokens`. A message with a `weight` of 0 is not trained on. The end-of-text token is added to an answer
        that does not end in a special token.

        Raises:
            ConfigError: as for `encode`, or an answer cannot be located in the rendered text.
        """
        learnt = [message.get("role") == "assistant" and message.get("weight", 1) != 0 for message in messages]
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        safe, mark = self._protected({"messages": plain, "arguments": arguments or {}})

        def render(messages: Sequence[Mapping[str, Any]], *, ask: bool = False, tagged: bool = False) -> str:
            return self.render(messages, {**safe["arguments"], **({_TAGGED: True} if tagged else {})}, ask=ask)

        samples = []
        for text, spans in AnswerFinder(render, list(self.special)).texts(safe["messages"], learnt):
            # If the tokenizer allows it, the spans and the text between them are encoded one by one, as in generation,
            # where an answer follows the tokens of its prompt. Otherwise a token belongs to the span of its first
            # character.
            edges = (
                sorted({0, len(text), *(edge for span in spans for edge in span)}) if self._joins else [0, len(text)]
            )
            tokens: list[int] = []
            trained: list[bool] = []
            for start, end in pairwise(edges):
                ids, places = self._pieces(text[start:end], mark)
                tokens += ids
                trained += [any(first <= start + place < last for first, last in spans) for place in places]
            if trained and trained[-1] and tokens[-1] not in self.special.values():
                tokens, trained = [*tokens, self.tokenizer.end_of_text], [*trained, True]
            samples.append((tokens, trained))
        return samples

    def ends(self) -> list[int]:
        """Ids, in ascending order, of the tokens by which a model trained with this template ends its answers."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        ends: set[int] = set()
        for talk in ([question, answer, question, answer], [question, answer]):
            with suppress(ConfigError):  # a template may refuse either conversation
                for tokens, trained in self.samples(talk):
                    last = [
                        token
                        for token, now, then in zip(tokens, trained, [*trained[1:], False], strict=True)
                        if now > then
                    ]
                    ends.update(set(last) & {*self.special.values(), *self.tokenizer.ends})
        return sorted(ends)

    @cached_property
    def _joins(self) -> bool:
        """Whether tokens of two texts can be concatenated: False if the tokenizer puts a space before every text."""
        return self.tokenizer.decode([*self.tokenizer.encode("a"), *self.tokenizer.encode("b")]) == "ab"

    # -- text that spells special tokens -----------------------------------------------------------------------------

    def _protected(self, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Put a mark inside each text that spells a special token or a part of one; returns the changed values and the
        mark. The mark is empty if no text needs a mark.

        Raises:
            ConfigError: no character is left to be the mark, because the conversation uses all of them.
        """
        texts, keys = list(_texts(values)), list(_keys(values))
        if any(character in text for text in (*texts, *keys) for character in (BEGIN, END, FILLER)):
            raise ConfigError("the conversation uses characters that have no meaning in Unicode")
        if not any(self._may_spell(text) for text in texts) and not any(map(self._spells, keys)):
            return values, ""
        used = set().union(*texts, *keys)
        mark = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if mark is None:
            raise ConfigError("the conversation uses every private character of Unicode")
        # Texts that spell no special token are left unchanged, because templates check some texts, such as the length
        # of an id. Keys are changed only if they spell a whole special token, because templates look up keys by name.
        return _mapped(
            values,
            lambda text: self._marked(text, mark) if self._may_spell(text) else text,
            lambda key: self._marked(key, mark) if self._spells(key) else key,
        ), mark

    def _pieces(self, text: str, mark: str) -> tuple[list[int], list[int]]:
        """Encode rendered text; returns its tokens, and for each token the index of its first character."""
        if not mark:
            with single_threaded():  # encodes a batch, because only batch encoding releases the GIL
                encoding = self._engine.encode_batch([text], add_special_tokens=False)[0]
            return encoding.ids, [start for start, _ in encoding.offsets]
        tokens: list[int] = []
        places: list[int] = []
        at = 0
        assert self._pattern is not None
        for part in self._pattern.split(text):
            if part in self.special:
                tokens.append(self.special[part])
                places.append(at)
            elif part:
                unmarked = [place for place, character in enumerate(part) if character != mark]
                encoding = self.tokenizer.plain.encode(part.replace(mark, ""), add_special_tokens=False)
                tokens += encoding.ids
                places += [at + unmarked[start] for start, _ in encoding.offsets]
            at += len(part)
        return tokens, places

    def _spells(self, text: str) -> bool:
        """Whether a text contains a special token."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def _may_spell(self, text: str) -> bool:
        """Whether a text contains a special token, or a part of one that the template might complete to a special
        token."""
        if self._pattern is None:
            return False
        start, end = text.lstrip(), text.rstrip()
        inner, lengths = text.strip(), range(1, max(map(len, self.special)))
        return (
            self._spells(text)
            or (inner != "" and any(inner in token for token in self.special))
            or any(start[:length] in self._endings for length in lengths)
            or any(end[-length:] in self._beginnings for length in lengths)
        )

    def _marked(self, text: str, mark: str) -> str:
        """Put the mark inside every special token in a text and around the text, so that the template cannot complete a
        special token. White space around the text stays outside the marks, because templates strip it.
        """
        assert self._pattern is not None
        text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        inner = text.strip()
        if not inner:
            return text
        before, after = text.split(inner, 1) if inner != text else ("", "")
        return f"{before}{mark}{inner}{mark}{after}"


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that comes with a tokenizer, or None.

    Raises:
        DataError: the template is not valid.
    """
    source = template_source(tokenizer)
    return None if source is None else ChatTemplate(tokenizer, source)


def template_source(tokenizer: Tokenizer) -> str | None:
    """The text of chat_template.jinja, or of the template in tokenizer_config.json; None if there is neither.

    Raises:
        DataError: the template's syntax is not valid. The template is parsed but not compiled, because compiling it may
            never end.
    """
    if (file := tokenizer.companions.get("chat_template.jinja")) is not None:
        source = file.decode("utf-8", errors="replace")
    else:
        config = companion_config(tokenizer.companions, "the model")
        if config.holds_text("chat_template"):
            source = config.text("chat_template")
        else:  # a list of several named templates
            named = {str(entry.get("name")): entry.get("template") for entry in config.tables("chat_template")}
            source = named.get("default")
    if not isinstance(source, str):
        return None
    with _named():
        _environment().parse(source)
    return source


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the options, filters and tags that transformers gives chat templates."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        optimized=False,  # otherwise parsing would compute constants such as 9 ** 9 ** 9
    )
    # jinja2's own filter escapes for HTML.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    return environment


@contextmanager
def _named() -> Iterator[None]:
    """Convert errors of jinja2 to a DataError about the chat template."""
    try:
        yield
    except TemplateSyntaxError as error:
        raise DataError(f"line {error.lineno} of the chat template is not valid: {error.message}") from error
    except (RecursionError, MemoryError, ValueError, TypeError, SyntaxError) as error:
        raise DataError(f"the chat template cannot be compiled: {str(error)[:300] or type(error).__name__}") from error


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """The tag `{% generation %}` around the model's answers: adds `BEGIN` and `END` to them if `_TAGGED` is set."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        statements: Callable[..., Any] = parser.parse_statements
        body = Scope(statements(("name:endgeneration",), drop_needle=True), lineno=line)
        return [self._mark(BEGIN, line), body, self._mark(END, line)]

    def _mark(self, character: str, line: int) -> Node:
        output = Output([TemplateData(character)])
        return If(Name(_TAGGED, "load"), [output], [], [], lineno=line).set_lineno(line)


def _texts(value: Any) -> Iterator[str]:
    """Iterate over every text in nested values, except the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            if name != "role":
                yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _keys(value: Any) -> Iterator[str]:
    """Iterate over the keys of all objects in nested values."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from _keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _keys(entry)


def _mapped(value: Any, change: Callable[[str], str], rename: Callable[[str], str]) -> Any:
    """Apply `change` to every text in nested values, except the roles of messages, and `rename` to every key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            rename(name): entry if name == "role" else _mapped(entry, change, rename) for name, entry in value.items()
        }
    return [_mapped(entry, change, rename) for entry in value] if isinstance(value, list | tuple) else value
