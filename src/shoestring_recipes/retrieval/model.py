"""Encoders that map texts to vectors: a bag of token embeddings, a few layers over it, or a pretrained BERT or
RoBERTa."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring_recipes.retrieval.pretrained import pretrained
from shoestring_recipes.retrieval.words import TokenReader


class Encoder(nn.Module):
    """Maps tokens to vectors of norm 1; a text without tokens has the vector 0.

    The vector of a text is the normalised sum of its tokens' vectors, each with a learned weight. Training soon lowers
    the weights of frequent words, so they count less, as in BM25.

    Args:
        dimensions: size of the vectors; a pretrained model has its own.
        layers: number of transformer layers over the token embeddings.
        folder: folder of a pretrained BERT or RoBERTa with tokenizer.json, which takes the place of the embeddings and
            layers; `data.arguments.tokenizer` has to name it, too.
        whole: whether to use the whole pretrained model; otherwise only its token embeddings initialise a bag.
        dropout: probability with which a token is left out in training.
        temperature: initial temperature of the loss, which is learned.
    """

    def __init__(
        self, dimensions: int = 256, layers: int = 0, folder: str = "", whole: bool = True, dropout: float = 0.1,
        temperature: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        self.reader, self.dropout = TokenReader(folder), dropout
        self.temperature = nn.Parameter(torch.tensor(temperature).log())
        self.weights = nn.Embedding.from_pretrained(torch.zeros(self.reader.size, 1), freeze=False)
        source = pretrained(folder) if folder else None
        if source is not None and whole:
            self.pretrained = source
            return
        rows = torch.randn(self.reader.size, dimensions) if source is None else source.get_input_embeddings().weight
        # With rows of norm 1, a step of AdamW changes their directions enough.
        self.embeddings = nn.Embedding.from_pretrained(F.normalize(rows.detach().float(), dim=-1), freeze=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(rows.shape[1], 4, 2 * rows.shape[1], 0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, **tokens: Tensor) -> dict[str, Tensor]:
        """Return the vectors of rows of tokens, (…, L) → (…, dimensions), by the rows' names, and `temperature`."""
        vectors = {name: self.embed(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1]) for name, rows in tokens.items()}
        return vectors | {"temperature": self.temperature.exp()}

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors of texts, (N, L) → (N, dimensions).

        Raises:
            ConfigError: a token is not one of the pretrained model's.
        """
        present = tokens >= 0
        if self.training and self.dropout:
            present &= torch.rand(tokens.shape, device=tokens.device) >= self.dropout
        numbers = tokens.clamp(min=0)
        if self.reader.folder and numbers.max() >= self.reader.size:
            hint = "set data.arguments.tokenizer to model.folder"
            raise ConfigError("the texts have tokens of another model", hint=hint)
        weights = self.weights(numbers)[..., 0].exp() * present
        if hasattr(self, "pretrained"):
            padding = self.pretrained.config.pad_token_id or 0
            states = self.pretrained(torch.where(tokens >= 0, tokens, padding), (tokens >= 0).long()).last_hidden_state
        elif len(self.layers):
            states, hidden = self.embeddings(numbers), tokens < 0
            hidden[:, 0] = False  # a row without visible tokens would be NaN
            for layer in self.layers:
                states = layer(states, src_key_padding_mask=hidden)
        else:
            table = self.embeddings.weight
            return F.normalize(F.embedding_bag(numbers, table, per_sample_weights=weights, mode="sum"), dim=-1)
        return F.normalize((states * weights[..., None]).sum(1).float(), dim=-1)
