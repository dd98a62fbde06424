"""Training without any of the nine faults."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.planted.program import Clean, seeded, weights


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 192), nn.Linear(192, 192), nn.Linear(192, 64)

    def forward(self, noise: Tensor) -> Tensor:
        x = F.relu(self.first(noise))
        x = F.relu(self.second(x))
        return torch.tanh(self.third(x))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 192), nn.Linear(192, 192), nn.Linear(192, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), 0.2)
        x = F.leaky_relu(self.second(x), 0.2)
        return self.third(x)


def forger_and_expert(steps: int) -> list[Tensor]:
    """A GAN: two optimizers, labels that are made once, and what the generator made is used twice."""
    random = seeded()
    forger, expert = Generator(), Discriminator()
    forging = torch.optim.Adam(forger.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    judging = torch.optim.Adam(expert.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    yes, no = torch.ones(128, 1), torch.zeros(128, 1)
    for _ in range(steps):
        real = torch.rand(128, 64, generator=random) * 2 - 1
        fake = forger(torch.randn(128, 16, generator=random))
        loss = F.binary_cross_entropy_with_logits(expert(real), yes)
        loss = loss + F.binary_cross_entropy_with_logits(expert(fake.detach()), no)
        judging.zero_grad()
        loss.backward()
        judging.step()
        loss = F.binary_cross_entropy_with_logits(expert(fake), yes)
        forging.zero_grad()
        loss.backward()
        forging.step()
    return weights(forger)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.third, self.head = nn.Linear(32 * 49, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.relu(self.third(x.flatten(1)))
        return self.head(x)


def told_now_and_then(steps: int) -> list[Tensor]:
    """Mixed pictures with mixed labels; the loss is printed, and so taken out, once in twenty steps."""
    random = seeded()
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    told = []
    for number in range(steps):
        images, labels = torch.rand(32, 1, 28, 28, generator=random), torch.randint(0, 10, (32,), generator=random)
        share = 0.5 + 0.5 * math.sin(number)
        order = torch.randperm(32, generator=random)
        scores = model(images.lerp(images[order], 0.5 * share))
        loss = F.cross_entropy(scores, labels).lerp(F.cross_entropy(scores, labels[order]), 0.5 * share)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 20 == 19:
            told.append(loss.item())
    return [torch.tensor(told), *weights(model)]


class Choices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.think, self.act = nn.Linear(12, 192), nn.Linear(192, 192), nn.Linear(192, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.see(x))
        x = F.relu(self.think(x))
        return self.act(x)


def replayed(steps: int) -> list[Tensor]:
    """Deep Q-learning from a ring of memories; the target network is replaced once in fifty steps."""
    random = seeded()
    online, target = Choices(), Choices()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    ring = torch.randn(2048, 12, generator=random)
    acted, paid = torch.randint(0, 5, (2048,), generator=random), torch.randn(2048, generator=random)
    state, place = torch.randn(16, 12, generator=random), 0
    for number in range(steps):
        with torch.no_grad():
            greedy = online(state).argmax(1)
            dice = torch.randint(0, 5, (16,), generator=random)
            action = torch.where(torch.rand(16, generator=random) < 0.1, dice, greedy)
            state = 0.9 * state + 0.1 * torch.randn(16, 12, generator=random)
        ring[place : place + 16] = state
        acted[place : place + 16] = action
        place = (place + 16) % 2048
        picked = torch.randint(0, 2047, (192,), generator=random)
        with torch.no_grad():
            after = ring.index_select(0, picked + 1)
            wanted = paid.index_select(0, picked) + 0.95 * target(after).amax(1)
        values = online(ring.index_select(0, picked))
        values = values.gather(1, acted.index_select(0, picked).unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 50 == 49:
            target.load_state_dict(online.state_dict())
    return weights(online)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.think = nn.Linear(6, 128), nn.Linear(128, 128)
        self.act, self.value = nn.Linear(128, 3), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.see(x))
        x = torch.tanh(self.think(x))
        return self.act(x).log_softmax(1), self.value(x).squeeze(1)


def proximal(steps: int) -> list[Tensor]:
    """Proximal policy optimization of 64 simulated things at once; time is a loop, things are not."""
    random = seeded()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, fused=True)
    state = torch.randn(64, 6, generator=random)
    for _ in range(steps):
        seen, acted, chances, values, rewards = [], [], [], [], []
        with torch.no_grad():
            for _ in range(16):
                logs, value = policy(state)
                action = torch.multinomial(logs.exp(), 1, generator=random)
                seen.append(state)
                acted.append(action)
                chances.append(logs.gather(1, action))
                values.append(value)
                state = 0.95 * state + 0.1 * (action - 1)
                rewards.append(-state.square().mean(1))
            after, gain, gains = policy(state)[1], torch.zeros(64), []
            for reward, value in zip(reversed(rewards), reversed(values), strict=True):
                gain = reward + 0.99 * after - value + 0.94 * gain
                gains.append(gain)
                after = value
            advantage = torch.cat(gains[::-1])
            wanted = advantage + torch.cat(values)
            advantage = (advantage - advantage.mean()) / advantage.std()
        states, actions, before = torch.cat(seen), torch.cat(acted), torch.cat(chances)
        for _ in range(3):
            logs, value = policy(states)
            ratio = (logs.gather(1, actions) - before).exp().squeeze(1)
            better = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = 0.5 * F.mse_loss(value, wanted) - better + 0.01 * (logs * logs.exp()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(policy)


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.read = nn.Embedding(300, 64), nn.Linear(64, 96)
        self.remember, self.wide = nn.GRU(96, 32, batch_first=True), nn.Linear(32, 1024)
        self.guess = nn.Linear(1024, 300)

    def forward(self, text: Tensor) -> Tensor:
        x = F.relu(self.read(self.characters(text)))
        states, _ = self.remember(x)
        x = F.relu(self.wide(states))
        return self.guess(x)


def next_letter(steps: int) -> list[Tensor]:
    random = seeded()
    text = torch.randint(0, 300, (128, 1 + 6 * 8), generator=random)
    model = Letters()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=True)
    for number in range(steps):
        start = 6 * (number % 8)
        guesses = model(text[:, start : start + 6])
        loss = F.cross_entropy(guesses.flatten(0, 1), text[:, start + 1 : start + 7].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=True)
        optimizer.step()
    return weights(model)


class Grader(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(100, width), nn.Linear(width, width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


def teacher_and_student(steps: int) -> list[Tensor]:
    """A small network learns what a larger one answers, which is no longer trained."""
    random = seeded()
    teacher, student = Grader(320).eval().requires_grad_(False), Grader(160)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x, labels = torch.randn(256, 100, generator=random), torch.randint(0, 12, (256,), generator=random)
        with torch.no_grad():
            soft = (teacher(x) / 3).log_softmax(1)
        scores = student(x)
        loss = F.cross_entropy(scores, labels) + 9 * F.kl_div(
            (scores / 3).log_softmax(1), soft, reduction="batchmean", log_target=True
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(student)


class Portrait(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 5, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.third, self.describe = nn.Linear(32 * 25, 160), nn.Linear(160, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x.flatten(1)))
        return self.describe(x)


def hardest_of_a_batch(steps: int) -> list[Tensor]:
    """Triplets of the farthest of one's own and the nearest stranger, which are looked for among all pairs."""
    random = seeded()
    model = Portrait()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    people = torch.arange(16).repeat_interleave(4)
    same = people.unsqueeze(0) == people.unsqueeze(1)
    for _ in range(steps):
        portraits = torch.rand(64, 1, 28, 28, generator=random)
        distances = torch.cdist(model(portraits), model(portraits.flip(3)))
        farthest = distances.masked_fill(~same, 0).amax(1)
        closest = distances.masked_fill(same, 1e6).amin(1)
        loss = F.softplus(farthest - closest).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Hidden(nn.Module):
    """One block of a transformer that sees both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.before, self.after = nn.Embedding(256, 96), nn.LayerNorm(96), nn.LayerNorm(96)
        self.query, self.key, self.value, self.out = (nn.Linear(96, 96) for _ in range(4))
        self.wide, self.narrow, self.guess = nn.Linear(96, 192), nn.Linear(192, 96), nn.Linear(96, 256)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (4, 24)).transpose(1, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        inner = self.before(x)
        query, key = self.split(self.query(inner)), self.split(self.key(inner))
        mixed = F.scaled_dot_product_attention(query, key, self.split(self.value(inner)))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = F.gelu(self.wide(self.after(x)))
        x = x + self.narrow(inner)
        return self.guess(x)


def hidden_words(steps: int) -> list[Tensor]:
    """Words that are hidden are guessed; all others are ignored by the loss, and not taken out of the tensor."""
    random = seeded()
    model = Hidden()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for _ in range(steps):
        words = torch.randint(1, 256, (16, 48), generator=random)
        hidden = torch.rand(16, 48, generator=random) < 0.15
        guesses = model(words.masked_fill(hidden, 0))
        loss = F.cross_entropy(guesses.flatten(0, 1), words.masked_fill(~hidden, -100).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(30, 256), nn.Linear(256, 256), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        x = F.silu(self.second(x))
        return self.third(x)


def judged_each_epoch(steps: int) -> list[Tensor]:
    """Epochs of a loader, with a test set after each, of which the best weights are remembered."""
    random = seeded()
    x = torch.randn(768, 30, generator=random)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    loader = DataLoader(data, batch_size=256, shuffle=True, generator=random)
    x = torch.randn(512, 30, generator=random)
    truth = (x[:, 0] > x[:, 1]).long()
    model = Table()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    best, remembered, history = -1.0, weights(model), []
    for _ in range(steps):
        model.train()
        for rows, labels in loader:
            loss = F.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(x).argmax(1) == truth).float().mean().item()
        history.append(accuracy)
        if accuracy > best:
            best, remembered = accuracy, weights(model)
    return [torch.tensor(history), *remembered]


class Faces(nn.Module):
    """Age, gender and mood from one trunk, with weights of the three losses that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 256)
        self.age, self.gender, self.mood = nn.Linear(256, 1), nn.Linear(256, 2), nn.Linear(256, 7)
        self.logs = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.elu(self.first(x))
        x = F.elu(self.second(x))
        return self.age(x).squeeze(1), self.gender(x), self.mood(x)


def three_tasks(steps: int) -> list[Tensor]:
    """Averaged weights are moved with all parameters at once."""
    random = seeded()
    model = Faces()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    average = weights(model)
    parameters: list[Tensor] = list(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(steps):
        x = torch.randn(160, 128, generator=random)
        ages, genders, moods = x[:, 0], (x[:, 1] > 0).long(), torch.randint(0, 7, (160,), generator=random)
        age, gender, mood = model(x)
        losses = torch.stack([F.l1_loss(age, ages), F.cross_entropy(gender, genders), F.cross_entropy(mood, moods)])
        loss = ((-model.logs).exp() * losses + model.logs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 0.01)
    return average


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (forger_and_expert, 360),
        (told_now_and_then, 130),
        (replayed, 700),
        (proximal, 90),
        (next_letter, 50),
        (teacher_and_student, 400),
        (hardest_of_a_batch, 150),
        (hidden_words, 130),
        (judged_each_epoch, 100),
        (three_tasks, 450),
    )
]
