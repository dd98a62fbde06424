"""GNN: GraphSAGE-like message passing over a citation graph, full batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.workloads import Workload, data, forever

NODES, EDGES, FEATURES, CLASSES, WIDTH = 1500, 6000, 256, 7, 32


class SAGEConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        out = torch.zeros(dim_size, inputs.size(1))
        out = out.scatter_add(0, index.view(-1, 1).expand_as(inputs), inputs)
        count = torch.zeros(dim_size).scatter_add(0, index, torch.ones_like(index, dtype=torch.float))
        return out / count.clamp(min=1).view(-1, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        messages = self.message(x[src])
        out = self.aggregate(messages, dst, x.size(0))
        return self.lin_l(out) + self.lin_r(x)


class SAGE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, edges, y = (torch.from_numpy(array) for array in data.citations(seed, NODES, EDGES, FEATURES, CLASSES))
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    train_mask = torch.rand(NODES) < 0.5

    def train_step(batch: tuple[Tensor, Tensor, Tensor]) -> float:
        x, edge_index, y = batch
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return Workload("gnn", forever([(x, edge_index, y)]), train_step)
