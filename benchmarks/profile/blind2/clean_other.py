"""Well-written inference, simulation and search that have something about them that looks like a fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Clean, seeded, weights


@torch.inference_mode()
def large_products(steps: int) -> list[Tensor]:
    """Scores of all items for all users: three products, which are simply the work."""
    random = seeded()
    users, items = torch.randn(600, 256, generator=random), torch.randn(3000, 256, generator=random)
    mix = torch.randn(256, 256, generator=random) / 16
    best = []
    for _ in range(steps):
        users = users @ mix
        scores = users @ items.T
        best.append((scores @ items)[:, :4])
    return best


@torch.inference_mode()
def photos_channels_last(steps: int) -> list[Tensor]:
    """Pictures are brought into the layout of the network once, on their way in."""
    random = seeded()
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, stride=2), nn.ReLU(), nn.Conv2d(48, 48, 3)
    ).eval()
    net = net.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    labels = []
    for _ in range(steps):
        photos = torch.randint(0, 256, (4, 3, 64, 64), generator=random, dtype=torch.uint8)
        labels.append(net(photos.contiguous(memory_format=torch.channels_last).float() / 255).mean(dim=(2, 3)))
    return labels


@torch.inference_mode()
def diffusion_sampling(steps: int) -> Tensor:
    """Pictures from noise, in many steps of one network, with a schedule of Python numbers."""
    random = seeded()
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU())
    last = nn.Conv2d(32, 3, 3, padding=1)
    kept = torch.linspace(0.9999, 0.98, steps).cumprod(0).tolist()
    x = torch.randn(4, 3, 48, 48, generator=random)
    for now, before in zip(reversed(kept), [*reversed(kept[:-1]), 1.0], strict=True):
        noise = last(net(x))
        clean = torch.sub(x, noise, alpha=(1 - now) ** 0.5).mul_(now**-0.5)
        x = clean.mul_(before**0.5).add_(noise, alpha=(1 - before) ** 0.5)
    return x


class Generator(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 192) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(vocabulary, width), nn.GRUCell(width, width)
        self.middle, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, vocabulary)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.embedding(tokens), state)
        return self.head(F.relu(self.middle(state))).log_softmax(dim=1), state


@torch.inference_mode()
def beam_search(steps: int) -> list[list[int]]:
    """Beam search; the tokens of all beams leave their tensor together, once for each token."""
    random = seeded()
    model, beams = Generator().eval(), 16
    tokens, state, total = (
        torch.zeros(beams, dtype=torch.long),
        torch.randn(beams, 192, generator=random),
        torch.zeros(1),
    )
    texts: list[list[int]] = [[] for _ in range(beams)]
    for _ in range(steps):
        scores, state = model(tokens, state)
        total, best = (scores + total[:, None]).flatten().topk(beams)
        origin, tokens = best // 1000, best % 1000
        state = state.index_select(0, origin)
        texts = [[*texts[beam], token] for beam, token in zip(origin.tolist(), tokens.tolist(), strict=True)]
    return texts


@torch.no_grad()
def clustering(steps: int) -> Tensor:
    """Lloyd's iterations: one value is taken out of each, to see whether it was the last."""
    random = seeded()
    points = torch.randn(4000, 64, generator=random)
    centers = points[:100].clone()
    for _ in range(steps):
        nearest = torch.cdist(points, centers).argmin(dim=1)
        member = F.one_hot(nearest, 100).to(points.dtype)
        updated = (member.T @ points) / member.sum(dim=0).clamp(min=1)[:, None]
        shift = (updated - centers).abs().max()
        centers = updated
        if shift < 1e-12:
            break
    return centers


@torch.no_grad()
def waves(steps: int) -> Tensor:
    """Waves on a membrane; a stencil is no operator of PyTorch, so it is a chain of small ones in place."""
    field = torch.zeros(512, 512)
    field[200:220, 200:220] = 1.0
    before, laplacian = field.clone(), torch.zeros(510, 510)
    for _ in range(steps):
        torch.add(field[:-2, 1:-1], field[2:, 1:-1], out=laplacian)
        laplacian.add_(field[1:-1, :-2]).add_(field[1:-1, 2:])
        laplacian.sub_(field[1:-1, 1:-1], alpha=4)
        before.mul_(-1).add_(field, alpha=2)
        before[1:-1, 1:-1].add_(laplacian, alpha=0.2)
        field, before = before, field
    return field


class Experts(nn.Module):
    """A mixture of experts: each takes the rows that chose it, and adds its answers to them."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(dim=1).max(dim=1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out.index_add_(0, rows, expert(x.index_select(0, rows)) * weight.index_select(0, rows)[:, None])
        return out


@torch.inference_mode()
def mixture(steps: int) -> list[Tensor]:
    random = seeded()
    layers = nn.ModuleList([Experts(128, 4) for _ in range(2)])
    outputs = []
    for _ in range(steps):
        x = torch.randn(512, 128, generator=random)
        for layer in layers:
            x = x + layer(x)
        outputs.append(x[0])
    return outputs


def graph_network(steps: int) -> list[Tensor]:
    """Messages along the edges of a graph, gathered and summed by the operators for this."""
    random = seeded()
    nodes, edges = 3000, torch.randint(0, 3000, (2, 6000), generator=random)
    features, labels = torch.randn(nodes, 64, generator=random), torch.randint(0, 7, (nodes,), generator=random)
    layers = nn.ModuleList([nn.Linear(128, 128), nn.Linear(256, 64), nn.Linear(128, 7)])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2, fused=True)
    source, target = edges[0].contiguous(), edges[1].contiguous()
    for _ in range(steps):
        x = features
        for number, layer in enumerate(layers):
            received = torch.zeros_like(x).index_add(0, target, x.index_select(0, source))
            x = layer(torch.cat([x, received], dim=1))
            x = F.relu(x) if number < 2 else x
        optimizer.zero_grad()
        F.cross_entropy(x, labels).backward()
        optimizer.step()
    return weights(layers)


class Cart:
    """A simulator in Python, which takes a plain number as action."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.state = self.rng.normal(size=128).astype(np.float32)

    def step(self, action: int) -> np.ndarray:
        self.state = 0.99 * self.state + 0.01 * (action - 2) + self.rng.normal(size=128).astype(np.float32)
        return self.state


@torch.inference_mode()
def acting(steps: int) -> list[np.ndarray]:
    """One action a step has to leave its tensor: the simulator needs it."""
    policy = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 4)).eval()
    seeded()
    cart = Cart()
    states = [cart.state]
    for _ in range(steps):
        logits = policy(torch.from_numpy(states[-1]))
        states.append(cart.step(int(logits.argmax())))
    return states


@cache
def compiled_filter() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).eval()
    return torch.compile(model, backend="eager")


@torch.inference_mode()
def compiled_once(steps: int) -> list[Tensor]:
    """Compiled code that is used for all batches."""
    random, model = seeded(), compiled_filter()
    return [model(torch.randn(256, 64, generator=random)).mean(dim=0) for _ in range(steps)]


def averaged_meanwhile(steps: int) -> list[Tensor]:
    """The gradients of the last layer travel while those of the first are computed, with one rank."""
    random = seeded()
    model = nn.Sequential(nn.Linear(128, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(steps):
            loss = parallel(torch.randn(256, 128, generator=random)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.destroy_process_group()
    return weights(model)


@torch.inference_mode()
def half_precision(steps: int) -> list[Tensor]:
    """Embeddings are stored in half the bytes, and converted where a batch of them is used."""
    random = seeded()
    table = torch.randn(50_000, 96, generator=random).half()
    scorer = nn.Sequential(nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    scores = []
    for _ in range(steps):
        rows = torch.randint(0, 50_000, (512,), generator=random)
        scores.append(scorer(table.index_select(0, rows).float()))
    return scores


@torch.inference_mode()
def attention_blocks(steps: int) -> list[Tensor]:
    """Heads are laid out by views and transpositions, without copies until the end of each block."""
    random = seeded()
    layers = nn.ModuleList([nn.ModuleList([nn.Linear(128, 384), nn.Linear(128, 128)]) for _ in range(3)])
    outputs = []
    for _ in range(steps):
        x = torch.randn(4, 160, 128, generator=random)
        for pair in layers:
            qkv, out = pair.children()
            q, k, v = qkv(x).view(4, 160, 3, 4, 32).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        outputs.append(x[:, -1])
    return outputs


PROGRAMS = [
    Clean("large-products", large_products, steps=25),
    Clean("photos-channels-last", photos_channels_last, steps=40),
    Clean("diffusion-sampling", diffusion_sampling, steps=120),
    Clean("beam-search", beam_search, steps=250),
    Clean("clustering", clustering, steps=40),
    Clean("waves", waves, steps=500),
    Clean("mixture", mixture, steps=60),
    Clean("graph-network", graph_network, steps=30),
    Clean("acting", acting, steps=2000),
    Clean("compiled-once", compiled_once, steps=300),
    Clean("averaged-meanwhile", averaged_meanwhile, steps=50),
    Clean("half-precision", half_precision, steps=80),
    Clean("attention-blocks", attention_blocks, steps=60),
]
