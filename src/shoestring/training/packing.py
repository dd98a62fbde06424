"""The layout of chats and preferences in samples: as dense as the model can read correctly.

Several chats share a sample only if the model keeps them from attending to each other. The two answers of a preference
share one copy of their prompt only if the model accepts the attention mask that hides each answer from the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoestring import figures
from shoestring.data.chats import ChatDataset
from shoestring.data.corpus import Corpus
from shoestring.data.joined import Joined, Tokens
from shoestring.data.preferences import PreferenceDataset
from shoestring.models import hf
from shoestring.models.behaviour import packing_fault, sharing_fault
from shoestring.models.gpt import GPT
from shoestring.training.user_code import NamedModel

log = logging.getLogger("shoestring")


def faults_of_layouts(model: NamedModel, corpus: Corpus, *, own_forward: bool) -> dict[str, str]:
    """Reasons why a model cannot read a layout of samples: "packed", or "shared" (for preferences only).

    The function builds the model to test it; a model of transformers is built without weights.

    Args:
        own_forward: whether `run.forward` is set.

    Raises:
        ShoestringError: the model cannot be built.
    """
    if not _has(ChatDataset, corpus.train):
        return {}
    if own_forward:
        return {"packed": "`run.forward` is your own, which may leave out positions and masks"}
    length = corpus.train.sequence
    arguments = {"vocab_size": corpus.vocab_size, "context": length}
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            built = model.build(arguments, weights=False)
        if isinstance(built, GPT):
            return {}
        if not hf.is_pretrained(built):
            with torch.device("cpu"):
                built = model.build(arguments, weights=False)
        shared = sharing_fault(built, corpus.vocab_size, length) if _has(PreferenceDataset, corpus.train) else ""
        if shared or not _has(PreferenceDataset, corpus.train):
            packed = _packing_fault(built, corpus.vocab_size, length)
        else:
            packed = ""  # the mask that separates answers with a shared prompt also separates packed chats
    return {layout: fault for layout, fault in (("packed", packed), ("shared", shared)) if fault}


def _packing_fault(model: nn.Module, vocabulary: int, length: int) -> str:
    fault = packing_fault(model, vocabulary, length)
    config: Any = getattr(model, "config", None)
    if fault and getattr(config, "use_cache", None):
        config.use_cache = False
        if not packing_fault(model, vocabulary, length):
            return f"{fault}; with `use_cache = False` in its configuration they would not"
    return fault


def laid_out(corpus: Corpus, faults: Mapping[str, str]) -> Corpus:
    """The corpus with samples in the densest layout that the model reads correctly; a sparser layout is logged.

    Args:
        faults: result of `faults_of_layouts`.

    Raises:
        DataError: no preference fits into a sample.
    """
    preferences = _has(PreferenceDataset, corpus.train)
    if fault := faults.get("packed"):
        corpus = _unpacked(corpus, fault)
    elif preferences and (fault := faults.get("shared")):
        log.info("answers to the same prompt each get a copy of it, because this model cannot share it (%s)", fault)
    elif preferences:
        corpus = _changed(corpus, lambda part: PreferenceDataset(part.path, part.sequence, shared=True))
    for part in (corpus.train, corpus.held_out):
        _check_fits(part)
    return corpus


def _check_fits(part: Tokens) -> None:
    if isinstance(part, PreferenceDataset):
        part.check_fits()
    elif isinstance(part, Joined):
        for inner in part.parts:
            _check_fits(inner)


def _unpacked(corpus: Corpus, fault: str) -> Corpus:
    """The corpus with one chat per sample, and one answer of a preference per row; logs the reason and the cost."""
    apart = _changed(corpus, lambda part: type(part)(part.path, part.sequence, packed=False))
    before, after = (1 - part.tokens / max(_room(part), 1) for part in (corpus.train, apart.train))
    preferences = _has(PreferenceDataset, corpus.train)
    log.warning(
        "%s would see each other in this model (%s): %s samples instead of %s, and padding is %s of them instead of %s",
        "each sample holds one preference, with one answer a row, because packed answers"
        if preferences
        else "each sample holds one chat, because packed chats",
        fault,
        f"{len(apart.train):,}",
        f"{len(corpus.train):,}",
        figures.percent(after),
        figures.percent(before),
    )
    return apart


def _has(kind: type[ChatDataset], part: Tokens) -> bool:
    """Whether some samples are of `kind`: chats, or preferences."""
    return isinstance(part, kind) or (isinstance(part, Joined) and any(_has(kind, inner) for inner in part.parts))


def _room(part: Tokens) -> int:
    """Number of token positions in the samples, including padding."""
    if isinstance(part, Joined):
        return sum(map(_room, part.parts))
    return part.room if isinstance(part, ChatDataset) else len(part) * part.sequence


def _changed(corpus: Corpus, change: Callable[[ChatDataset], ChatDataset]) -> Corpus:
    """The corpus with all chats and preferences changed to another layout by `change`."""

    def of(part: Tokens) -> Tokens:
        if isinstance(part, ChatDataset):
            return change(part)
        if isinstance(part, Joined):
            return Joined([of(inner) for inner in part.parts], part.weights)
        return part

    parts = {name: _changed(inner, change) for name, inner in corpus.parts.items()}
    return replace(corpus, train=of(corpus.train), held_out=of(corpus.held_out), parts=parts)
