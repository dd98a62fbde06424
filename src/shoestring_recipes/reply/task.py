"""Replies to texts: training on pairs of a text and an emoji's clip; data, loss and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoestring as ss
from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.reply import ranking
from shoestring_recipes.reply.clips import corners
from shoestring_recipes.reply.frozen import FrozenReader
from shoestring_recipes.reply.inventory import ARTS, Emoji, emoji, pictures
from shoestring_recipes.reply.matching import CHUNK, described, known_words, vocabulary
from shoestring_recipes.reply.ranking import Text
from shoestring_recipes.retrieval.words import TokenReader, padded

VALIDATED = 0.2
"""Probability that one text of an emoji with three or more texts is used to tune BM25 instead of training."""
Reader = TokenReader | FrozenReader
_BLOCK = 64
"""Number of texts that are encoded together. The blocks are fixed, because the last bits of a text's vector depend on
the other texts in its batch, and a resumed run and other ranks must compute the same vectors."""
_TOKENS = ("text", "tags")


class Replies(Dataset[dict[str, Any]]):
    """A data set of texts with the emoji that answer them. A sample has the tokens `text` and `tags`, or a frozen
    encoder's vectors of both, the emoji's `frames`, uint8 (QUARTERS, 3, SIDE, SIDE), and its `number`.

    Args:
        inventory: the emoji. clips: their frames, for each set of pictures that samples alternate between.
        texts: the texts. reader: turns texts into tokens, or into vectors.
        untaught: numbers of the emoji none of whose texts is taught. validation: texts on which BM25 is tuned.
        known: stems of the words that the encoder reads; None for all.
    """

    draws = False

    def __init__(
        self, inventory: Sequence[Emoji], clips: Sequence[Tensor], texts: Sequence[Text], reader: Reader,
        untaught: Sequence[int] = (), validation: Sequence[Text] = (), known: frozenset[str] | None = None,
    ) -> None:  # fmt: skip
        self.inventory, self.clips, self.texts, self.reader = inventory, clips, texts, reader
        self.untaught, self.validation = untaught, validation
        self.words = [text if known is None else known_words(text, known) for _, text in texts]
        """What the encoder reads of each text."""
        digest = hashlib.blake2b(repr((inventory, texts, self.words, reader.folder)).encode(), digest_size=16)
        digest.update(b"".join(part.numpy().tobytes() for part in clips))
        self.fingerprint = digest.hexdigest()
        self._distinct = list(dict.fromkeys([*self.words, *(one.tags for one in inventory)]))
        self._places = {text: place for place, text in enumerate(self._distinct)}
        self._tokens: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        numbers = [self.texts[index][0] for index in indices]
        texts = self._read([self.words[index] for index in indices])
        tags = self._read([self.inventory[number].tags for number in numbers])
        frames = [self.clips[index % len(self.clips)][number] for index, number in zip(indices, numbers, strict=True)]
        rows = zip(texts, tags, frames, map(torch.tensor, numbers), strict=True)
        return [dict(zip(("text", "tags", "frames", "number"), row, strict=True)) for row in rows]

    def _read(self, texts: Sequence[str]) -> list[Tensor]:
        """Return tokens or vectors of texts; they are cached, because a pretrained encoder takes milliseconds."""
        for block in sorted({self._places[text] // _BLOCK for text in texts if text not in self._tokens}):
            together = self._distinct[block * _BLOCK : (block + 1) * _BLOCK]
            self._tokens |= dict(zip(together, self.reader.each(together), strict=True))
        return [self._tokens[text] for text in texts]

    @cached_property
    def tags(self) -> Tensor:
        """Tokens or vectors of the emoji's tags, (emoji, …)."""
        return self.reader.rows([one.tags for one in self.inventory])

    def compared(self, scores: np.ndarray) -> ranking.ReplyComparison:
        """Compare the encoders' scores of the first texts, (texts, emoji), with those of BM25 and, if the encoder is
        frozen, of its own vectors."""
        texts, tags, methods = self.texts[: len(scores)], [one.tags for one in self.inventory], {ranking.OURS: scores}
        if isinstance(self.reader, FrozenReader):
            rows = torch.stack(self._read([text for _, text in texts]))
            methods = {ranking.FROZEN: (rows @ self.tags.T).numpy()} | methods
        return ranking.compared(texts, tags, methods, self.untaught, self.validation)


def data(
    modules: str = "", frozen: str = "", every: int = 1, held_out: float = 0.1, tokenizer: str = "", seed: int = 0
) -> tuple[Replies, Replies]:
    """Return the texts for training, and the held-out texts: one of each emoji that has at least two, and all texts of
    the emoji that are not taught.

    Args:
        modules: folder with npm's packages; by default one at or above the current folder, or npm's global one.
        frozen: the encoder that `model.frozen` names, if any.
        every: interval at which emoji are taken from the inventory; 1 takes all.
        held_out: share of the emoji that are not taught.
        tokenizer: folder of a pretrained model whose tokenizer is used; empty for hashed stems.
        seed: seed of the partition.
    """
    inventory, draws = emoji(modules)[::every], np.random.default_rng(seed)
    untaught = sorted(draws.permutation(len(inventory))[: round(held_out * len(inventory))].tolist())
    parts: tuple[list[Text], list[Text], list[Text]] = [], [], []
    for number, one in enumerate(inventory):
        texts = [(number, one.texts[at]) for at in draws.permutation(len(one.texts))]
        counts = [min(1, len(texts) - 1), 0]
        if number in untaught:
            counts = [len(texts), 0]
        elif len(texts) > 2 and draws.random() < VALIDATED:
            counts = [1, 1]
        for part, count in zip(parts, [*counts, len(texts)], strict=True):
            part += texts[:count]
            del texts[:count]
    judged, validation, taught = parts
    if not (judged and validation and taught):
        raise ConfigError("no text is left to teach, tune or judge", hint="lower data.arguments.every or .held_out")
    if frozen and tokenizer:
        raise ConfigError("data.arguments.frozen and .tokenizer are two encoders", hint="set one of them")
    reader = FrozenReader(frozen) if frozen else TokenReader(tokenizer)
    clips = [corners(pictures(art, modules)[::every]) for art in ARTS]
    known = None if reader.folder else vocabulary([*(text for _, text in taught), *(one.tags for one in inventory)])
    return (
        Replies(inventory, clips, taught, reader),
        Replies(inventory, clips[:1], judged, reader, untaught, validation, known),
    )


def joined(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join samples to a batch: rows of tokens (N, L) or vectors (N, D), and frames (N, QUARTERS, 3, SIDE, SIDE).
    Messages and clips of `files.read` cannot be joined to one batch; their words stay texts."""
    if len({tuple(sample) for sample in samples}) > 1:
        raise DataError("texts and clips make no common batch")
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    ragged = {name for name in _TOKENS if name in columns and not columns[name][0].is_floating_point()}
    return {
        name: padded(column) if name in ragged else column if isinstance(column[0], str) else torch.stack(column)
        for name, column in columns.items()
    }


def forward(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the vectors of the texts and clips of a batch; for a batch of `files.read`, also the vectors of all emoji
    or texts that may match."""
    if "message" in batch or "words" in batch:
        return described(model, batch)
    output = model(**{name: batch[name] for name in (*_TOKENS, "frames") if name in batch})
    return output | {name: batch[name] for name in ("number",) if name in batch}


@ss.whole_batch
def contrastive(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies of finding each text's clip among those of the whole batch, and each clip's
    text, with the learned temperature. A text's negatives are the clips of other emoji: samples of its own emoji do not
    count."""
    texts, clips, numbers = output["text"].float(), output["clip"].float(), output["number"]
    own = torch.arange(len(texts), device=texts.device)
    repeated = numbers[:, None] == numbers
    repeated[own, own] = False
    scores = (texts @ clips.T / output["temperature"]).masked_fill(repeated, -torch.inf)
    there, back = (F.cross_entropy(rows, own, reduction="sum") for rows in (scores, scores.T))
    return (there + back) / 2, torch.tensor(len(texts), device=texts.device)


def evaluate(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Compare the encoders with BM25 over tags, and with the frozen encoder's own vectors if there is one, by the rank
    of each text's own emoji among all."""
    samples: Replies = held_out.dataset
    texts = held_out.gather(torch.cat([held_out.forward(model, batch)["text"] for batch in held_out]))
    columns = zip(samples.tags.to(texts.device).split(CHUNK), samples.clips[0].split(CHUNK), strict=True)
    parts = ({"tags": tags, "frames": frames.to(texts.device)} for tags, frames in columns)
    clips = torch.cat([held_out.forward(model, part)["clip"] for part in parts])
    rows, columns = (side.float().cpu().numpy() for side in (texts, clips))  # autocast would round their products
    return samples.compared(rows @ columns.T).report()
