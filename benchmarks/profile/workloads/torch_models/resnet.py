"""ResNet with basic blocks, as trained on CIFAR-10."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.workloads import Workload, data, forever

SIZE, CLASSES, WIDTH, BATCH = 32, 10, 8, 8


class Pictures(Dataset):
    """Images that are padded and cropped at random when they are taken."""

    def __init__(self, seed: int) -> None:
        self.pixels, self.labels = data.images(seed, 256, SIZE, CLASSES)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = F.pad(torch.from_numpy(self.pixels[index]), (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        return image[:, top : top + SIZE, left : left + SIZE], int(self.labels[index])


class BasicBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...] = (2, 2, 2)) -> None:
        super().__init__()
        self.in_planes = WIDTH
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.layer1 = self._make_layer(WIDTH, blocks[0], stride=1)
        self.layer2 = self._make_layer(WIDTH * 2, blocks[1], stride=2)
        self.layer3 = self._make_layer(WIDTH * 4, blocks[2], stride=2)
        self.linear = nn.Linear(WIDTH * 4, CLASSES)

    def _make_layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        layers = []
        for block_stride in [stride] + [1] * (blocks - 1):
            layers.append(BasicBlock(self.in_planes, planes, block_stride))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer2(out)
        out = self.layer3(out)
        out = F.avg_pool2d(out, out.size(3))
        return self.linear(out.view(out.size(0), -1))


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(Pictures(seed), batch_size=BATCH, shuffle=True, drop_last=True)
    correct = total = 0

    def train_step(batch: tuple[Tensor, Tensor]) -> float:
        nonlocal correct, total
        inputs, targets = batch
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        return loss.item()

    return Workload("resnet", forever(loader), train_step)
