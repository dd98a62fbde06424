"""Whether several chats, or answers, may share a sample: only if the model keeps them from seeing each other."""

from __future__ import annotations

import logging
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
from shoestring.models.behaviour import packing_fault
from shoestring.models.gpt import GPT
from shoestring.models.loading import build_model
from shoestring.run import Run

log = logging.getLogger("shoestring")


def packing_refused(run: Run, corpus: Corpus) -> str:
    """Why chats in one sample would see each other in the run's model; empty if they would not, or nothing is packed.

    The model is built for it, without weights if it is one of transformers.

    Raises:
        ShoestringError: the model cannot be built.
    """
    if not _has(ChatDataset, corpus.train):
        return ""
    settings, trust, length = run.settings, run.trust("run.model"), corpus.train.sequence
    arguments = {"vocab_size": corpus.vocab_size, "context": length}

    def build(device: str) -> nn.Module:
        with torch.device(device):
            return build_model(settings.model, run.model, arguments, settings.seed, weights=False, trust=trust)

    with torch.random.fork_rng(devices=[]):
        outline = build("meta")
        if isinstance(outline, GPT):
            return ""
        model = outline if hf.is_pretrained(outline) else build("cpu")
        fault = packing_fault(model, corpus.vocab_size, length)
        config: Any = getattr(model, "config", None)
        if fault and getattr(config, "use_cache", None):
            config.use_cache = False
            if not packing_fault(model, corpus.vocab_size, length):
                return f"{fault}; with `use_cache = False` in its configuration they would not"
    return fault


def unpack(corpus: Corpus, fault: str) -> Corpus:
    """The corpus with each chat in a sample of its own, and each answer of a preference in a row of its own, after a
    warning with the reason and the cost."""
    apart = _apart(corpus)
    before, after = (1 - part.tokens / _room(part) for part in (corpus.train, apart.train))
    preferences = _has(PreferenceDataset, corpus.train)
    log.warning(
        "%s would see each other in this model (%s): %s samples in place of %s, and padding is %s of them in place of "
        "%s",
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
    """Whether any samples are chats, or preferences."""
    return isinstance(part, kind) or (isinstance(part, Joined) and any(_has(kind, inner) for inner in part.parts))


def _room(part: Tokens) -> int:
    """Number of tokens that the samples have room for."""
    if isinstance(part, Joined):
        return sum(map(_room, part.parts))
    return part.room if isinstance(part, ChatDataset) else len(part) * part.sequence


def _apart(corpus: Corpus) -> Corpus:
    train, held_out = map(_each_alone, (corpus.train, corpus.held_out))
    parts = {name: _apart(part) for name, part in corpus.parts.items()}
    return replace(corpus, train=train, held_out=held_out, parts=parts)


def _each_alone(part: Tokens) -> Tokens:
    if isinstance(part, ChatDataset):
        return type(part)(part.path, part.sequence, packed=False)
    if isinstance(part, Joined):
        return Joined([_each_alone(inner) for inner in part.parts], part.weights)
    return part
