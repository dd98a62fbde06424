"""Whether several chats may share a sample: only if the model keeps them from seeing each other."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoestring import figures
from shoestring.core.errors import ConfigError
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
    if not _chats(corpus.train):
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
    """The corpus with each chat in a sample of its own, after a warning with the reason and the cost."""
    apart = _apart(corpus, fault)
    before, after = (1 - part.tokens / (len(part) * part.sequence) for part in (corpus.train, apart.train))
    log.warning(
        "each sample holds one chat, because packed chats would see each other in this model (%s): %s samples in place "
        "of %s, and padding is %s of them in place of %s",
        fault,
        f"{len(apart.train):,}",
        f"{len(corpus.train):,}",
        figures.percent(after),
        figures.percent(before),
    )
    return apart


def _chats(part: Tokens) -> bool:
    """Whether any samples are chats."""
    return isinstance(part, ChatDataset) or (isinstance(part, Joined) and any(map(_chats, part.parts)))


def _apart(corpus: Corpus, fault: str) -> Corpus:
    train, held_out = (_each_alone(part, fault) for part in (corpus.train, corpus.held_out))
    return replace(
        corpus,
        train=train,
        held_out=held_out,
        parts={name: _apart(part, fault) for name, part in corpus.parts.items()},
    )


def _each_alone(part: Tokens, fault: str) -> Tokens:
    if isinstance(part, PreferenceDataset):  # both answers of a pair have to be in one sample
        raise ConfigError(
            f"the answers of a pair would see each other in this model: {fault}",
            hint="preferences are learned by models that keep packed texts apart",
        )
    if isinstance(part, ChatDataset):
        return ChatDataset(part.path, part.sequence, packed=False)
    if isinstance(part, Joined):
        return Joined([_each_alone(inner, fault) for inner in part.parts], part.weights)
    return part
