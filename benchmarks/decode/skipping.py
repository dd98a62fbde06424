"""Skipping at equal bytes moved: ours against published rules, on a model whose layers have learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.data.tokens import TokenDataset
from shoestring.decode.adapter import Adapter, adapt
from shoestring.decode.skipping.choice import Ratios
from shoestring.models.sublayers import skipping

DECODED = 64


class Texts:
    """Texts that a model reads up to a length of context once; then it decodes their last tokens, skipping or not."""

    def __init__(self, model: nn.Module, tokens: Tensor, context: int, decoded: int = DECODED) -> None:
        """
        Args:
            tokens: (B, S); the last `context` + 1 are used, of which the last `decoded` are predicted.
        """
        self.adapter, self.context = adapt(model), context
        used = tokens[:, -context - 1 :]
        self.prompt, self.rest = used[:, : -decoded - 1], used[:, -decoded - 1 :]
        self.cache = self.adapter.new_cache(len(used), context)
        for row, prompt in enumerate(self.prompt):
            self.adapter.read(prompt[None], self.cache, rows=slice(row, row + 1), wanted="last")

    def nats(self, ratios: Ratios, tokens: slice = slice(None)) -> Tensor:
        """Loss of every decoded token, (B, decoded), with these sublayers skipped since the prompt."""
        with skipping(self.adapter.model, ratios):
            logits = self.adapter.read(self.rest[:, :-1], self.cache)
        self.cache.lengths = [self.prompt.shape[1]] * len(self.prompt)
        return F.cross_entropy(logits.flatten(0, 1), self.rest[:, 1:].flatten(), reduction="none").view(len(logits), -1)
