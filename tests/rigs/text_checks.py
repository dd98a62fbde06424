"""What the text of generated tokens is compared with: whole decoding, and stop strings found by looking at all ends."""

from __future__ import annotations

import codecs
import os
import random
from collections.abc import Callable, Sequence

from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.writing import Shown, Writing

Decode = Callable[[Sequence[int], bool], str]
"""Text of tokens, without special tokens or with them."""


def text_behind(tokenizer: Tokenizer, decode: Decode, prompt: Sequence[int], tokens: Sequence[int], skip: bool) -> str:
    """What decoding prompt and tokens together has behind the decoded prompt.

    A prompt that ends among bytes may read otherwise once tokens follow it: with its last bytes as a part of the next
    character, or with a replacement character for each byte.
    """
    before, whole = decode(prompt, skip), decode([*prompt, *tokens], skip)
    if whole.startswith(before) or tokenizer.spelling.byte_level:
        return whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071 - of characters
    shown = [token for token in prompt if tokenizer.has(token) and not (skip and token in tokenizer.special)]
    wrong = tokenizer.engine.get_vocab()["<0xFF>"]
    spelled = b"".join(tokenizer.spelling.byte(token) or b"." for token in shown[-3:])
    begun = next(number for number in range(4) if _is_whole(spelled[: len(spelled) - number]))
    candidates = [decode([*shown, wrong], skip)[:-1], decode(shown[: len(shown) - begun], skip)]
    return next(whole[len(text) :] for text in candidates if whole.startswith(text))


def _is_whole(end: bytes) -> bool:
    """Whether no character begins at the end of bytes that lacks some of its own."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(end)
    return not utf8.getstate()[0]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that ends first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip: bool) -> str:
    """The text as `generate` writes it."""
    stream = tokenizer.stream(prompt, skip)
    return "".join(map(stream.add, tokens)) + stream.rest()


def written(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip: bool, stops: Sequence[str] = ()
) -> tuple[list[str], list[Shown]]:
    """The pieces that `serve` sends, and the tokens with log-probabilities."""
    writing = Writing(tokenizer.stream(prompt, skip), stops)
    pieces, shown = list[str](), list[Shown]()
    for token in tokens:
        piece = writing.add(token, TokenLogprob(token, 0.0, []))
        pieces.append(piece.text)
        shown += piece.tokens
        if writing.stopped:
            break
    piece = writing.end()
    return [*pieces, piece.text], shown + piece.tokens


def random_stops(chance: random.Random, text: str) -> list[str]:
    """Stop strings, most of which are somewhere in the text: of any length, also the whole text."""
    stops = []
    for _ in range(chance.randint(1, 3)):
        start = chance.randint(0, max(len(text) - 1, 0))
        inside = text[start : chance.randint(start + 1, max(len(text), start + 1))]
        stops.append(inside if inside and chance.random() < 0.8 else inside + chance.choice(" ax\ufffd"))
    return stops


def misplaced(tokenizer: Tokenizer, text: str, shown: Sequence[Shown]) -> list[Shown]:
    """Tokens whose name does not stand in the text where their offset says, of those that are whole characters."""
    wrong = []
    for token in shown:
        if token.entry.token in tokenizer.special:
            continue
        try:
            name = tokenizer.token_bytes(token.entry.token, token.first).decode()
        except UnicodeDecodeError:
            continue
        if not text.startswith(name, token.start):
            wrong.append(token)
    return wrong
