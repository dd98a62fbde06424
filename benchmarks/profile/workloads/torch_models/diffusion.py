"""Diffusion: training of a DDPM's noise predictor, with a moving average of its weights."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.workloads import Workload, data, forever

SIZE, WIDTH, TIMESTEPS, BATCH = 16, 16, 200, 8


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        half_dim = self.dim // 2
        emb = torch.exp(torch.arange(half_dim) * -(math.log(10000) / (half_dim - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, time_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.proj1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(4, dim_out)
        self.proj2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(4, dim_out)
        self.act = nn.SiLU()
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time_emb: Tensor) -> Tensor:
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.proj1(x))
        h = self.act(h * (scale + 1) + shift)
        h = self.act(self.norm2(self.proj2(h)))
        return h + self.res_conv(x)


class NoisePredictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        time_dim = WIDTH * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(WIDTH), nn.Linear(WIDTH, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down1 = ResnetBlock(WIDTH, WIDTH, time_dim)
        self.downsample = nn.Conv2d(WIDTH, WIDTH * 2, 4, stride=2, padding=1)
        self.mid = ResnetBlock(WIDTH * 2, WIDTH * 2, time_dim)
        self.upsample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(WIDTH * 2, WIDTH, 3, 1, 1))
        self.up1 = ResnetBlock(WIDTH * 2, WIDTH, time_dim)
        self.final_conv = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        t = self.time_mlp(time)
        x = self.init_conv(x)
        skip = self.down1(x, t)
        x = self.mid(self.downsample(skip), t)
        x = torch.cat((self.upsample(x), skip), dim=1)
        return self.final_conv(self.up1(x, t))


def extract(a: Tensor, t: Tensor, x_shape: torch.Size) -> Tensor:
    out = a.gather(-1, t)
    return out.reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class GaussianDiffusion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        betas = torch.linspace(1e-4, 0.02, TIMESTEPS)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.sqrt_alphas_cumprod: Tensor
        self.sqrt_one_minus_alphas_cumprod: Tensor
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def forward(self, x_start: Tensor) -> Tensor:
        t = torch.randint(0, TIMESTEPS, (x_start.shape[0],)).long()
        noise = torch.randn_like(x_start)
        x = self.q_sample(x_start, t, noise)
        return F.mse_loss(self.model(x, t), noise)


class EMA:
    def __init__(self, model: nn.Module, decay: float = 0.995) -> None:
        self.decay, self.model = decay, copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, current in zip(self.model.parameters(), model.parameters(), strict=True):
            average.data = average.data * self.decay + (1 - self.decay) * current.data


def build(seed: int) -> Workload:
    torch.manual_seed(seed)
    diffusion = GaussianDiffusion(NoisePredictor())
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    ema = EMA(diffusion)
    pixels, _ = data.images(seed, 256, SIZE, 10)
    loader = DataLoader(TensorDataset(torch.from_numpy(pixels)), batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: list[Tensor]) -> float:
        loss = diffusion(batch[0])
        loss.backward()
        nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(diffusion)
        return loss.item()

    return Workload("diffusion", forever(loader), train_step)
