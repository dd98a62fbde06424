"""Test runs of a transformers model that show how it handles a cache, a batch of texts, and texts packed into one
sample.

The logits are compared with the logits of transformers' own `generate`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.task import call_model
from shoestring.models import decoder_layers
from shoestring.models.cache import KVCache
from shoestring.models.hf_cache import OwnCache, RaggedPasses, TextCache, TextPasses
from shoestring.models.skinny import FEW_ROWS

log = logging.getLogger("shoestring")

TOLERANCE = 2e-3
"""Maximum difference at which logits are regarded as equal, in multiples of their standard deviation; not smaller
because some models compute in float32."""


@dataclass
class ReferenceTexts:
    """A long and a short text, and the reference logits of each from transformers."""

    long: Tensor
    short: Tensor
    reference: dict[str, Tensor]


class _UnlikeError(Exception):
    """The logits differ from the reference."""


def trial(check: Callable[[], None]) -> str:
    """Run a check; returns the reason why it fails, or an empty string if it passes."""
    try:
        check()
    except Exception as error:  # a model that expects another kind of cache may raise any error
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def tokens_of(model: nn.Module, length: int) -> Tensor:
    """A random text of `length` tokens, without special tokens."""
    config: Any = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", 32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, vocabulary - 1), min(vocabulary, 90), (length,), generator=generator)
    return tokens.to(next(model.parameters()).device)


def reference_of(
    model: nn.Module, tokens: Tensor, carried: tuple[tuple[str, str], ...], *, by_prefix: bool = False
) -> ReferenceTexts:
    """Make a long and a short text with reference logits, from transformers' `generate` or, if that fails, from one
    pass over the whole text.

    Args:
        carried: names of the model's state outside of caches, as `carried_by` returns them.
        by_prefix: compute the logits after each prefix of the text in a separate pass without a cache.
    """
    long, short = tokens, tokens.flip(0)[: max(6, len(tokens) // 4)]
    reference = {}
    for name, text in (("long", long), ("short", short)):
        with TextPasses(model, OwnCache("", carried=carried)).carriers_restored():
            if by_prefix:
                reference[name] = torch.cat([_last(model, text[:end]) for end in range(2, len(text) + 1)])
                continue
            try:
                reference[name] = _generated(model, text)
            except Exception as error:  # some models cannot generate
                log.debug("%s cannot generate: %r", type(model).__name__, error)
                reference[name] = model(input_ids=text[None]).logits[0, 1:]
    return ReferenceTexts(long, short, reference)


def _last(model: nn.Module, text: Tensor) -> Tensor:
    """Logits (1, V) after a text, from one pass without a cache."""
    return model(input_ids=text[None], use_cache=False).logits[0, -1:]


def _generated(model: Any, text: Tensor, prompt: int = 2) -> Tensor:
    """The logits that transformers' `generate` computes for each token of a text after the first two, and for the token
    that would follow the text."""

    def follow(tokens: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, text[min(tokens.shape[1], len(text) - 1)]] = 0
        return forced

    result = model.generate(
        text[None, :prompt],
        attention_mask=torch.ones_like(text[None, :prompt]),
        max_new_tokens=len(text) - prompt + 1,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[follow],
    )
    logits = torch.cat(result.logits)
    if len(logits) != len(text) - prompt + 1:
        raise _UnlikeError("it does not generate as many tokens as it is asked to")
    return logits


def _compare(logits: Tensor, texts: ReferenceTexts, name: str, start: int) -> None:
    """Compare the logits (T, V) of a text's tokens, from position `start` on, with the reference.

    Raises:
        _UnlikeError: the logits differ from the reference.
    """
    reference = texts.reference[name][start - 1 : start - 1 + len(logits)]
    difference = float((logits - reference).abs().max() / texts.reference["long"].std().clamp(min=1e-12))
    if not difference < TOLERANCE:
        raise _UnlikeError(f"with a cache its logits are off by {difference:.2g} standard deviations")


def check_ours(model: nn.Module, argument: str, texts: ReferenceTexts) -> None:
    """Read two texts of different lengths with `KVCache`; raises if their logits differ from the reference."""
    length = len(texts.long)
    passes, cache = RaggedPasses(model, argument, length), KVCache(2, length)
    names, whole = ("long", "short"), {"long": texts.long, "short": texts.short}

    def read(first: int, counts: list[int], *, compared: bool = True, wrong: bool = False) -> None:
        rows = slice(first, first + len(counts))
        block = torch.zeros(len(counts), max(counts), dtype=torch.int64, device=texts.long.device)
        starts = cache.lengths[rows]
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            block[row, :count] = whole[names[first + row]][start : start + count] + int(wrong)
        place = cache.place(block.shape[1], block.device, rows=rows, counts=counts)
        logits = passes.logits(block % int(texts.long.max() + 1), cache, place, None)
        cache.lengthen(block.shape[1], place, counts)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if compared:
                _compare(logits[row, :count], texts, names[first + row], start)

    read(0, [5], compared=False)
    read(1, [3], compared=False)
    read(0, [4, 2])
    read(0, [4, 1], compared=False, wrong=True)  # a draft of wrong tokens
    cache.lengths = [9, 5]  # rejects the draft
    while cache.lengths[0] < length:
        read(0, [min(4, length - cache.lengths[0])])
        if cache.lengths[1] < len(texts.short) and cache.lengths[0] < length:
            read(0, [1, 1])


def check_native(model: nn.Module, texts: ReferenceTexts) -> None:
    """Read a text with native layers in float32; raises if its logits differ from the reference."""
    narrow = copy.deepcopy(model).float()
    layers, text = decoder_layers.of(narrow), texts.long[None]
    if layers is None:
        raise _UnlikeError("native code does not support the form of its layers")
    cache = KVCache(1, text.shape[1])
    for start in range(0, text.shape[1], FEW_ROWS):
        tokens = text[:, start : start + FEW_ROWS]
        place = cache.place(tokens.shape[1], tokens.device)
        if not layers.fits(tokens, cache):
            raise _UnlikeError("native code does not compute its layers")
        logits = layers.decoder.head(layers.run(tokens, cache, place))[0]
        cache.lengthen(tokens.shape[1], place)
        known = slice(1 if start == 0 else 0, None)  # the reference begins after the first two tokens
        _compare(logits[known], texts, "long", start or 1)


def check_own(model: nn.Module, own: OwnCache, texts: ReferenceTexts) -> None:
    """Read two texts alternately, each into its own cache object of the model; raises if their logits differ from the
    reference."""
    passes, caches = TextPasses(model, own), {"long": TextCache(), "short": TextCache()}
    whole = {"long": texts.long, "short": texts.short}

    def read(name: str, count: int) -> None:
        end = min(caches[name].length + count, len(whole[name]))
        if count := end - caches[name].length:
            logits = passes.extend(caches[name], whole[name][:end], count)
            if end > count:
                _compare(logits[0], texts, name, end - count)

    read("long", 2)
    read("short", 2)
    counts = (1, 1, 1, 5, 1, 4)
    while (start := caches["long"].length) < len(texts.long):
        read("long", counts[start % len(counts)])
        read("short", 1)
        start = caches["long"].length
        if start % 3 == 0:
            draft = torch.cat([texts.long[:start], texts.short[:3]])
            passes.extend(caches["long"], draft, 3)
            passes.shorten(caches["long"], start)
            if caches["long"].length < start < len(texts.long):
                end = start + 1
                _compare(passes.extend(caches["long"], texts.long[:end], 1)[0], texts, "long", start)


def rows_independent(model: nn.Module, texts: ReferenceTexts, carried: tuple[tuple[str, str], ...]) -> bool:
    """Whether a short text, padded on the right, gives the same logits in a batch with a longer text as it does
    alone."""
    rows = torch.stack([texts.long, texts.long.flip(0)])
    rows[1, : len(texts.short)] = texts.short
    restored = TextPasses(model, OwnCache("", carried=carried)).carriers_restored
    with restored():
        alone = model(input_ids=texts.short[None], use_cache=False).logits[0]
    with restored():
        beside = model(input_ids=rows, use_cache=False).logits[1, : len(texts.short)]
    return float((alone - beside).abs().max() / alone.std().clamp(min=1e-12)) < TOLERANCE


def packing_difference(model: nn.Module, vocabulary: int, length: int) -> str:
    """Why three texts packed into one sample give other logits than each text alone; empty if the logits are the
    same."""
    device = next(model.parameters()).device
    lengths = [max(1, min(length, 40) * share // 40) for share in (9, 24, 7)]
    draw = torch.Generator().manual_seed(1)
    chats = [torch.randint(min(3, vocabulary - 1), vocabulary, (count,), generator=draw) for count in lengths]
    positions = [torch.arange(count) for count in lengths]
    orders = ([0, 1, 2], [2, 0, 1])
    batch = {
        "input_ids": torch.stack([torch.cat([chats[index] for index in order]) for order in orders]).to(device),
        "position_ids": torch.stack([torch.cat([positions[index] for index in order]) for order in orders]).to(device),
    }
    try:
        packed = _logits(call_model(model, batch))
        for row, order in enumerate(orders):
            start = 0
            for index in order:
                single = {"input_ids": chats[index][None].to(device), "position_ids": positions[index][None].to(device)}
                alone = _logits(call_model(model, single))[0]
                there = packed[row, start : start + lengths[index]]
                difference = float((alone - there).abs().max() / alone.std().clamp(min=1e-12))
                if not difference < TOLERANCE * 5:
                    return f"packed logits are off by {difference:.2g} standard deviations"
                start += lengths[index]
    except Exception as error:  # a model that takes no positions may raise any error
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def sharing_difference(model: nn.Module, vocabulary: int, length: int) -> str:
    """Why several answers after one shared beginning in a packed sample give other logits than each answer in a
    separate sample; empty if the logits are the same."""
    device = next(model.parameters()).device
    begins, *counts = (max(1, min(length, 40) * share // 40) for share in (22, 10, 8))
    draw = torch.Generator().manual_seed(1)
    beginning, *answers = (
        torch.randint(min(3, vocabulary - 1), vocabulary, (count,), generator=draw) for count in (begins, *counts)
    )
    text = torch.cat([torch.full((begins,), -1), *(torch.full((count,), n) for n, count in enumerate(counts))])
    mask = ((text[:, None] == text) | (text < 0)).tril()
    positions = torch.cat([torch.arange(begins), *(torch.arange(begins, begins + count) for count in counts)])
    batch = {
        "input_ids": torch.cat([beginning, *answers])[None].to(device),
        "position_ids": positions[None].to(device),
        "attention_mask": mask[None, None].to(device),
    }
    try:
        packed, start = _logits(call_model(model, batch))[0], begins
        for answer in answers:
            single = {"input_ids": torch.cat([beginning, answer])[None].to(device)}
            single["position_ids"] = torch.arange(begins + len(answer))[None].to(device)
            alone = _logits(call_model(model, single))[0]
            there = torch.cat([packed[:begins], packed[start : start + len(answer)]])
            difference = float((alone - there).abs().max() / alone.std().clamp(min=1e-12))
            if not difference < TOLERANCE * 5:
                return f"logits are off by {difference:.2g} standard deviations"
            start += len(answer)
    except Exception as error:  # a model that takes no such mask may raise any error
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def _logits(output: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output.logits).double()
