"""Operators spelt out by hand as users write them (`SPELT`), and code that only looks alike (`ALIKE`): a blind test.

Written without sight of the recogniser. Each function stands alone; the norms and losses cover their usual reductions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INV_SQRT2 = 0.7071067811865476
SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805
RGB_MEAN, RGB_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def bert_activation(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class UpcastGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        cdf = 0.5 * (1 + torch.erf(wide * INV_SQRT2))
        return (wide * cdf).type_as(x)


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def sigmoid_form_gelu(hidden: Tensor) -> Tensor:
    cubic = hidden + 0.044715 * hidden * hidden * hidden
    return hidden * torch.sigmoid(1.5957691216057308 * cubic)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return gate.mul_(x)


def swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class Mish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(torch.log(1 + torch.exp(x)))


def mish_without_tanh(x: Tensor) -> Tensor:
    e = x.clamp(max=20.0).exp()
    n = e * (e + 2)
    return x * n / (n + 2)


def stable_softplus(x: Tensor) -> Tensor:
    return torch.clamp(x, min=0) + torch.log1p(torch.exp(-torch.abs(x)))


def positive_scale(raw: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = raw * beta
    soft = torch.log1p(torch.exp(scaled.clamp(max=threshold))) / beta
    return torch.where(scaled > threshold, raw, soft)


def preference_log_odds(margin: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(margin), -margin)


def log_gate(x: Tensor) -> Tensor:
    return torch.minimum(x, x.new_zeros(())) - (1 + (-x.abs()).exp()).log()


def squash(logits: Tensor) -> Tensor:
    z = torch.exp(-logits.abs())
    return torch.where(logits >= 0, 1 / (1 + z), z / (1 + z))


def gate_probability(x: Tensor) -> Tensor:
    return (x / 2).tanh().add(1).mul(0.5)


class ELU(nn.Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) + self.alpha * torch.expm1(x.clamp(max=0))


def self_normalising(x: Tensor) -> Tensor:
    positive = torch.clamp(x, min=0)
    negative = torch.clamp(SELU_ALPHA * (torch.exp(x) - 1), max=0)
    return SELU_SCALE * (positive + negative)


class HSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + 3.0) / 6.0


def squeeze_excite_gate(x: Tensor) -> Tensor:
    return (x / 6 + 0.5).clamp_(0.0, 1.0)


def lrelu(x: Tensor, slope: float = 0.2) -> Tensor:
    return torch.max(x, slope * x)


def leak_in_place(x: Tensor, leak: float = 0.01) -> Tensor:
    out = x.clone()
    out[x < 0] *= leak
    return out


class MomentsLayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = (x**2).mean(-1, keepdim=True) - mean**2
        return self.gamma * (x - mean) * torch.rsqrt(var + self.eps) + self.beta


class LayerNorm2d(nn.Module):
    """Over the channels of N×C×H×W."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def grouped_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    n, c, h, w = x.shape
    g = x.view(n, groups, -1)
    mean, var = g.mean(dim=2, keepdim=True), g.var(dim=2, keepdim=True, unbiased=False)
    g = (g - mean) / (var + eps).sqrt()
    return g.view(n, c, h, w) * weight.view(1, c, 1, 1) + bias.view(1, c, 1, 1)


class LlamaNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def query_key_norm(q: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    norm = q.norm(p=2, dim=-1, keepdim=True)
    rms = torch.sqrt(norm**2 / q.shape[-1] + eps)
    return scale * (q / rms)


def routing_weights(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def class_probabilities(logits: Tensor) -> Tensor:
    exps = (logits - logits.max(dim=1, keepdim=True).values).exp_()
    return exps.div_(torch.sum(exps, 1).unsqueeze(1))


def attention_weights(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def log_probabilities(x: Tensor, dim: int = -1) -> Tensor:
    z = x - x.amax(dim, keepdim=True)
    return z - torch.log(torch.exp(z).sum(dim, keepdim=True))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def log_partition(energy: Tensor, dim: int = -1) -> Tensor:
    peak, _ = torch.max(energy, dim=dim, keepdim=True)
    total = torch.sum(torch.exp(energy - peak), dim=dim)
    return peak.squeeze(dim) + torch.log(total)


class StableBCELoss(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = logits.clamp(min=0) - logits * target + (1 + (-logits.abs()).exp()).log()
        return loss.mean() if self.reduction == "mean" else loss.sum()


def discriminator_loss(p: Tensor, real: Tensor, eps: float = 1e-7) -> Tensor:
    p = torch.clamp(p, eps, 1 - eps)
    return -torch.mean(real * torch.log(p) + (1.0 - real) * torch.log(1.0 - p))


def huber_td_error(q: Tensor, target_q: Tensor, delta: float = 1.0) -> Tensor:
    error = (target_q - q).abs()
    quadratic = error.clamp(max=delta)
    return (0.5 * quadratic**2 + delta * (error - quadratic)).mean()


class BoxLoss(nn.Module):
    def __init__(self, beta: float = 1.0 / 9) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        n = torch.abs(pred - target)
        return torch.where(n < self.beta, 0.5 * n**2 / self.beta, n - 0.5 * self.beta).sum()


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Buffer(torch.ones(n)), nn.Buffer(torch.zeros(n)), eps
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(n)), nn.Buffer(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


# What follows only looks alike.


def gaussian_gated(x: Tensor, gate: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(gate / math.sqrt(2)))


class LearnableSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def erf_unit(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x))


def keras_hard_sigmoid(x: Tensor) -> Tensor:
    return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)


def serf(x: Tensor) -> Tensor:
    return x * torch.erf(F.softplus(x))


def annotated_norm(x: Tensor, a: Tensor, b: Tensor, eps: float = 1e-6) -> Tensor:
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return a * (x - mean) / (std + eps) + b


def mean_abs_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return weight * x / (x.abs().mean(dim=-1, keepdim=True) + eps)


def normalise_image(image: Tensor) -> Tensor:
    mean, std = image.new_tensor(RGB_MEAN), image.new_tensor(RGB_STD)
    return (image / 255.0 - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def whiten_advantages(advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def focal_loss(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    p = torch.sigmoid(logits)
    pt = p * target + (1 - p) * (1 - target)
    return (-((1 - pt) ** gamma) * torch.log(pt.clamp(min=1e-8))).mean()


def contrastive_loss(a: Tensor, b: Tensor, same: Tensor, margin: float = 1.0) -> Tensor:
    d = (a - b).pow(2).sum(-1).sqrt()
    return (same * d**2 + (1 - same) * torch.clamp(margin - d, min=0) ** 2).mean()


def radial_basis(distance: Tensor, centres: Tensor, width: float = 0.5) -> Tensor:
    return torch.exp(-(((distance.unsqueeze(-1) - centres) / width) ** 2))


def poincare_distance(u: Tensor, v: Tensor) -> Tensor:
    gap = (u - v).square().sum(-1)
    return torch.acosh(1 + 2 * gap / ((1 - u.square().sum(-1)) * (1 - v.square().sum(-1))))


def update_average(shadow: Tensor, value: Tensor, decay: float = 0.999) -> Tensor:
    return shadow.mul_(decay).add_(value, alpha=1 - decay)


def cosine_rate(step: Tensor, total: int, peak: float = 1e-3) -> Tensor:
    return 0.5 * peak * (1 + torch.cos(math.pi * torch.clamp(step / total, 0, 1)))


def bose_einstein(energy: Tensor, temperature: float) -> Tensor:
    return 1 / (torch.exp(energy / temperature) - 1)


def adam_direction(m: Tensor, v: Tensor, step: int, eps: float = 1e-8) -> Tensor:
    m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.999**step)
    return m_hat / (v_hat.sqrt() + eps)


def causal_bias(scores: Tensor) -> Tensor:
    above = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(above, float("-inf"))


def sinusoids(length: int, dim: int) -> Tensor:
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def softmax_one(scores: Tensor) -> Tensor:
    e = torch.exp(scores)
    return e / (1 + e.sum(dim=-1, keepdim=True))


def pseudo_huber(pred: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    return (delta**2 * (torch.sqrt(1 + ((pred - target) / delta) ** 2) - 1)).mean()


def squareplus(x: Tensor, b: float = 4.0) -> Tensor:
    return 0.5 * (x + torch.sqrt(x * x + b))


def pinball(pred: Tensor, target: Tensor, tau: float = 0.9) -> Tensor:
    error = target - pred
    return torch.max(tau * error, (tau - 1) * error).mean()


SPELT: dict[str, str] = {
    "bert_activation": "F.gelu", "UpcastGELU.forward": "F.gelu",
    "NewGELU.forward": "F.gelu tanh", "sigmoid_form_gelu": "F.gelu tanh",
    "Swish.forward": "F.silu", "swish": "F.silu", "Mish.forward": "F.mish", "mish_without_tanh": "F.mish",
    "stable_softplus": "F.softplus", "positive_scale": "F.softplus",
    "preference_log_odds": "F.logsigmoid", "log_gate": "F.logsigmoid",
    "squash": "torch.sigmoid", "gate_probability": "torch.sigmoid",
    "ELU.forward": "F.elu", "self_normalising": "F.selu",
    "HSwish.forward": "F.hardswish", "squeeze_excite_gate": "F.hardsigmoid",
    "lrelu": "F.leaky_relu", "leak_in_place": "F.leaky_relu",
    "MomentsLayerNorm.forward": "F.layer_norm", "LayerNorm2d.forward": "F.layer_norm", "grouped_norm": "F.layer_norm",
    "LlamaNorm.forward": "F.rms_norm", "query_key_norm": "F.rms_norm",
    "routing_weights": "torch.softmax", "class_probabilities": "torch.softmax", "attention_weights": "torch.softmax",
    "log_probabilities": "F.log_softmax", "token_loss": "F.log_softmax", "log_partition": "torch.logsumexp",
    "StableBCELoss.forward": "F.binary_cross_entropy_with_logits", "discriminator_loss": "F.binary_cross_entropy",
    "huber_td_error": "F.huber_loss", "BoxLoss.forward": "F.huber_loss", "FrozenBatchNorm2d.forward": "F.batch_norm",
}  # fmt: skip

ALIKE: tuple[str, ...] = (
    "gaussian_gated", "LearnableSwish.forward", "quick_gelu", "erf_unit", "keras_hard_sigmoid", "serf",
    "annotated_norm", "mean_abs_norm", "normalise_image", "whiten_advantages", "focal_loss", "contrastive_loss",
    "radial_basis", "poincare_distance", "update_average", "cosine_rate", "bose_einstein", "adam_direction",
    "causal_bias", "sinusoids", "softmax_one", "pseudo_huber", "squareplus", "pinball",
)  # fmt: skip
