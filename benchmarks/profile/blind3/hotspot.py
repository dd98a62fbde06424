"""Programs in which one line takes most of the time, and need not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

IGNORED = -100


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = F.gelu(self.expand(self.before_feed(x)))
        return x + self.contract(hidden)


class MaskedLanguageModel(nn.Module):
    """BERT in small: the loss counts at masked positions only."""

    def __init__(self, vocabulary: int, width: int, selects: bool) -> None:
        super().__init__()
        self.selects = selects
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.layer = EncoderLayer(width, 4)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        hidden = self.layer(hidden).flatten(0, 1)
        labels = labels.flatten()
        if self.selects:
            masked = (labels != IGNORED).nonzero().squeeze(1)
            hidden, labels = hidden.index_select(0, masked), labels.index_select(0, masked)
        logits = self.decoder(hidden)  # fault: every-position-decoded
        return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def pretraining(steps: int, selects: bool) -> list[Tensor]:
    random = seeded()
    model = MaskedLanguageModel(6000, 192, selects)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(steps):
        tokens = torch.randint(5, 6000, (12, 64), generator=random)
        masked = torch.rand(tokens.shape, generator=random) < 0.15
        labels = tokens.masked_fill(~masked, IGNORED)
        loss = model(tokens.masked_fill(masked, 4), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def ring_with_chords(nodes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sources and targets of edges, in both directions, with loops."""
    ring = torch.arange(nodes)
    chords = torch.randint(0, nodes, (2, nodes), generator=random)
    one, two = torch.cat([ring, chords[0]]), torch.cat([(ring + 1) % nodes, chords[1]])
    return torch.cat([one, two, ring]), torch.cat([two, one, ring])


class DenseGraph:
    """A normalized adjacency matrix, as papers write it."""

    def __init__(self, source: Tensor, target: Tensor, weight: Tensor, nodes: int) -> None:
        self.matrix = torch.zeros(nodes, nodes).index_put_((target, source), weight, accumulate=True)

    def propagate(self, features: Tensor) -> Tensor:
        return self.matrix @ features  # fault: dense-adjacency


class EdgeList:
    """The same graph, edge by edge."""

    def __init__(self, source: Tensor, target: Tensor, weight: Tensor, nodes: int) -> None:
        self.source, self.target, self.weight, self.nodes = source, target, weight.unsqueeze(1), nodes

    def propagate(self, features: Tensor) -> Tensor:
        messages = features.index_select(0, self.source) * self.weight
        return features.new_zeros(self.nodes, features.shape[1]).index_add(0, self.target, messages)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.mix, self.classify = nn.Linear(384, 96), nn.Linear(96, 96), nn.Linear(96, 8)

    def forward(self, features: Tensor, graph: DenseGraph | EdgeList) -> Tensor:
        x = F.relu(graph.propagate(self.read(features)))
        x = F.relu(graph.propagate(self.mix(x)))
        return self.classify(x)


def citations(steps: int, kind: type[DenseGraph] | type[EdgeList]) -> list[Tensor]:
    """Classifies the nodes of a graph from some that are labelled."""
    random = seeded()
    nodes = 1600
    source, target = ring_with_chords(nodes, random)
    degree = torch.bincount(target, minlength=nodes).float()
    graph = kind(source, target, (degree[source] * degree[target]).rsqrt(), nodes)
    features, labels = torch.randn(nodes, 384, generator=random), torch.randint(0, 8, (nodes,), generator=random)
    labels[torch.rand(nodes, generator=random) < 0.5] = IGNORED
    model = GraphNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=True)
    for _ in range(steps):
        loss = F.cross_entropy(model(features, graph), labels, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class WordVectors(nn.Module):
    def __init__(self, vocabulary: int, width: int, looks_up: bool) -> None:
        super().__init__()
        self.looks_up = looks_up
        self.table = nn.Parameter(torch.randn(vocabulary, width) * 0.1)

    def forward(self, words: Tensor) -> Tensor:
        if self.looks_up:
            return F.embedding(words, self.table)
        return F.one_hot(words, len(self.table)).float() @ self.table  # fault: one-hot-lookup


def ngrams(steps: int, looks_up: bool) -> list[Tensor]:
    """The probabilistic language model of four words that predict the fifth."""
    random = seeded()
    vocabulary, width = 1500, 64
    embed = WordVectors(vocabulary, width, looks_up)
    hide, narrow, predict = nn.Linear(4 * width, 384), nn.Linear(384, 64), nn.Linear(64, vocabulary)
    parameters = [*embed.parameters(), *hide.parameters(), *narrow.parameters(), *predict.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    for _ in range(steps):
        text = torch.randint(0, vocabulary, (256, 5), generator=random)
        context = embed(text[:, :4]).flatten(1)
        hidden = torch.tanh(hide(context))
        scores = predict(narrow(hidden))
        loss = F.cross_entropy(scores, text[:, 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


PROGRAMS = [
    Planted(name, "hotspot", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("every-position-decoded", lambda n: pretraining(n, False), lambda n: pretraining(n, True), 7),
        ("dense-adjacency", lambda n: citations(n, DenseGraph), lambda n: citations(n, EdgeList), 25),
        ("one-hot-lookup", lambda n: ngrams(n, False), lambda n: ngrams(n, True), 50),
    )
]
