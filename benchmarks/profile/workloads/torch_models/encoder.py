"""Transformer encoder, post-norm as in the original publication, trained on masked language modelling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.workloads import Workload, data, forever

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 500, 48, 96, 4, 3, 6
MASK, IGNORE = VOCABULARY, -100


class LayerNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = dropout(scores.softmax(dim=-1))
    return torch.matmul(p_attn, value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h: int, d_model: int) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        nbatches = x.size(0)
        query, key, value = (
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2) for lin in list(self.linears)[:3]
        )
        x = attention(query, key, value, mask.unsqueeze(1), self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(HEADS, WIDTH)
        self.w_1, self.w_2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.self_attn(x, mask)))
        return self.norm2(x + self.dropout(self.w_2(self.dropout(self.w_1(x).relu()))))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 512) -> None:
        super().__init__()
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.pe: Tensor
        self.register_buffer("pe", pe.unsqueeze(0))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pe[:, : x.size(1)].requires_grad_(False)
        return self.dropout(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lut, self.position = nn.Embedding(VOCABULARY + 1, WIDTH), PositionalEncoding(WIDTH)
        self.layers = nn.ModuleList([EncoderLayer() for _ in range(LAYERS)])
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.position(self.lut(tokens) * math.sqrt(WIDTH))
        for layer in self.layers:
            x = layer(x, mask)
        return F.log_softmax(self.generator(x), dim=-1)


def mask_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    chosen = torch.rand(tokens.shape) < 0.15
    labels = tokens.clone()
    labels[~chosen] = IGNORE
    inputs = tokens.clone()
    inputs[chosen] = MASK
    return inputs, labels


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = Encoder()
    criterion = nn.NLLLoss(ignore_index=IGNORE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: WIDTH**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 400**-1.5)
    )
    windows = TensorDataset(torch.from_numpy(data.text_windows(seed, VOCABULARY, 256, LENGTH - 1)))
    loader = DataLoader(windows, batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: list[Tensor]) -> float:
        inputs, labels = mask_tokens(batch[0])
        out = model(inputs, torch.ones(len(inputs), 1, LENGTH))
        loss = criterion(out.contiguous().view(-1, VOCABULARY), labels.contiguous().view(-1))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Workload("encoder", forever(loader), train_step)
