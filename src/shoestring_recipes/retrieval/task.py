"""Retrieval of a word's entry in one dictionary by its entry in another: data, loss and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring_recipes.retrieval.dictionaries import Pair, pairs
from shoestring_recipes.retrieval.fusion import compared
from shoestring_recipes.retrieval.mining import described, encoded, mined
from shoestring_recipes.retrieval.words import TokenReader, padded


class TextPairs(Dataset[dict[str, Any]]):
    """A data set of pairs of texts. A sample has the tokens of both, `query` and `document`; `negatives`, the tokens of
    documents that are similar to the query but are not its own; and `numbers`, the numbers of the sample and of those
    documents.

    Args:
        pairs: the pairs. reader: turns the texts into tokens.
        negatives: numbers of the pairs whose documents are the negatives of each pair, (pairs, negatives).
        validation: other pairs, on which an evaluation chooses its settings.
        queries: number of pairs whose queries are searched in an evaluation.
    """

    draws = False

    def __init__(
        self,
        pairs: Sequence[Pair],
        reader: TokenReader,
        negatives: np.ndarray | None = None,
        validation: Sequence[Pair] = (),
        queries: int = 0,
    ) -> None:
        self.pairs, self.reader, self.validation, self.queries = pairs, reader, validation, queries
        self.negatives = np.zeros((len(pairs), 0), int) if negatives is None else negatives
        digest = hashlib.blake2b(repr((pairs, reader.folder, reader.length)).encode(), digest_size=16)
        digest.update(self.negatives.astype("<i8").tobytes())
        self.fingerprint = digest.hexdigest()
        self._tokens = [(reader.tokens(pair.query), reader.tokens(pair.document)) for pair in pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        query, document = self._tokens[index]
        others = self.negatives[index].tolist()
        numbers = torch.tensor([index, *others])
        negatives = [self._tokens[other][1] for other in others]
        return {"query": query, "document": document, "negatives": negatives, "numbers": numbers}


def data(
    documents: int = 10_000, queries: int = 1000, validation: int = 2000, negatives: int = 3, miner: str = "",
    tokenizer: str = "", headwords: int = 0, seed: int = 0,
) -> tuple[TextPairs, TextPairs]:  # fmt: skip
    """Return the pairs for training, with hard negatives, and the held-out pairs.

    Args:
        documents: number of held-out pairs. queries: number of these whose queries are searched in an evaluation.
        validation: number of further pairs, on which BM25 and the fused ranking are tuned.
        negatives: number of hard negatives of each pair, from BM25; from `miner` as well, if it is set.
        miner: folder of a run of this recipe whose model selects half of the negatives. The run must have the same
            seed; otherwise its model was trained on held-out pairs.
        tokenizer: folder of a pretrained model whose tokenizer is used; empty for hashed stems.
        headwords: number of headwords to use; 0 uses all.
        seed: seed of the partition of the pairs.
    """
    every, reader = pairs(headwords), TokenReader(tokenizer)
    order = np.random.default_rng(seed).permutation(len(every))
    if len(every) < documents + validation + 2 * (negatives + 1):
        raise ConfigError(f"there are {len(every):,} pairs, too few to hold out {documents + validation:,}")
    held_out, tuned, taught = (
        [every[number] for number in part] for part in np.split(order, [documents, documents + validation])
    )
    return (
        TextPairs(taught, reader, mined(taught, negatives, miner) if negatives else None),
        TextPairs(held_out, reader, None, tuned, min(queries, documents)),
    )


def joined(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join samples to a batch: tokens (N, L), and those of negatives (N, negatives, L). Samples of `files.read` have
    texts, which stay as they are."""
    if "text" in samples[0]:
        return {"text": [sample["text"] for sample in samples]}
    batch = {name: padded([sample[name] for sample in samples]) for name in ("query", "document")}
    batch["numbers"] = torch.stack([sample["numbers"] for sample in samples])
    if samples[0]["negatives"]:
        rows = padded([tokens for sample in samples for tokens in sample["negatives"]])
        batch["negatives"] = rows.unflatten(0, (len(samples), -1))
    return batch


def forward(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the vectors of all texts of a batch, by name; for texts of `files.read`, also those of all dictionary
    entries."""
    if "text" in batch:
        return described(model, batch["text"])
    output = model(**{name: batch[name] for name in ("query", "document", "negatives") if name in batch})
    return output | {name: batch[name] for name in ("numbers",) if name in batch}


@ss.whole_batch
def contrastive(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies of finding each query's document among the documents and negatives of the whole
    batch, and each document's query, with the learned temperature. A query's own document is no negative, even
    where it is a hard negative of another query."""
    queries, documents, temperature = output["query"], output["document"], output["temperature"]
    own = torch.arange(len(queries), device=queries.device)
    numbers = output["numbers"]
    candidates = torch.cat([documents, *([output["negatives"].flatten(0, 1)] if "negatives" in output else [])])
    repeated = torch.cat([numbers[:, 0], numbers[:, 1:].flatten()]) == numbers[:, :1]
    repeated[own, own] = False
    scores = (queries @ candidates.T / temperature).masked_fill(repeated, -torch.inf)
    there = F.cross_entropy(scores, own, reduction="sum")
    back = F.cross_entropy(documents @ queries.T / temperature, own, reduction="sum")
    return (there + back) / 2, torch.tensor(len(queries), device=queries.device)


def evaluate(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Compare BM25, the encoder and the fused ranking by the share of queries whose document is first or among the
    first ten. Settings are chosen on the validation pairs."""
    samples: TextPairs = held_out.dataset
    rows = [held_out.forward(model, batch) for batch in held_out]
    vectors = held_out.gather(tuple(torch.cat([row[name] for row in rows]) for name in ("query", "document")))
    device = rows[0]["query"].device

    def embed(texts: Sequence[str]) -> Tensor:
        return held_out.forward(model, {"query": samples.reader.rows(texts).to(device)})["query"]

    tuned = [[pair.query for pair in samples.validation], [pair.document for pair in samples.validation]]
    queries, documents = (part.float().cpu().numpy() for part in vectors)
    asked = samples.pairs[: min(samples.queries, len(queries))]
    own = [pair.document for pair in samples.pairs[: len(documents)]]
    return compared(
        ([pair.query for pair in asked], own, queries[: len(asked)], documents),
        (tuned[0], tuned[1], encoded(embed, tuned[0]), encoded(embed, tuned[1])),
    ).report()
