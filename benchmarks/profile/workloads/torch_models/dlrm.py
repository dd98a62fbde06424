"""DLRM-like: embedding bags, dot interactions of all pairs of features, click prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.workloads import Workload, data, forever

ROWS = [40, 2000, 500, 8000, 1200, 90, 3000, 700]
WIDTH, BAG, BATCH = 32, 4, 512


def mlp(sizes: list[int], sigmoid_layer: int = -1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True) for rows in ROWS])
        self.bot_l = mlp([13, 128, 64, WIDTH])
        features = len(ROWS) + 1
        self.top_l = mlp([features * (features - 1) // 2 + WIDTH, 128, 64, 1], sigmoid_layer=2)

    def apply_emb(self, lS_o: Tensor, lS_i: Tensor) -> list[Tensor]:
        ly = []
        for k, emb in enumerate(self.emb_l):
            ly.append(emb(lS_i[:, k].reshape(-1), lS_o))
        return ly

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        Zflat = Z[:, li, lj]
        return torch.cat([x, Zflat], dim=1)

    def forward(self, dense_x: Tensor, lS_o: Tensor, lS_i: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_o, lS_i)
        z = self.interact_features(x, ly)
        return self.top_l(z)


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = DLRM()
    loss_fn = nn.BCELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*(torch.from_numpy(array) for array in data.clicks(seed, 8192, ROWS, BAG)))
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: tuple[Tensor, Tensor, Tensor]) -> float:
        X, ids, T = batch
        offsets = torch.arange(0, ids.shape[0] * BAG, BAG)
        Z = model(X, offsets, ids)
        E = loss_fn(Z, T.unsqueeze(1))
        optimizer.zero_grad()
        E.backward()
        optimizer.step()
        return E.item()

    return Workload("dlrm", forever(loader), train_step)
