"""Loops that take values out of tensors one at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 5, stride=2), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU())
        self.head = nn.Linear(16 * 10 * 10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def count_in_a_loop(confusion: Tensor, labels: Tensor, predicted: Tensor) -> None:
    for label, prediction in zip(labels, predicted, strict=True):
        confusion[int(label.item()), int(prediction.item())] += 1  # fault: confusion-one-by-one


def count_at_once(confusion: Tensor, labels: Tensor, predicted: Tensor) -> None:
    confusion += torch.bincount(labels * 10 + predicted, minlength=100).reshape(10, 10)


@torch.no_grad()
def evaluation(steps: int, in_a_loop: bool) -> Tensor:
    """The confusion matrix of a classifier of digits."""
    random = seeded()
    model, confusion = Digits().eval(), torch.zeros(10, 10, dtype=torch.long)
    count = count_in_a_loop if in_a_loop else count_at_once
    for _ in range(steps):
        images, labels = torch.rand(64, 1, 28, 28, generator=random), torch.randint(0, 10, (64,), generator=random)
        count(confusion, labels, model(images).argmax(dim=1))
    return confusion


class Translator(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.decoder = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, vocabulary)


@torch.no_grad()
def greedy_decoding(steps: int, one_by_one: bool) -> list[list[int]]:
    """Translates batches of sentences word by word until each of them has ended, which token 3 stands for."""
    random = seeded()
    model = Translator().eval()
    results = []
    for _ in range(steps):
        hidden = torch.randn(32, 64, generator=random)
        cell, tokens = torch.zeros(32, 64), torch.ones(32, dtype=torch.long)
        finished, words = torch.zeros(32, dtype=torch.bool), []
        for _ in range(30):
            hidden, cell = model.decoder(model.embedding(tokens), (hidden, cell))
            tokens = model.head(hidden).argmax(dim=1)
            if one_by_one:
                for sentence in range(32):
                    if tokens[sentence] == 3:  # fault: each-sentence-asked
                        finished[sentence] = True
            else:
                finished |= tokens == 3
            words.append(tokens)
        results += torch.stack(words, dim=1).masked_fill(finished[:, None], 0).tolist()
    return results


def advantages_by_item(rewards: Tensor, values: Tensor, ended: Tensor) -> Tensor:
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        follows = 1.0 - ended[t].item()  # fault: advantages-by-item
        delta = (
            rewards[t].item() + 0.99 * values[t + 1].item() * follows - values[t].item()
        )  # fault: advantages-by-item
        running = delta + 0.99 * 0.95 * follows * running
        advantages[t] = running
    return advantages


def advantages_from_lists(rewards: Tensor, values: Tensor, ended: Tensor) -> Tensor:
    advantages, running = [], 0.0
    known = values.tolist()
    for reward, done, now, after in zip(
        reversed(rewards.tolist()), reversed(ended.tolist()), reversed(known[:-1]), reversed(known[1:]), strict=True
    ):
        running = reward + (0.99 * after + 0.99 * 0.95 * running) * (1.0 - done) - now
        advantages.append(running)
    return torch.tensor(advantages[::-1])


def policy_gradient(steps: int, by_item: bool) -> list[Tensor]:
    """Proximal policy optimization on recorded episodes, with generalized advantage estimation."""
    random = seeded()
    actor, critic = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 6)), nn.Linear(24, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4, fused=True)
    estimate = advantages_by_item if by_item else advantages_from_lists
    for _ in range(steps):
        states = torch.randn(257, 24, generator=random)
        rewards, ended = torch.randn(256, generator=random), (torch.rand(256, generator=random) < 0.02).float()
        with torch.no_grad():
            values = critic(states).squeeze(1)
            actions = actor(states[:-1]).argmax(dim=1)
            old = actor(states[:-1]).log_softmax(dim=1).gather(1, actions[:, None])
        advantages = estimate(rewards, values, ended)
        for _ in range(4):
            new = actor(states[:-1]).log_softmax(dim=1).gather(1, actions[:, None])
            ratio = (new - old).exp().squeeze(1)
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss = F.mse_loss(critic(states[:-1]).squeeze(1), advantages + values[:-1]) - gain
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach().clone() for p in [*actor.parameters(), *critic.parameters()]]


PROGRAMS = [
    Planted(
        "confusion-one-by-one",
        "synchronization",
        lambda steps: evaluation(steps, True),
        lambda steps: evaluation(steps, False),
        steps=80,
        module=__name__,
    ),
    Planted(
        "each-sentence-asked",
        "synchronization",
        lambda steps: greedy_decoding(steps, True),
        lambda steps: greedy_decoding(steps, False),
        steps=16,
        module=__name__,
    ),
    Planted(
        "advantages-by-item",
        "synchronization",
        lambda steps: policy_gradient(steps, True),
        lambda steps: policy_gradient(steps, False),
        steps=40,
        module=__name__,
    ),
]
