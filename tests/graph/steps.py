"""Small models whose steps are traced, and batches for them."""

import torch
import torch.nn.functional as F
from torch import nn


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs, targets):
        return F.cross_entropy(self.inner(inputs).flatten(0, -2), targets.flatten())


def texts(vocabulary, tokens, batch=4):
    """Inputs and targets."""
    return torch.randint(vocabulary, (batch, tokens)), torch.randint(vocabulary, (batch, tokens))


class Convolutional(nn.Module):
    """Convolutions with batch norms, and a linear layer."""

    def __init__(self, channels=8, classes=4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.classify = nn.Linear(channels, classes)

    def forward(self, x):
        return self.classify(F.relu(self.layers(x)).mean((2, 3)))
