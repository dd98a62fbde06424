"""ViT: classification of images by patches and a class token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.workloads import Workload, data, forever

SIZE, PATCH, CLASSES, WIDTH, HEADS, LAYERS, BATCH = 32, 4, 10, 64, 4, 4, 8


class Pictures(Dataset):
    """Images that are normalized and flipped at random when they are taken."""

    def __init__(self, seed: int) -> None:
        self.pixels, self.labels = data.images(seed, 256, SIZE, CLASSES)
        self.mean, self.std = torch.tensor([0.0, 0.1, 0.2]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.5]).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (torch.from_numpy(self.pixels[index]) - self.mean) / self.std
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        return image, int(self.labels[index])


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.1)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        x = self.norm(x)
        q, k, v = (t.reshape(b, n, self.heads, -1).permute(0, 2, 1, 3) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.dropout(self.attend(dots))
        out = torch.matmul(attn, v)
        return self.to_out(out.permute(0, 2, 1, 3).reshape(b, n, d))


def feed_forward(dim: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, dim * 4),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(dim * 4, dim),
        nn.Dropout(0.1),
    )


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        patches = (SIZE // PATCH) ** 2
        self.to_patch_embedding = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.pos_embedding = nn.Parameter(torch.randn(1, patches + 1, WIDTH) * 0.02)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            [nn.ModuleList([Attention(WIDTH, HEADS), feed_forward(WIDTH)]) for _ in range(LAYERS)]
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def patchify(self, img: Tensor) -> Tensor:
        b, c, h, w = img.shape
        x = img.reshape(b, c, h // PATCH, PATCH, w // PATCH, PATCH)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, c * PATCH * PATCH)

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(self.patchify(img))
        cls_tokens = self.cls_token.repeat(x.shape[0], 1, 1)
        x = torch.cat((cls_tokens, x), dim=1)
        x = x + self.pos_embedding
        for attn, ff in self.layers:  # pyrefly: ignore[not-iterable]
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = ViT()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(seed), batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: tuple[Tensor, Tensor]) -> float:
        images, labels = batch
        outputs = model(images)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Workload("vit", forever(loader), train_step)
