"""Adapters in every mode of their settings: when inputs drop out, and by what the adapter is scaled."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.memory import LoRA
from shoestring.memory.adapters.leaving import gather_adapters
from shoestring.models.adapters import adapters_in, matrix


class Blocks(nn.Module):
    """Residual blocks of a model that LoRA adapts by default."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def filled(**settings):
    """A job whose adapters are not zero."""
    job = compose(Job(Blocks(), world=World()), [LoRA(**settings)])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in attachments_of(job).module.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 8)
    return job


BASES = [{}, {"base_bits": 16}, {"base_bits": 8}, {"base_bits": 4}]


@pytest.mark.parametrize("settings", [*BASES, {"dora": True}, {"dora": True, "base_bits": 8}], ids=str)
def test_dropout_follows_the_mode_and_not_whether_gradients_are_recorded(settings):
    with filled(rank=4, dropout=0.5, **settings) as job:
        net = attachments_of(job).module
        x = torch.randn(8, 64, dtype=torch.bfloat16 if settings.get("base_bits") == 16 else torch.float32)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                assert torch.equal(net.eval()(x), net(x))
                assert not torch.equal(net.train()(x), net(x))
        net.blocks[0].eval()
        assert torch.equal(net.blocks[0](x), net.blocks[0](x))
        net.blocks[0][0].train()
        assert not torch.equal(net.blocks[0](x), net.blocks[0](x))
        job.evaluate([])
        assert not torch.equal(net.blocks[1](x), net.blocks[1](x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_recomputed_blocks_drop_out_the_same(reentrant, bits):
    with filled(rank=4, dropout=0.5, base_bits=bits) as job:
        block, seen = attachments_of(job).module.blocks[0], []
        x = torch.randn(8, 64, requires_grad=True)
        hook = block[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        hook.remove()
        assert len(seen) == 2 and torch.equal(*seen)
        gradients = []
        for compute in (block, partial(checkpoint, block, use_reentrant=reentrant)):
            torch.manual_seed(3)
            x.grad = None
            block.zero_grad()
            compute(x).square().sum().backward()
            gradients.append([x.grad, *(each.grad.clone() for each in block.parameters() if each.requires_grad)])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("settings", [*BASES, {"dora": True}, {"dora": True, "base_bits": 4}], ids=str)
def test_the_adapter_is_scaled_by_alpha_over_rank_in_every_mode(rank, settings, tmp_path):
    """As it is computed, as it is merged, and as it is read again from PEFT's format."""
    with filled(rank=rank, alpha=6.0, **settings) as job:
        layer = attachments_of(job).module.blocks[0][0]
        weight, a, b = (each.detach().double() for each in (matrix(layer), layer.lora_A, layer.lora_B))
        whole = weight + 6.0 / rank * b @ a
        if settings.get("dora"):
            whole *= (layer.lora_magnitude.detach().double() / whole.norm(dim=1))[:, None]
        x = torch.randn(5, 64, dtype=layer.lora_A.dtype if settings.get("base_bits") != 16 else torch.bfloat16)
        wanted = x.double() @ whole.T + layer.bias.detach().double()
        tolerance = 0.05 if settings.get("base_bits") == 16 else 1e-3
        torch.testing.assert_close(layer(x).detach().double(), wanted, atol=tolerance, rtol=tolerance)
        scales = job.kept["memory.lora"].state.scales
        assert set(scales.values()) == {6.0 / rank}
        merged = adapters_in(dict(attachments_of(job).module.named_parameters()), scales)["blocks.0.0"].merged(
            weight.float()
        )
        torch.testing.assert_close(merged.double(), whole, atol=1e-5, rtol=1e-5)
        gather_adapters(attachments_of(job), "memory.lora", "", 0.0)(tmp_path)
    if not settings.get("base_bits"):
        with compose(Job(Blocks(), world=World()), [LoRA(adapter=str(tmp_path / "adapter"))]) as again:
            torch.testing.assert_close(
                attachments_of(again).module.blocks[0][0](x).double(), wanted, atol=tolerance, rtol=tolerance
            )
