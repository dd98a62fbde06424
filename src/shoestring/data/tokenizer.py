"""Tokenizers, which convert text to token ids and back.

The engine is Hugging Face `tokenizers`, and `tokenizer.json` is the only file format, for a BPE trained here, for a
byte tokenizer and for the tokenizers of other models. Byte-level BPE follows GPT-2 (Radford et al., 2019): text is
split by a regular expression, each byte is written as one printable character, and the most frequent pairs are merged.
Models from elsewhere may have any tokenizer, even one that loses text (by lower-casing, say). Only a corpus needs a
lossless tokenizer, because bits per byte would otherwise be wrong.
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
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shoestring.core.errors import ConfigError, DataError
from shoestring.data import BYTES
from shoestring.data.text_stream import BYTE_CHARACTERS, Spelling, TextStream
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring.storage.whole import write_atomic

END = "<|endoftext|>"
"""The end-of-text token, which is put before every document."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that transformers reads along with a tokenizer.json: special tokens and the chat template."""
_ENDS = (END, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
"""End-of-text tokens of known tokenizers, in order of preference."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in tokenizer_config.json."""
_LARGEST_ID = 1 << 24
"""Maximum id of a token; known vocabularies have up to 2**18."""
_PROBE = " Ab\t c\r\n\n  d  é ß 漢字 🙂 <|endoftext|> don't 0123 \u200b~"


class Tokenizer:
    """Encodes text to token ids and decodes token ids to text.

    Text that spells a special token is encoded as ordinary characters, except by `encode_prompt` and
    `encode_with_special`, so that text in a corpus cannot end a document.

    Args:
        origin: name of the tokenizer in error messages.
        companions: contents of the files `COMPANIONS`, by name; they are saved with the tokenizer. The `eos_token` in
            these files is the tokenizer's end-of-text token.

    Raises:
        DataError: the companions are damaged.
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
        self.engine, self.origin, self.spelling = engine, origin, Spelling(engine)
        self.vocab_size: int = engine.get_vocab_size()
        self.companions = dict(companions)
        config = companion_config(self.companions, origin)
        named = special_token(config, "eos_token")
        ends = (*([named] if named is not None else []), *_ENDS)
        self.end: int | None = next((token for token in map(engine.token_to_id, ends) if token is not None), None)
        """Id of the end-of-text token; None if the tokenizer has none."""
        added = engine.get_added_tokens_decoder()
        ids = map(engine.token_to_id, special_tokens(config))
        special = {self.end, *ids, *(number for number, token in added.items() if token.special)}
        self.special: frozenset[int] = frozenset(token for token in special if token is not None)
        """Ids of special tokens, which are hidden in generated text by default. Added tokens that are not flagged as
        special (such as `<think>`) are text."""

    @property
    def end_of_text(self) -> int:
        """Id of the end-of-text token, which is put before every document.

        Raises:
            DataError: the tokenizer has no end-of-text token.
        """
        if self.end is None:
            raise DataError(f"{self.origin} has no end-of-text token", hint=f"add one of {', '.join(_ENDS)}")
        return self.end

    @property
    def ends(self) -> tuple[int, ...]:
        """The end-of-text token; empty if the tokenizer has none."""
        return () if self.end is None else (self.end,)

    def check_corpus(self) -> None:
        """Check that decoding the tokens of a document restores its text, because bits per byte would otherwise be
        wrong.

        Raises:
            DataError: the tokenizer loses text, or has no end-of-text token to separate documents.
        """
        ids = [token for token in self.encode(_PROBE) if token != self.end_of_text]
        if (back := self.decode(ids, skip_special_tokens=False)) != _PROBE:
            raise DataError(
                f"{self.origin} loses text: {_PROBE!r} comes back as {back!r}", hint="use a byte-level tokenizer"
            )

    def dump(self) -> str:
        """The tokenizer and its companions as text, for `load` in another process."""
        companions = {name: content.decode("latin1") for name, content in self.companions.items()}
        return json.dumps([self.engine.to_str(), companions])

    @classmethod
    def load(cls, text: str) -> Tokenizer:
        """Restore a tokenizer from the text that `dump` returned."""
        engine, companions = json.loads(text)
        content = {name: text.encode("latin1") for name, text in companions.items()}
        return cls(tokenizers.Tokenizer.from_str(engine), companions=content)

    @property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's content in a canonical form."""
        table = json.loads(self.engine.to_str())
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    def encode_prompt(self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Encode a text that a model is to continue; returns at least one id.

        Args:
            parse_special: whether text that spells a special token is encoded as that token.
            add_special_tokens: whether to prepend the special tokens that the tokenizer puts before every text (such as
                a beginning-of-text token), with which the model was trained.

        Raises:
            ConfigError: the prompt has no tokens.
            DataError: the tokenizer has no token for a part of the text.
        """
        ids = self.encode_with_special(text) if parse_special else self.encode(text)
        tokens = [*(self.prefix if add_special_tokens else ()), *ids] or list(self.ends)
        if not tokens:
            raise ConfigError("the prompt has no tokens", hint="give a prompt with text")
        return tokens

    def encode_with_special(self, text: str) -> list[int]:
        """Ids of `text`; text that spells a special token is encoded as that token, and no special tokens are added."""
        with single_threaded(), self._encoding():
            return self._reader.encode(text, add_special_tokens=False).ids

    def _encoding(self) -> contextlib.AbstractContextManager[None]:
        return engine_errors(f"{self.origin} cannot encode a text", "the text has characters that it does not know")

    @cached_property
    def prefix(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text."""
        with self._encoding():
            framed = self.engine.encode("a", add_special_tokens=True)
        mask = framed.special_tokens_mask
        return framed.ids[: mask.index(0)] if 0 in mask else []

    @cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """A variant of the engine that encodes no text as a special token (except the one for unknown text). Tokenizer
        models other than BPE look whole words up in their vocabulary, which also contains their special tokens.
        """
        table = json.loads(self.engine.to_str())
        model = table["model"]
        if model["type"] == "BPE" and not (model.get("ignore_merges") and table["pre_tokenizer"] is None):
            return self.engine
        texts = {text: token for token in self.special if (text := self.engine.id_to_token(token)) is not None}
        names = {text: f"\ufdd0{token}" for text, token in texts.items() if text != model.get("unk_token")}
        vocabulary = model["vocab"]
        model["vocab"] = (
            [[names.get(text, text), score] for text, score in vocabulary]
            if isinstance(vocabulary, list)
            else {names.get(text, text): token for text, token in vocabulary.items()}
        )
        for token in table["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        engine = tokenizers.Tokenizer.from_str(json.dumps(table | {"post_processor": None}))
        engine.encode_special_tokens = True
        return engine

    @cached_property
    def _reader(self) -> tokenizers.Tokenizer:
        """A variant of the engine that encodes text that spells a special token as that token."""
        engine = tokenizers.Tokenizer.from_str(self.engine.to_str())
        engine.encode_special_tokens = False
        added = engine.get_added_tokens_decoder()
        ids = [token for token in self.special if token not in added or not added[token].special]
        contents = [content for token in ids if (content := engine.id_to_token(token)) is not None]
        engine.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in contents])
        return engine

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int64 (n,); releases the GIL, so threads encode in parallel."""
        with single_threaded(), self._encoding():
            encodings = self.plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that cannot be decoded become replacement characters."""
        shown = [token for token in ids if token not in self.special] if skip_special_tokens else list(ids)
        with engine_errors(f"{self.origin} cannot decode tokens", "look at the decoder in its tokenizer.json"):
            return self.engine.decode(shown, skip_special_tokens=False)

    def stream(self, prompt: Sequence[int] = (), skip_special: bool = True, shown: Sequence[str] = ()) -> TextStream:
        """Make a decoder of tokens that arrive one by one after the tokens of a prompt; see `TextStream`."""
        return TextStream(self, prompt, skip_special, shown)

    def has(self, token: int) -> bool:
        """Whether an id has a token; a model may have embeddings for more ids than there are tokens."""
        return 0 <= token < 2**32 and self.engine.id_to_token(token) is not None

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        """The bytes of one token, which may be part of a character; empty for an unused id.

        Args:
            first: whether the token is the first visible token of a text; many tokenizers put a space before all other
                tokens.
        """
        text = self.engine.id_to_token(token) if self.has(token) else None
        if text is None:
            return b""
        if token in self.special:
            return text.encode()
        if self.spelling.byte_level:
            return self.spelling.text_bytes(token)
        if (byte := self.spelling.byte(token)) is not None:
            return byte
        stream = TextStream(self, [] if first else self._middle, skip_special_tokens=False)
        return stream.add(token).encode()

    @cached_property
    def _middle(self) -> list[int]:
        """An ordinary token (or none); a token that is decoded after it gets the text that it has in the middle of a
        text."""
        names = ((token, self.engine.id_to_token(token) or "") for token in range(self.vocab_size))
        return next(([token] for token, text in names if text.isalnum() and self.decode([token])), [])

    @cached_property
    def longest(self) -> int:
        """An upper bound of the number of characters in one token."""
        return max(map(len, self.engine.get_vocab(with_added_tokens=True)))

    def decode_documents(self, ids: np.ndarray) -> list[str]:
        """The texts of the documents in `ids` (n,), in which an end-of-text token precedes each document."""
        pieces = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        documents = [piece[1:] if len(piece) and piece[0] == self.end_of_text else piece for piece in pieces]
        ids_of_documents = [document.tolist() for document in documents if len(document)]
        with single_threaded():
            return self.engine.decode_batch(ids_of_documents, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write tokenizer.json atomically, with its companions; companions of another tokenizer are removed."""
        for name in COMPANIONS:
            if name in self.companions:
                write_atomic(path.with_name(name), self.companions[name])
            else:
                path.with_name(name).unlink(missing_ok=True)
        write_atomic(path, self.engine.to_str(pretty=True).encode())

    def save_pretrained(self, folder: Path, context: int) -> None:
        """Write the files that transformers' AutoTokenizer needs to return the same ids; they state a limit of
        `context` tokens."""
        self.save(folder / "tokenizer.json")
        if "tokenizer_config.json" in self.companions:
            return
        table: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # other classes have their own rules for splitting text
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
        if self.end is not None:
            table["eos_token"] = self.engine.id_to_token(self.end)
        write_atomic(folder / "tokenizer_config.json", json.dumps(table, indent=2).encode())


def companion_config(companions: Mapping[str, bytes], origin: str) -> Fields:
    """The tokenizer_config.json among a tokenizer's companions; empty if there is none.

    Raises:
        DataError: the file is not a JSON object.
    """
    try:
        table = foreign.parse_json(companions.get("tokenizer_config.json", b"{}"))
    except ValueError as error:
        raise DataError(f"the tokenizer_config.json of {origin} is not a JSON object: {error}") from error
    return Fields(table, f"the tokenizer_config.json of {origin}", DataError)


def special_token(config: Fields, name: str) -> str | None:
    """Read a special token from tokenizer_config.json: a string, or an object with `content`; None if absent."""
    return config.text(name, None) if config.holds_text(name) else config.entries(name).text("content", None)


def special_tokens(config: Fields) -> list[str]:
    """The special tokens that tokenizer_config.json names."""
    named = [special_token(config, name) for name in SPECIAL if name in config]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        entries = list(listed.values()) if isinstance(listed, dict) else listed if isinstance(listed, list) else []
        named += [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [token for token in named if isinstance(token, str)]


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Context that keeps the engine from starting its thread pool, because the pool breaks if this process is forked
    later. Only the environment variable TOKENIZERS_PARALLELISM can prevent the start; without it, each forked loader
    process prints a warning. Several threads may be in the context at the same time.
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
    """Train a byte-level BPE of at most `vocabulary` tokens: end-of-text, 256 bytes and merges. Training is
    deterministic.

    Raises:
        ConfigError: `vocabulary` leaves no room for a merge.
    """
    if vocabulary < BYTES + 2:
        raise ConfigError(f"a vocabulary of {vocabulary} tokens is too small", hint=f"give at least {BYTES + 2}")
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
    """A tokenizer with one token for each byte; the id of a byte is its value, and 256 is the end-of-text token."""
    engine = tokenizers.Tokenizer(models.BPE(vocab={**BYTE_CHARACTERS, END: BYTES}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END])
    return Tokenizer(engine)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in the file at `path`.

    Raises:
        DataError: the file is missing or cannot be used.
    """
    if not path.exists():
        raise DataError(
            f"no tokenizer at {path}", hint='data.tokenizer is "bpe", "bytes" or the path of a tokenizer.json'
        )
    folder = path.parent
    try:
        content = foreign.read_bytes(path, foreign.TOKENIZER_LIMIT, within=folder)
        beside = {name: path.with_name(name) for name in COMPANIONS}
        companions = {name: foreign.read_bytes(file, within=folder) for name, file in beside.items() if file.exists()}
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {error.filename}: {error.strerror}", hint="check the path"
        ) from error
    with engine_errors(f"{path} is not a tokenizer.json", "save one with `tokenizers`"):
        engine = tokenizers.Tokenizer.from_buffer(content)
        largest = max(engine.get_vocab().values(), default=0)
        if largest > _LARGEST_ID:  # the engine would write an entry for every id up to the largest
            raise DataError(f"{path} has a token of id {largest}", hint=f"the largest supported id is {_LARGEST_ID}")
        return Tokenizer(engine, str(path), companions)


@contextlib.contextmanager
def engine_errors(problem: str, hint: str) -> Iterator[None]:
    """Convert errors of the engine to a DataError. The engine raises a bare `Exception`, or PanicException, which is a
    BaseException of pyo3."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem}: {error}", hint=hint) from error
