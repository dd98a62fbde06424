"""Byte-level tokenizers: text to token ids and back, exactly.

The engine is Hugging Face `tokenizers`, and `tokenizer.json` is the only format: a BPE trained here, plain bytes, or
somebody else's. Byte-level BPE follows GPT-2 (Radford et al., 2019): text is split by a regular expression, each byte
stands for one printable character, and the most frequent pairs are merged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shoestring.core.errors import ConfigError, DataError
from shoestring.data import BYTES
from shoestring.storage.whole import write_atomic

END = "<|endoftext|>"
"""The token before every document."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files beside a tokenizer.json that transformers reads with it: special tokens and the chat template."""
_ENDS = (END, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
_PROBE = " Ab\t c\r\n\n  d  é ß 漢字 🙂 <|endoftext|> don't 0123 \u200b~"


class Tokenizer:
    """Token ids of a text and back.

    A text that spells the end-of-text token is encoded as ordinary characters: text can never end a document.

    Args:
        origin: what errors call it.
        companions: the content of the files beside its own, by `COMPANIONS`; they stay with it wherever it is saved,
            and the `eos_token` that they name is its end-of-text token.

    Raises:
        DataError: the tokenizer has no end-of-text token, or loses text (bits per byte would be wrong).
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        origin: str = "the tokenizer",
        companions: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        engine.encode_special_tokens = True
        engine.no_padding()
        engine.no_truncation()
        self.engine = engine
        self.vocab_size: int = engine.get_vocab_size()
        self.companions = dict(companions)
        ends = (*_named_end(self.companions, origin), *_ENDS)
        end = next((token for token in map(engine.token_to_id, ends) if token is not None), None)
        if end is None:
            raise DataError(f"{origin} has no end-of-text token", hint=f"add one of {', '.join(_ENDS)}")
        self.end_of_text: int = end
        """Id of the token before every document."""
        if (back := self.decode(self.encode(_PROBE))) != _PROBE:
            raise DataError(
                f"{origin} loses text: {_PROBE!r} comes back as {back!r}", hint="use a byte-level tokenizer"
            )

    @property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's file, in a canonical form."""
        table = json.loads(self.engine.to_str())
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special token added."""
        return self.encode_batch([text])[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue, at least one: behind what the tokenizer itself puts before a text, which models
        were trained with (a beginning-of-text token, say)."""
        return [*self._before, *self.encode(text)] or [self.end_of_text]

    @cached_property
    def _before(self) -> list[int]:
        alone = self.encode("a")
        framed = self.engine.encode("a", add_special_tokens=True).ids
        return framed[: framed.index(alone[0])] if alone[0] in framed else []

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int64 (n,); releases the GIL, so threads run side by side."""
        with single_threaded():
            encodings = self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, end-of-text tokens left out; ids that are no valid UTF-8 give replacement characters."""
        return self.engine.decode([i for i in ids if i != self.end_of_text], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character; none for an id that stands for nothing."""
        text = self.engine.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._character_bytes is not None:
            return bytes(self._character_bytes[character] for character in text)
        if text.startswith("<0x") and len(text) == 6:  # how other tokenizers spell a byte
            return bytes.fromhex(text[3:5])
        return self.engine.decode([token], skip_special_tokens=False).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.engine.get_added_tokens_decoder())

    @cached_property
    def _character_bytes(self) -> dict[str, int] | None:
        """The byte that each character of a token stands for; None where tokens are not made of bytes."""
        table = {character: byte for byte, character in enumerate(_byte_characters())}
        vocabulary = self.engine.get_vocab(with_added_tokens=False)
        return table if all(character in table for token in vocabulary for character in token) else None

    def stream(self) -> TextStream:
        """Text of tokens that come one after the other."""
        return TextStream(self)

    def decode_documents(self, ids: np.ndarray) -> list[str]:
        """Texts of the documents in `ids`, (n,), each preceded by the end-of-text token."""
        pieces = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        documents = [piece[1:] if len(piece) and piece[0] == self.end_of_text else piece for piece in pieces]
        kept = [document.tolist() for document in documents if len(document)]
        with single_threaded():
            return self.engine.decode_batch(kept, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write tokenizer.json, complete or not at all, and its companions beside it."""
        for name in COMPANIONS:
            if name in self.companions:
                write_atomic(path.with_name(name), self.companions[name])
            else:
                path.with_name(name).unlink(missing_ok=True)
        write_atomic(path, self.engine.to_str(pretty=True).encode())

    def save_pretrained(self, folder: Path, context: int) -> None:
        """Write what transformers' AutoTokenizer needs to encode texts of up to `context` tokens to the same ids."""
        self.save(folder / "tokenizer.json")
        if "tokenizer_config.json" in self.companions:
            return
        table = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # any other class would build its own rules for splitting
            "eos_token": self.engine.id_to_token(self.end_of_text),
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
        write_atomic(folder / "tokenizer_config.json", json.dumps(table, indent=2).encode())


class TextStream:
    """Text of tokens as they come: a character of several tokens once it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = decoders.DecodeStream(skip_special_tokens=False)
        self._incomplete: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with `token`; end-of-text tokens have none."""
        if token == self.tokenizer.end_of_text:
            return ""
        text = self._decoder.step(self.tokenizer.engine, token)
        self._incomplete = [] if text else [*self._incomplete, token]
        return text or ""

    def rest(self) -> str:
        """The text of tokens that were left incomplete, with replacement characters."""
        return self.tokenizer.decode(self._incomplete)


def _named_end(companions: Mapping[str, bytes], origin: str) -> list[str]:
    """The end-of-text token that tokenizer_config.json names, if it does."""
    try:
        token = json.loads(companions.get("tokenizer_config.json", b"{}")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"the tokenizer_config.json of {origin} is not a JSON object: {error}") from error
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Keep the engine from starting its thread pool, which a later fork of this process would not survive.

    The variable is the engine's only switch; without it each forked loader process prints a warning. Threads may
    enter while one that outlives them is inside.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    if before != "false":
        os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        elif before != "false":
            os.environ[name] = before


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE of at most `vocabulary` tokens: end-of-text, 256 bytes and merges; the same texts give the same.

    Raises:
        ConfigError: `vocabulary` leaves no room for a merge.
    """
    if vocabulary < BYTES + 2:
        raise ConfigError(f"a vocabulary of {vocabulary} tokens", hint=f"give at least {BYTES + 2}")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with single_threaded():
        engine.train_from_iterator(texts, trainer)
    return Tokenizer(engine)


def byte_tokenizer() -> Tokenizer:
    """Token b is the byte b, and 256 is end-of-text."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    engine = tokenizers.Tokenizer(models.BPE(vocab={**vocabulary, END: BYTES}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END])
    return Tokenizer(engine)


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself where it prints, else the next one from U+0100 on (GPT-2)."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(BYTES)]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file at `path`.

    Raises:
        DataError: there is none, or it cannot be used.
    """
    if not path.is_file():
        raise DataError(
            f"no tokenizer at {path}", hint='data.tokenizer is "bpe", "bytes" or the path of a tokenizer.json'
        )
    try:
        engine = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the engine raises bare `Exception` for whatever is wrong with the file
        raise DataError(f"{path} is not a tokenizer.json: {error}", hint="save one with `tokenizers`") from error
    beside = {name: path.with_name(name) for name in COMPANIONS}
    return Tokenizer(engine, str(path), {name: file.read_bytes() for name, file in beside.items() if file.is_file()})
