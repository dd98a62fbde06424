"""Training programs without any of the nine faults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.planted.program import Clean, seeded, weights


def fit(steps: int, parameters: Iterable[Tensor], loss_of: Callable[[], Tensor]) -> list[Tensor]:
    """Minimize a loss; its values."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def next_character(steps: int) -> list[Tensor]:
    """The next character from the eight before."""
    random = seeded()
    table, hidden, out = nn.Embedding(30, 24), nn.Linear(8 * 24, 128), nn.Linear(128, 30)
    text = torch.randint(0, 30, (128, 9), generator=random)

    def loss_of() -> Tensor:
        embedded = table(text[:, :8]).flatten(1)
        state = torch.tanh(hidden(embedded))
        return F.cross_entropy(out(state), text[:, 8])

    return fit(steps, [*table.parameters(), *hidden.parameters(), *out.parameters()], loss_of)


def gated_recurrence(steps: int) -> list[Tensor]:
    random = seeded()
    cell, inward, out = nn.GRUCell(32, 64), nn.Linear(8, 32), nn.Linear(64, 8)
    series = torch.randn(32, 16, 8, generator=random).cumsum(1) / 4

    def loss_of() -> Tensor:
        state, outputs = torch.zeros(32, 64), []
        for item in inward(series).unbind(1):
            state = cell(item, state)
            outputs.append(state)
        predicted = out(torch.stack(outputs, 1))
        return F.smooth_l1_loss(predicted[:, :-1], series[:, 1:])

    return fit(steps, [*cell.parameters(), *inward.parameters(), *out.parameters()], loss_of)


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(x))
        x = F.max_pool2d(x, 2)
        x = F.relu(self.two(x))
        x = F.relu(self.three(x))
        return self.head(x.amax((2, 3)))


def pictures(steps: int) -> list[Tensor]:
    random = seeded()
    model = SmallConvNet()
    data = TensorDataset(torch.randn(64, 3, 24, 24, generator=random), torch.randint(0, 10, (64,), generator=random))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    losses = []
    for _ in range(steps):
        for images, labels in DataLoader(data, batch_size=16, shuffle=True, generator=random):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def variational_autoencoder(steps: int) -> list[Tensor]:
    random = seeded()
    encode, moments, decode, out = nn.Linear(100, 64), nn.Linear(64, 16), nn.Linear(8, 64), nn.Linear(64, 100)
    x = torch.rand(256, 100, generator=random)

    def loss_of() -> Tensor:
        mean, spread = moments(F.relu(encode(x))).chunk(2, dim=1)
        latent = torch.addcmul(mean, torch.randn(mean.shape, generator=random), F.softplus(spread))
        restored = out(F.relu(decode(latent)))
        prior = torch.distributions.Normal(0.0, 1.0)
        posterior = torch.distributions.Normal(mean, F.softplus(spread), validate_args=False)
        divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return F.binary_cross_entropy_with_logits(restored, x) + 0.01 * divergence

    layers = nn.ModuleList([encode, moments, decode, out])
    return fit(steps, layers.parameters(), loss_of)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)


def transformer(steps: int) -> list[Tensor]:
    random = seeded()
    embed, blocks, head = nn.Embedding(64, 64), nn.ModuleList([Block(64), Block(64)]), nn.Linear(64, 64)
    tokens = torch.randint(0, 64, (8, 49), generator=random)

    def loss_of() -> Tensor:
        x = embed(tokens[:, :-1])
        for block in blocks:
            x = block(x)
        return F.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())

    return fit(steps, [*embed.parameters(), *blocks.parameters(), *head.parameters()], loss_of)


def checkpointed(steps: int) -> list[Tensor]:
    """Activations are computed again in the backward pass, to fit in memory."""
    random = seeded()
    blocks, head = nn.ModuleList([Block(48), Block(48)]), nn.Linear(48, 1)
    x, y = torch.randn(8, 40, 48, generator=random), torch.randn(8, generator=random)

    def loss_of() -> Tensor:
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return F.mse_loss(head(h.mean(1))[:, 0], y)

    return fit(steps, [*blocks.parameters(), *head.parameters()], loss_of)


def ratings(steps: int) -> list[Tensor]:
    """Matrix factorization with sparse gradients."""
    random = seeded()
    users, items = nn.Embedding(3000, 24, sparse=True), nn.Embedding(2000, 24, sparse=True)
    optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], lr=0.5)
    losses = []
    for _ in range(steps):
        user = torch.randint(0, 3000, (1024,), generator=random)
        item = torch.randint(0, 2000, (1024,), generator=random)
        rated = ((user * 7 + item) % 5).float() - 2
        scores = torch.einsum("bd,bd->b", users(user), items(item))
        loss = F.huber_loss(scores, rated)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def policy_gradient(steps: int) -> list[Tensor]:
    """Clipped policy updates, several on each roll-out."""
    random = seeded()
    body, actor, critic = nn.Linear(12, 96), nn.Linear(96, 6), nn.Linear(96, 1)
    layers = nn.ModuleList([body, actor, critic])
    optimizer = torch.optim.Adam(layers.parameters(), lr=3e-4, fused=True)
    losses = []
    for _ in range(steps):
        seen = torch.randn(512, 12, generator=random)
        with torch.no_grad():
            logits = actor(torch.tanh(body(seen)))
            action = torch.multinomial(logits.softmax(1), 1, generator=random)
            before = logits.log_softmax(1).gather(1, action)
        loss = torch.zeros(())
        rewards = -(action[:, 0] - seen[:, 0].round().clamp(0, 5)).abs()
        for _ in range(3):
            hidden = torch.tanh(body(seen))
            advantage = rewards - critic(hidden)[:, 0]
            ratio = torch.exp(actor(hidden).log_softmax(1).gather(1, action) - before)[:, 0]
            gain = torch.minimum(ratio * advantage.detach(), ratio.clamp(0.8, 1.2) * advantage.detach())
            loss = advantage.square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    return losses


def adversarial(steps: int) -> list[Tensor]:
    random = seeded()
    generator = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 16)])
    critic = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 1)])
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, fused=True) for model in (generator, critic)]

    def generate() -> Tensor:
        hidden = F.relu(generator[0](torch.randn(256, 8, generator=random)))
        return generator[1](hidden)

    def judge(x: Tensor) -> Tensor:
        hidden = F.leaky_relu(critic[0](x), 0.2)
        return critic[1](hidden).mean()

    losses = []
    for _ in range(steps):
        real = torch.randn(256, 16, generator=random) * 2 + 1
        critic_loss = F.softplus(judge(generate().detach()) - judge(real))
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()
        generator_loss = -judge(generate())
        optimizers[0].zero_grad()
        generator_loss.backward()
        optimizers[0].step()
        losses.append(generator_loss.detach())
    return losses


def two_towers(steps: int) -> list[Tensor]:
    random = seeded()
    queries, documents = nn.EmbeddingBag(500, 48), nn.EmbeddingBag(500, 48)
    left, right = nn.Linear(48, 32), nn.Linear(48, 32)
    words = torch.randint(0, 500, (2, 128, 12), generator=random)

    def loss_of() -> Tensor:
        query = F.normalize(left(queries(words[0])), dim=1)
        document = F.normalize(right(documents(words[1])), dim=1)
        scores = 20 * query @ document.T
        return F.cross_entropy(scores, torch.arange(128))

    return fit(steps, nn.ModuleList([queries, documents, left, right]).parameters(), loss_of)


def temporal_convolutions(steps: int) -> list[Tensor]:
    random = seeded()
    layers = nn.ModuleList([nn.Conv1d(16, 16, 3, padding=2**k, dilation=2**k) for k in range(4)])
    inward, out = nn.Conv1d(4, 16, 1), nn.Conv1d(16, 1, 1)
    signal, clean = torch.randn(16, 4, 128, generator=random), torch.randn(16, 1, 128, generator=random)

    def loss_of() -> Tensor:
        x = inward(signal)
        for layer in layers:
            x = x + F.relu(layer(x))
        return F.mse_loss(out(x), clean)

    return fit(steps, [*layers.parameters(), *inward.parameters(), *out.parameters()], loss_of)


def one_rank_of_many(steps: int) -> list[Tensor]:
    """DistributedDataParallel in a group of one, as when a script for a cluster runs at home."""
    random = seeded()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            module = SmallConvNet()
            model = DistributedDataParallel(module, gradient_as_bucket_view=True)
            x, y = torch.randn(16, 3, 20, 20, generator=random), torch.randint(0, 10, (16,), generator=random)
            fit(steps, model.parameters(), lambda: F.cross_entropy(model(x), y))
        finally:
            dist.destroy_process_group()
    return weights(module)


def compiled_once(steps: int) -> list[Tensor]:
    """torch.compile, with one shape."""
    random = seeded()
    torch._dynamo.reset()
    model = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64)])

    @torch.compile(backend="eager")
    def forward(x: Tensor) -> Tensor:
        hidden = F.silu(model[0](x))
        return F.normalize(model[1](hidden), dim=1)

    x, y = torch.randn(256, 64, generator=random), torch.randn(256, 64, generator=random)
    return fit(steps, model.parameters(), lambda: F.mse_loss(forward(x), y))


PROGRAMS = [
    Clean("next-character", next_character, 400),
    Clean("gated-recurrence", gated_recurrence, 100),
    Clean("pictures", pictures, 15),
    Clean("variational-autoencoder", variational_autoencoder, 200),
    Clean("transformer", transformer, 50),
    Clean("checkpointed", checkpointed, 50),
    Clean("ratings", ratings, 500),
    Clean("policy-gradient", policy_gradient, 100),
    Clean("adversarial", adversarial, 200),
    Clean("two-towers", two_towers, 200),
    Clean("temporal-convolutions", temporal_convolutions, 80),
    Clean("one-rank-of-many", one_rank_of_many, 120),
    Clean("compiled-once", compiled_once, 300),
]
