"""U-Net: segmentation with skip connections, trained on cross-entropy and Dice loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.workloads import Workload, data, forever

SIZE, WIDTH, BATCH = 64, 8, 2


class DoubleConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels: int = 1, n_classes: int = 2) -> None:
        super().__init__()
        self.inc = DoubleConv(n_channels, WIDTH)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(WIDTH, WIDTH * 2))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(WIDTH * 2, WIDTH * 4))
        self.up1 = Up(WIDTH * 4, WIDTH * 2)
        self.up2 = Up(WIDTH * 2, WIDTH)
        self.outc = nn.Conv2d(WIDTH, n_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


def dice_coeff(prediction: Tensor, target: Tensor, epsilon: float = 1e-6) -> Tensor:
    inter = 2 * (prediction * target).sum(dim=(-1, -2))
    sets_sum = prediction.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    one_hot = F.one_hot(masks, logits.shape[1]).permute(0, 3, 1, 2).float()
    return 1 - dice_coeff(F.softmax(logits, dim=1).float(), one_hot)


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = UNet().to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    pixels, masks = data.blobs(seed, 64, SIZE)
    dataset = TensorDataset(torch.from_numpy(pixels), torch.from_numpy(masks))
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: tuple[Tensor, Tensor]) -> float:
        images, true_masks = batch
        images = images.to(dtype=torch.float32, memory_format=torch.channels_last)
        masks_pred = model(images)
        loss = criterion(masks_pred, true_masks)
        loss += dice_loss(masks_pred, true_masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return Workload("unet", forever(loader), train_step)
