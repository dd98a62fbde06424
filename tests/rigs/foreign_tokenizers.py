"""Small tokenizers of all kinds that models have, trained on a few sentences, and random texts and tokens for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoestring.data.tokenizer import Tokenizer

SENTENCES = [
    "hello world, the cat sat on the mat. The dog ran to the house, where it was warm!",
    "0123456789 def f(x):\n    return x + 1  # don't\n",
    "größer naïve 漢字 語 🙂 e\u0301 the cat's hat isn't “here”",
] * 10
BEGIN, END = "<s>", "</s>"
SPECIAL = ("<unk>", BEGIN, END, "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "«tool»")
"""Added tokens that are not special, which texts show."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz ABC",
    " .,!?'\n\t",
    "éßñ\u0301\u0308\u200d\u200b",
    "漢字語日本",
    "🙂👍🏽👩\u200d🚀",
    "\ufffd\u2581\xa0\0",
)


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(engine, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))


def llama() -> tokenizers.Tokenizer:
    """BPE with byte fallback and a space before every text, as Llama 2 and Mistral have it."""
    return _byte_fallback([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)])


def gemma() -> tokenizers.Tokenizer:
    """BPE with byte fallback and nothing before a text."""
    return _byte_fallback([], [])


def unigram() -> tokenizers.Tokenizer:
    """As T5, XLNet and ALBERT have it."""
    engine = tokenizers.Tokenizer(models.Unigram())
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    return _trained(engine, trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", show_progress=False))


def unigram_bytes() -> tokenizers.Tokenizer:
    """Unigram with byte fallback."""
    engine = unigram()
    table = json.loads(engine.to_str())
    spelled = {token["content"] for token in table["added_tokens"]}
    scores = [entry for entry in table["model"]["vocab"] if entry[0] not in spelled]
    names = sorted(table["added_tokens"], key=lambda token: token["id"])
    special = [[token["content"], 0.0] for token in names if token["id"] < len(table["model"]["vocab"])]
    table["model"] |= {"vocab": [*special, *[[byte, -20.0] for byte in BYTES], *scores], "byte_fallback": True}
    table["added_tokens"] = []
    engine = tokenizers.Tokenizer.from_str(json.dumps(table))
    engine.decoder = _sentencepiece([decoders.Strip(" ", 1, 0)])
    return _with_added(engine)


def word_piece() -> tokenizers.Tokenizer:
    """As BERT has it."""
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return _trained(engine, trainers.WordPieceTrainer(vocab_size=300, show_progress=False))


def suffixes() -> tokenizers.Tokenizer:
    """BPE whose tokens mark the end of a word, as the first GPT has it."""
    engine = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.BPEDecoder(suffix="</w>")
    return _trained(engine, trainers.BpeTrainer(vocab_size=300, end_of_word_suffix="</w>", show_progress=False))


def words() -> tokenizers.Tokenizer:
    """Whole words, and no decoder."""
    engine = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(engine, trainers.WordLevelTrainer(vocab_size=300, show_progress=False))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback, space before": llama,
    "byte-fallback": gemma,
    "Unigram": unigram,
    "Unigram, byte-fallback": unigram_bytes,
    "WordPiece": word_piece,
    "BPE, suffixes": suffixes,
    "words": words,
}


@cache
def engine_of(kind: str, begins: bool = False) -> str:
    """The tokenizer.json of a kind; with a token before every text, if it `begins` so."""
    engine = KINDS[kind]()
    if begins:
        ids = [(token, engine.token_to_id(token)) for token in (BEGIN, END)]
        engine.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=ids)
    return engine.to_str()


def tokenizer_of(kind: str, begins: bool = False, template: str = "") -> Tokenizer:
    """A tokenizer of a kind, which may have a chat template."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "unk_token": "<unk>"}
    config |= {"chat_template": template} if template else {}
    engine = tokenizers.Tokenizer.from_str(engine_of(kind, begins))
    return Tokenizer(engine, kind, {"tokenizer_config.json": json.dumps(config).encode()})


def random_text(chance: random.Random, longest: int = 40) -> str:
    """A text of several scripts, with spaces, combining marks and text that spells special and added tokens."""
    parts = []
    for _ in range(chance.randint(0, 6)):
        alphabet = chance.choice(_ALPHABETS)
        parts.append("".join(chance.choices(alphabet, k=chance.randint(0, longest // 6))))
        if chance.random() < 0.2:
            parts.append(chance.choice([*SPECIAL, *ADDED, "the cat sat", "<|im_st"]))
    return "".join(parts)


def random_tokens(chance: random.Random, tokenizer: Tokenizer, most: int = 12) -> list[int]:
    """Tokens as no tokenizer would make them: parts of characters, special tokens and unused ids among them."""
    size, tokens = tokenizer.vocab_size, list[int]()
    parts = _byte_tokens(tokenizer)
    vocabulary = tokenizer.engine.get_vocab()
    special = [vocabulary[token] for token in (*SPECIAL, *ADDED)]
    while len(tokens) < most and chance.random() < 0.9:
        match chance.randrange(5):
            case 0 if parts:
                tokens += chance.choices(parts, k=chance.randint(1, 5))
            case 1 if parts:
                tokens += tokenizer.encode(chance.choice("é漢🙂\ufffd\U0010ffff"))[chance.randint(0, 1) :]
            case 2:
                tokens += tokenizer.encode(random_text(chance, 12))
            case 3:
                tokens.append(chance.choice([*special, size, size + 5]))
            case _:
                tokens += chance.choices(range(size), k=chance.randint(1, 3))
    return tokens[:most]


@cache
def _byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of one byte."""
    tokens = range(tokenizer.vocab_size)
    if tokenizer.spelling.byte_level:
        return [token for token in tokens if len(tokenizer.spelling.text_bytes(token)) == 1]
    return [token for token in tokens if tokenizer.spelling.byte(token) is not None]


def _byte_fallback(before: Sequence[normalizers.Normalizer], after: Sequence[decoders.Decoder]) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    engine.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    engine.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    # Characters beyond ASCII stay out of the alphabet, so that they are bytes.
    ascii_only = ["".join(c for c in text if c.isascii()) for text in SENTENCES]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL[:3], *BYTES], show_progress=False)
    engine.train_from_iterator(ascii_only, trainer)
    table = json.loads(engine.to_str())
    table |= {"pre_tokenizer": None, "added_tokens": []}
    engine = tokenizers.Tokenizer.from_str(json.dumps(table))
    engine.decoder = _sentencepiece(after)
    return _with_added(engine)


def _sentencepiece(after: Sequence[decoders.Decoder]) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])


def _trained(engine: tokenizers.Tokenizer, trainer: Any) -> tokenizers.Tokenizer:
    trainer.special_tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    engine.train_from_iterator(SENTENCES, trainer)
    return _with_added(engine)


def _with_added(engine: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    engine.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return engine
