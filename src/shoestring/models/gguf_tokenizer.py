"""Tokenizers in GGUF files: byte-level BPE (`gpt2`) and SentencePiece's BPE with byte fallback (`llama`).

A file contains only the name of the rule that splits a text before merging; llama.cpp implements these rules. For
SentencePiece's BPE, llama.cpp orders merges by the scores of tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.tokenizer import Tokenizer, companion_config, engine_errors, special_token
from shoestring.storage.fields import Fields

log = logging.getLogger("shoestring")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types in a GGUF file."""
ENDS = ("eos", "eot", "eom")
"""Names of the end tokens that a file may have: end of a document, of a turn and of a message; llama.cpp stops at any
of them."""
_GGML = "tokenizer.ggml."
_SPACE = "\u2581"  # the character that SentencePiece writes for a space
_SPLITTING = 200_000_000
"""Maximum number of characters that are compared when merges are reconstructed from a vocabulary."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_SPELLED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
"""An equivalent of `_CONTRACTIONS` that some tokenizers use."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's built-in rule
_DIGIT = r"\p{N}"


class Rule(NamedTuple):
    """A rule by which a text is split before merging."""

    patterns: tuple[str, ...]
    """Regular expressions, applied in order; each splits the pieces that the previous one left."""
    ignore_merges: bool = False
    """Whether a piece that is itself a token becomes that token without applying merges."""
    begins: bool = False
    """Whether texts begin with the BOS token unless the file says otherwise."""


_LLAMA3 = Rule((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True, begins=True)
_QWEN2 = Rule((_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,))
RULES: Mapping[str, Rule] = {
    "gpt-2": Rule((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "smaug-bpe": Rule(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "starcoder": Rule((_DIGIT, _GPT2)),
    "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""Splitting rules by name; files contain these names."""
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("phi-2", "jina-es", "jina-de", "gigachat", "mpt", "olmo", "jais", "trillion"), "gpt-2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), "llama-bpe"),
    "dbrx": "smaug-bpe",
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), "qwen2"),
    **dict.fromkeys(("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), "starcoder"),
}  # fmt: skip
"""Other names of these rules in llama.cpp."""
_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls")  # llama.cpp's spelling
_HARMLESS = (
    "tokenizer.chat_template", "tokenizer.huggingface", "tokenizer.rwkv", "tokenizer.ggml.fim_",
    "tokenizer.ggml.prefix", "tokenizer.ggml.suffix", "tokenizer.ggml.middle", "tokenizer.ggml.token_type_count",
)  # fmt: skip
"""Prefixes of keys that do not affect how a text is tokenised."""
_KNOWN = {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_sep_token",
          "add_space_prefix", "remove_extra_whitespaces", *(f"{name}_token_id" for name in _IDS)}  # fmt: skip


# -- reading -----------------------------------------------------------------------------------------------------------


def read(values: Mapping[str, Any], path: Path, vocabulary: int) -> Tokenizer | None:
    """Build the tokenizer of a file; returns None and logs a warning if the tokenizer is missing or of an unsupported
    kind.

    Args:
        vocabulary: number of tokens in the model's vocabulary.

    Raises:
        DataError: the tokenizer is damaged. ConfigError: the file has an unknown key that may change the tokens.
    """
    entries = {name.removeprefix(_GGML): value for name, value in values.items() if name.startswith("tokenizer.")}
    fields = Fields(entries, f"{path}: {_GGML[:-1]}", DataError)
    for name in entries:
        full = name if name.startswith("tokenizer.") else _GGML + name
        if name not in _KNOWN and not full.startswith(_HARMLESS):
            raise ConfigError(f"{path} has {full}, an unknown key", hint="it may change the tokens")
    kind, pre = fields.text("model", "none"), fields.text("pre", "default")
    rule = RULES.get(_ALIASES.get(pre, pre))
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and (rule is None or "merges" not in fields)):
        log.warning("%s: its tokenizer, of the unsupported kind %s (%s), is ignored", path, kind, pre)
        return None
    with engine_errors(f"{path}: its tokenizer is damaged", "convert the model again"):
        return _built(fields, rule if kind == "gpt2" else None, vocabulary, str(path))


def _built(fields: Fields, rule: Rule | None, vocabulary: int, where: str) -> Tokenizer:
    tokens = fields.texts("tokens")
    if not 0 < len(tokens) <= vocabulary:
        raise DataError(f"{where} has {len(tokens)} tokens for a model of {vocabulary}")
    types = _numbers(fields, "token_type", len(tokens), NORMAL).astype(int).tolist()
    ids = {name: fields.count(f"{name}_token_id", None, least=0, most=len(tokens) - 1) for name in _IDS}
    known = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    if ids["unknown"] is None and UNKNOWN in types:
        ids["unknown"] = types.index(UNKNOWN)
    if rule is not None:
        engine = _byte_level(known, fields, rule)
    else:
        engine = _byte_fallback(known, types, fields, tokens, ids["unknown"])
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    engine.add_tokens(added)
    engine.add_special_tokens([token for token in added if token.special])
    begins = fields.flag("add_bos_token", rule.begins if rule else True)
    _frame(engine, tokens[ids["bos"]] if begins and ids["bos"] is not None else None,
           tokens[ids["eos"]] if fields.flag("add_eos_token", False) and ids["eos"] is not None else None)  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, token in (("eos", "eos_token"), ("bos", "bos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        if (number := ids[name]) is not None:
            config[token] = tokens[number]
    companions = {"tokenizer_config.json": json.dumps(config).encode()} if ids["eos"] is not None else {}
    if template := fields.text("tokenizer.chat_template", ""):
        companions["chat_template.jinja"] = template.encode()
    return Tokenizer(engine, where, companions)


def _numbers(fields: Fields, name: str, count: int, default: float) -> np.ndarray:
    """Read a list with one number for each token."""
    values = fields.get(name)
    if values is None:
        return np.full(count, default)
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        raise DataError(f"{fields.where}.{name} is not a list of {count} numbers")
    return values


def _byte_level(known: Mapping[str, int], fields: Fields, rule: Rule) -> tokenizers.Tokenizer:
    pairs = [merge.partition(" ") for merge in fields.texts("merges")]
    merges = [(first, second) for first, _, second in pairs if second]
    engine = tokenizers.Tokenizer(models.BPE(dict(known), merges, ignore_merges=rule.ignore_merges))
    last = rule.patterns[-1] == _GPT2
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (rule.patterns[:-1] if last else rule.patterns)
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    engine.decoder = decoders.ByteLevel()
    return engine


def _byte_fallback(
    known: Mapping[str, int], types: Sequence[int], fields: Fields, tokens: Sequence[str], unknown: int | None
) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE, which always merges the pair that forms the token with the highest score."""
    scores = _numbers(fields, "scores", len(tokens), 0.0)
    pieces = {token: i for token, i in known.items() if types[i] in (NORMAL, USER_DEFINED)}
    if sum(len(token) ** 2 for token in pieces) > _SPLITTING:
        raise DataError(f"{fields.where}.tokens are too long to be merged")
    if fields.flag("remove_extra_whitespaces", False):
        raise DataError(
            f"{fields.where}.remove_extra_whitespaces is true", hint="only lossless tokenizers are supported"
        )
    merges = []
    for token, i in pieces.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(first, second) for first, second in halves if first in pieces and second in pieces]
        pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges += [(-float(scores[i]), pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    prefix = fields.flag("add_space_prefix", True)
    engine = tokenizers.Tokenizer(
        models.BPE(
            dict(known),
            [pair for _, pair in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return engine


def _frame(engine: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Make the tokenizer put these tokens before and after a text; None adds no token."""
    if begin is None and end is None:
        return
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    special = [(token, engine.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    engine.post_processor = processors.TemplateProcessing(
        single=[f"{token}:0" if token != "$A" else token for token in single], special_tokens=special
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def keys_of(tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int] = ()) -> dict[str, Any]:
    """The GGUF keys of a tokenizer.

    Args:
        vocabulary: number of tokens in the model's vocabulary. ends: ids that end a text, the most usual first; by
            default the tokenizer's.

    Raises:
        ConfigError: llama.cpp does not support the tokenizer, or the model has fewer tokens than the tokenizer.
    """
    table = json.loads(tokenizer.engine.to_str())  # own file: JSON that the engine wrote
    if table["model"]["type"] != "BPE":
        raise ConfigError(f"a tokenizer of type {table['model']['type']} cannot be written as GGUF")
    by_id = {i: token for token, i in tokenizer.engine.get_vocab(with_added_tokens=True).items()}
    if max(by_id) >= vocabulary:
        raise ConfigError(
            f"the tokenizer has the token {max(by_id)}, and the model has only {vocabulary} tokens",
            hint="resize the model's embeddings",
        )
    fallback = bool(table["model"].get("byte_fallback"))
    types = dict.fromkeys(by_id, NORMAL)
    if fallback:
        types |= {i: BYTE for i, token in by_id.items() if token.startswith("<0x") and len(token) == 6}
        types |= {i: UNKNOWN for i, token in by_id.items() if token == table["model"].get("unk_token")}
    for token in table["added_tokens"]:
        if types[token["id"]] != UNKNOWN:
            types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        if token["lstrip"] or token["rstrip"]:
            log.warning(
                "llama.cpp does not strip the spaces beside the token %s, as this tokenizer does", token["content"]
            )
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in table["model"]["merges"]]
    keys: dict[str, Any] = _scored(table, by_id, merges, vocabulary) if fallback else _named(table, merges)
    keys["tokens"] = [by_id.get(i, f"[PAD{i}]") for i in range(vocabulary)]
    keys["token_type"] = [types.get(i, UNUSED) for i in range(vocabulary)]
    return {_GGML + name: value for name, value in (keys | _ids(tokenizer, ends)).items()} | _template(tokenizer)


def _ids(tokenizer: Tokenizer, ends: Sequence[int]) -> dict[str, Any]:
    """The keys of special tokens: the tokens that begin, end and pad a text."""
    config = companion_config(tokenizer.companions, "the tokenizer")
    ends = list(dict.fromkeys(ends or tokenizer.ends))
    keys: dict[str, Any] = {f"{name}_token_id": end for name, end in zip(ENDS, ends, strict=False)}
    for end in ends[len(ENDS) :]:
        log.warning("a GGUF file can name only %d tokens that end a text; token %d is left out", len(ENDS), end)
    alone = tokenizer.encode("a")
    framed = tokenizer.engine.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(framed)) if framed[i : i + len(alone)] == alone), 0)
    before, after = framed[:at], framed[at + len(alone) :]
    if len(before) > 1 or len(after) > 1 or (after and after[0] != keys["eos_token_id"]):
        raise ConfigError(
            "llama.cpp puts one token before a text and the end token after it", hint="this tokenizer adds others"
        )
    keys |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    for name, token in (("bos", "bos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        text = special_token(config, token)
        if text is not None and (number := tokenizer.engine.token_to_id(text)) is not None:
            keys[f"{name}_token_id"] = number
    keys["bos_token_id"] = before[0] if before else keys.get("bos_token_id", keys["eos_token_id"])
    return keys


def _template(tokenizer: Tokenizer) -> dict[str, str]:
    """The chat template, from its own file or from tokenizer_config.json."""
    if (content := tokenizer.companions.get("chat_template.jinja")) is not None:
        return {"tokenizer.chat_template": content.decode()}
    config = companion_config(tokenizer.companions, "the tokenizer")
    return {"tokenizer.chat_template": config.text("chat_template")} if config.holds_text("chat_template") else {}


def _named(table: Mapping[str, Any], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The GGUF keys of a byte-level tokenizer."""
    splits = _patterns(table["pre_tokenizer"])
    ignores = bool(table["model"].get("ignore_merges"))
    for name, rule in RULES.items():
        if not merges or (splits == rule.patterns and ignores == rule.ignore_merges):
            texts = [" ".join(merge) for merge in merges]
            return {"model": "gpt2", "pre": name, "merges": texts or [""]}
    raise ConfigError(
        "the tokenizer splits texts in a way that cannot be written as GGUF", hint="export without the tokenizer"
    )


def _patterns(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """The regular expressions by which a byte-level tokenizer splits a text; None if it splits in any other way."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, dict) else []
    patterns: list[str] = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex", "?").replace(_SPELLED, _CONTRACTIONS))
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(_DIGIT)
        elif step["type"] != "ByteLevel" or step["add_prefix_space"]:
            return None
        elif step["use_regex"]:
            patterns.append(_GPT2)
    return tuple(patterns) if steps and steps[-1]["type"] == "ByteLevel" else None


def _scored(
    table: Mapping[str, Any], by_id: Mapping[int, str], merges: Sequence[Sequence[str]], vocabulary: int
) -> dict[str, Any]:
    """The GGUF keys of a tokenizer with byte fallback: the earlier a token is merged, the higher is its score."""
    steps = table["normalizer"].get("normalizers", [table["normalizer"]]) if table["normalizer"] else []
    space = table["pre_tokenizer"] or {}
    prefix = any(step["type"] == "Prepend" for step in steps)
    replaced = any(step["type"] == "Replace" and step["content"] == _SPACE for step in steps)
    if space.get("type") == "Metaspace":
        prefix, replaced = space["prepend_scheme"] != "never", True
        log.warning(
            "llama.cpp handles spaces at the start of a text and after special tokens differently from this tokenizer"
        )
    others = {step["type"] for step in steps} - {"Prepend", "Replace"}
    if not replaced or others or space.get("split", False) is True:
        raise ConfigError(
            "the tokenizer handles spaces in a way that cannot be written as GGUF", hint="export without the tokenizer"
        )
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    scores = [-float(ranks.get(by_id.get(i, ""), len(merges))) for i in range(vocabulary)]
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}
