"""Two encoders that map texts and clips to vectors of one space."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring_recipes.reply.augment import varied
from shoestring_recipes.reply.clips import QUARTERS, SIDE
from shoestring_recipes.reply.frozen import OTHER_MODEL, SAME_MODEL, Mapped
from shoestring_recipes.retrieval.model import Encoder


class TwoEncoders(nn.Module):
    """Maps texts and clips to vectors of norm 1. The vector of a clip is the normalised sum of its tags' vector and its
    frames' vector, which has a learned weight. Tags share the encoder of texts; with a frozen model, they have a linear
    map of their own. From the first step on, a text therefore finds tags that share its words.

    Args:
        frozen: pretrained BERT or RoBERTa that is not trained, but linear maps of its vectors are: its folder, or
            `minilm` for all-MiniLM-L6-v2; `data.arguments.frozen` has to name it, too. Empty for a bag of words.
        dimensions: size of the vectors; a pretrained model has its own.
        width: channels of the first convolution of the frames.
        tags: whether the tags of clips are used. frames: whether their frames are used.
        folder: folder of a pretrained BERT or RoBERTa for texts and tags, which is trained further;
            `data.arguments.tokenizer` has to name it, too.
        dropout: probability with which a word, or a component of a frozen model's vector, is left out in training.
        blind: probability with which all tags of a clip are left out in training, which prepares the model for clips
            without tags; clips with tags are then found a little worse.
        augment: whether frames are changed at random in training.
        temperature: initial temperature of the loss, which is learned.
    """

    def __init__(
        self, frozen: str = "", dimensions: int = 256, width: int = 32, tags: bool = True, frames: bool = True,
        folder: str = "", dropout: float = 0.3, blind: float = 0.0, augment: bool = True, temperature: float = 0.07,
    ) -> None:  # fmt: skip
        super().__init__()
        if frozen and folder:
            raise ConfigError("model.frozen and model.folder are two encoders", hint="set one of them")
        if not (tags or frames):
            raise ConfigError("clips have neither tags nor frames", hint="set model.tags or model.frames to true")
        if frozen:
            self.texts = Mapped(frozen, dropout, temperature)
            dimensions = self.texts.size
        else:
            self.texts = Encoder(dimensions, folder=folder, dropout=dropout, temperature=temperature)
            dimensions = self.texts.pretrained.config.hidden_size if folder else dimensions
        self.tags, self.frames, self.augment, self.blind = tags, frames, augment, blind if frames else 0.0
        if frames:
            channels = [3, width, 2 * width, 4 * width]
            layers: list[nn.Module] = []
            for before, after in pairwise(channels):
                layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
            layers += [nn.Flatten(), nn.Linear(channels[-1] * (SIDE // 8) ** 2, dimensions), nn.ReLU()]
            self.frame = nn.Sequential(*layers)
            self.moving = nn.Sequential(nn.Dropout(0.2), nn.Linear(QUARTERS * dimensions, dimensions))
            self.weight = nn.Parameter(torch.tensor(0.3))

    def forward(
        self, text: Tensor | None = None, tags: Tensor | None = None, frames: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the vectors of texts, `text`, those of clips, `clip`, and the `temperature`.

        Args:
            text, tags: rows of tokens, (N, L), or vectors of a frozen model, (N, D).
            frames: uint8 (N, QUARTERS, 3, SIDE, SIDE).
        """
        output = {"temperature": self.texts.temperature.exp().clamp(min=0.01)}
        if text is not None:
            self._check(text)
            output["text"] = self.texts.embed(text)
        if tags is not None and frames is not None:
            output["clip"] = self.clip(tags, frames)
        return output

    def clip(self, tags: Tensor, frames: Tensor) -> Tensor:
        """Return the vectors of clips, (N, dimensions); see `forward`."""
        parts = []
        if self.tags:
            self._check(tags)
            words = self.texts.embed_tags(tags) if isinstance(self.texts, Mapped) else self.texts.embed(tags)
            seen = torch.rand(len(tags), 1, device=tags.device) >= self.blind if self.training and self.blind else 1
            parts.append(words * seen)
        if self.frames:
            pixels = frames.to(self.weight.dtype) / 127.5 - 1
            pixels = varied(pixels) if self.training and self.augment else pixels
            codes = self.frame(pixels.flatten(0, 1)).unflatten(0, (len(frames), QUARTERS))
            parts.append(self.weight * F.normalize(self.moving(codes.flatten(1)).float(), dim=-1))
        return F.normalize(torch.stack(parts).sum(0), dim=-1)

    def _check(self, rows: Tensor) -> None:
        if rows.is_floating_point() != isinstance(self.texts, Mapped):
            raise ConfigError(OTHER_MODEL, hint=SAME_MODEL)
