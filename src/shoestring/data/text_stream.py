"""Decodes tokens that arrive one by one; the text is the same as if transformers decoded all of them at once.

The text of a token depends on its neighbours. The first token of a text has no leading space in tokenizers of the
SentencePiece and WordPiece kinds, and one character may need several tokens. Therefore the tokens of an answer are
decoded together with the last tokens of its prompt. Two kinds of tokenizers have tokens that stand for bytes:

- Byte-level tokenizers (GPT-2, Llama 3, Qwen): every token is a sequence of bytes, and each ill-formed sequence of
  UTF-8 is decoded to one U+FFFD.
- Tokenizers with byte fallback (Llama 2, Mistral, Gemma): a token `<0x..>` is one byte. If a run of such tokens is not
  valid UTF-8 as a whole, each byte is decoded to U+FFFD, even bytes that would be characters on their own. A run of
  such tokens is therefore held back until it ends or can no longer be UTF-8.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import tokenizers

from shoestring.data import BYTES

if TYPE_CHECKING:
    from shoestring.data.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Character that stands for bytes that are not UTF-8."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Pattern of a token that is one byte, in tokenizers with byte fallback."""
_CONTEXT = 4
"""Maximum number of earlier tokens that are decoded together with new tokens, to give them context."""


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that are printable characters in Latin-1."""
_OTHERS = [byte for byte in range(BYTES) if byte not in _PRINTABLE]
BYTE_CHARACTERS = {chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)): byte for byte in range(BYTES)}
"""Maps each character of the tokens of a byte-level tokenizer to the byte that it represents. As in GPT-2, a printable
byte is represented by its own character, and the other bytes by the characters from U+0100 on."""


class Spelling:
    """Maps the tokens of a tokenizer to the bytes that they stand for, according to the tokenizer's decoder."""

    def __init__(self, engine: tokenizers.Tokenizer) -> None:
        self._engine = engine
        decoder = engine.decoder
        pending = [] if decoder is None else [json.loads(decoder.__getstate__())]  # own file: of the engine
        steps = set[str]()
        while pending:
            step = pending.pop()
            steps.add(step["type"])
            pending += step.get("decoders", [])
        self.byte_level = steps - {"Fuse", "Sequence"} == {"ByteLevel"}
        """Whether the tokenizer is byte-level, so that every token is a sequence of bytes."""
        self._falls_back = "ByteFallback" in steps

    def byte(self, token: int) -> bytes | None:
        """The byte that a token stands for in a tokenizer with byte fallback; None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(self._engine.id_to_token(token) or "") if self._falls_back else None
        return None if match is None else bytes.fromhex(match[1])

    def text_bytes(self, token: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for, according to its decoder."""
        text = self._engine.id_to_token(token) or ""
        if all(character in BYTE_CHARACTERS for character in text):
            return bytes(BYTE_CHARACTERS[character] for character in text)
        return text.encode()


class TextStream:
    """Decodes tokens one by one; a character that takes several tokens is returned once it is complete.

    The concatenated results are the text that follows the prompt's text when prompt and tokens are decoded together. If
    the prompt ends inside a character, its last bytes may be decoded differently once tokens follow. A character
    belongs to the text if a token of the text completes it. The cost per token does not grow with the length of the
    text.

    Args:
        prompt: tokens of the prompt, which come before the text.
        skip_special_tokens: whether special tokens are left out of the text.
        shown: texts of special tokens that are never left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._hidden = tokenizer.special if skip_special_tokens else frozenset[int]()
        self._hidden -= set(map(tokenizer.engine.token_to_id, shown))
        decoder = _Bytes if tokenizer.spelling.byte_level else _Neighbours
        self._decoder: _Decoder = decoder(tokenizer, filter(self.shows, reversed(prompt)))
        self.begun = any(map(self.shows, reversed(prompt)))
        """Whether a visible token precedes the next token."""

    @property
    def replaced(self) -> bool:
        """Whether the last returned text begins with one replacement character for each byte that had been held
        back."""
        return self._decoder.replaced

    @property
    def held_back(self) -> int:
        """Number of complete characters that are held back, because the next tokens may change them."""
        return self._decoder.complete

    def add(self, token: int) -> str:
        """Add a token; returns the text that it completes, which may be empty. A hidden token adds no text."""
        if not self.shows(token):
            return ""
        self.begun = True
        return self._decoder.add(token)

    def rest(self) -> str:
        """The text of the tokens that are still incomplete, with replacement characters."""
        return self._decoder.rest()

    def shows(self, token: int) -> bool:
        """Whether a token contributes to the text: the token is neither hidden nor an unused id."""
        return token not in self._hidden and self.tokenizer.has(token)


class _Decoder(Protocol):
    replaced: bool
    """Whether the bytes decoded last were not valid UTF-8, so that each became a replacement character."""
    complete: int
    """Number of complete characters that the next tokens may still change, not including characters of the prompt."""

    def __init__(self, tokenizer: Tokenizer, reversed_prompt: Iterator[int]) -> None: ...

    def add(self, token: int) -> str: ...

    def rest(self) -> str: ...


class _Bytes:
    """Decoder for byte-level tokenizers: the bytes of all tokens are decoded as one text."""

    def __init__(self, tokenizer: Tokenizer, reversed_prompt: Iterator[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        end = b""
        for token in reversed_prompt:
            end = tokenizer.spelling.text_bytes(token) + end
            if len(end) >= 3:  # an incomplete character has at most three bytes
                break
        self._utf8.decode(end)
        # The replacement characters to which the prompt's incomplete last character is decoded if no token completes
        # it.
        self._before = self._utf8.getstate()[0].decode(errors="replace")
        self.replaced, self.complete = False, 0

    def add(self, token: int) -> str:
        return self._behind_prompt(self._utf8.decode(self._tokenizer.spelling.text_bytes(token)))

    def rest(self) -> str:
        return self._behind_prompt(self._utf8.decode(b"", final=True))

    def _behind_prompt(self, text: str) -> str:
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        return text


class _Neighbours:
    """Decoder for all other tokenizers: a token is decoded together with the previous token, and a run of byte tokens
    as a whole."""

    def __init__(self, tokenizer: Tokenizer, reversed_prompt: Iterator[int]) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False  # whether the current run of bytes is not valid UTF-8
        self._prompt_readings: list[str] = []  # texts that the prompt's bytes in `_pending` may decode to
        self.replaced, self.complete = False, 0
        run: list[int] = []
        for token in reversed_prompt:
            if tokenizer.spelling.byte(token) is None:
                self._settle([*reversed([token, *islice(reversed_prompt, _CONTEXT - 1)])])
                break
            run.append(token)
        for token in reversed(run):
            self.add(token)
        if self._pending:
            whole = self._pending[: len(self._pending) - len(self._utf8.getstate()[0])]
            replaced = REPLACEMENT * len(self._pending)
            self._prompt_readings = [self._decoded(self._pending), replaced, self._decoded(whole)]
        self.complete = 0

    def add(self, token: int) -> str:
        byte = self._tokenizer.spelling.byte(token)
        if byte is None:
            text = self._settle([*self._pending, token])
            self._broken = False
            return text
        if self._broken:
            return REPLACEMENT
        self._pending.append(token)
        try:
            self.complete += len(self._utf8.decode(byte))
        except UnicodeDecodeError:
            self._broken = True
            return self._settle(self._pending)
        return ""

    def rest(self) -> str:
        return self._settle(self._pending)

    def _settle(self, tokens: Sequence[int]) -> str:
        """Decode tokens whose text later tokens cannot change."""
        self.replaced = self._broken or bool(self._utf8.getstate()[0])
        text = self._decoded(tokens)
        text = text[len(next(filter(text.startswith, self._prompt_readings), "")) :]
        tokens = [*self._context, *tokens]
        last = tokens[-1:]
        self._context, self._context_text = last, self._tokenizer.decode(last, skip_special_tokens=False)
        if not self._context_text:
            self._context = tokens[-_CONTEXT:]
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        self._pending, self._prompt_readings, self.complete = [], [], 0
        self._utf8.reset()
        return text

    def _decoded(self, tokens: Sequence[int]) -> str:
        """The text of tokens when they follow the context tokens."""
        if not tokens:
            return ""
        whole = self._tokenizer.decode([*self._context, *tokens], skip_special_tokens=False)
        return whole[len(self._context_text) :]
