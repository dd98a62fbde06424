"""Conformer blocks over spectra, trained with the CTC loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.workloads import Workload, data, forever

FRAMES, BANDS, SYMBOLS, SPOKEN, WIDTH, HEADS, BLOCKS, KERNEL, BATCH = 96, 40, 30, 12, 64, 4, 2, 15, 4


class Utterances(Dataset):
    """Spectra of different lengths with their transcripts."""

    def __init__(self, seed: int) -> None:
        arrays = data.speech(seed, 128, FRAMES, BANDS, SYMBOLS, SPOKEN)
        self.spectra, self.lengths, self.transcripts = arrays

    def __len__(self) -> int:
        return len(self.spectra)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        frames = torch.from_numpy(self.spectra[index][: self.lengths[index]])
        return frames, torch.from_numpy(self.transcripts[index])


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(frames) for frames, _ in items])
    inputs = nn.utils.rnn.pad_sequence([frames for frames, _ in items], batch_first=True)
    return inputs, lengths, torch.stack([transcript for _, transcript in items])


class Swish(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * inputs.sigmoid()


class FeedForwardModule(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sequential = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, dim * 4),
            Swish(),
            nn.Dropout(0.1),
            nn.Linear(dim * 4, dim),
            nn.Dropout(0.1),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.sequential(inputs)


class ConvModule(nn.Module):
    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pointwise1 = nn.Conv1d(dim, dim * 2, kernel_size=1)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.batch_norm = nn.BatchNorm1d(dim)
        self.swish = Swish()
        self.pointwise2 = nn.Conv1d(dim, dim, kernel_size=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(inputs).transpose(1, 2)
        x = F.glu(self.pointwise1(x), dim=1)
        x = self.swish(self.batch_norm(self.depthwise(x)))
        x = self.dropout(self.pointwise2(x))
        return x.transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ff1, self.ff2 = FeedForwardModule(dim), FeedForwardModule(dim)
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, HEADS, dropout=0.1, batch_first=True)
        self.conv = ConvModule(dim, KERNEL)
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        normed = self.attn_norm(x)
        attended, _ = self.attn(normed, normed, normed, key_padding_mask=padding)
        x = x + attended
        x = x + self.conv(x)
        x = x + 0.5 * self.ff2(x)
        return self.final_norm(x)


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(BANDS, WIDTH, kernel_size=3, stride=2, padding=1)
        self.blocks = nn.ModuleList([ConformerBlock(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.subsample(inputs.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths - 1) // 2 + 1
        padding = torch.arange(x.size(1))[None, :] >= lengths[:, None]
        for block in self.blocks:
            x = block(x, padding)
        return F.log_softmax(self.head(x), dim=-1), lengths


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = Conformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    loader = DataLoader(Utterances(seed), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate)

    def train_step(batch: tuple[Tensor, Tensor, Tensor]) -> float:
        inputs, lengths, targets = batch
        optimizer.zero_grad()
        log_probs, out_lengths = model(inputs, lengths)
        target_lengths = torch.full((len(targets),), SPOKEN)
        loss = criterion(log_probs.transpose(0, 1), targets, out_lengths, target_lengths)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    return Workload("conformer", forever(loader), train_step)
