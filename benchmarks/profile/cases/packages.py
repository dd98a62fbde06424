"""Changes to programs that use packages, and to packages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.profile.cases.case import Case, Step, rewritten, with_changes


def training(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Step:
    """A training step of a model of transformers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mamba() -> Step:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, state_size=8))
    ids = torch.randint(0, 200, (4, 96))
    return training(model, {"input_ids": ids, "labels": ids}, fused=True)


def mamba_after() -> Step:
    """States are taken apart and joined once, and read by one product in place of one for each position."""
    from transformers.models.mamba import modeling_mamba as module

    scan = rewritten(
        module,
        module.mamba_selective_scan,
        ("for index in range(seq_len):", "for decay, update in zip(discrete_A.unbind(2), deltaB_u.unbind(2)):"),
        ("discrete_A[:, :, index] * ssm_state + deltaB_u[:, :, index]", "torch.addcmul(update, decay, ssm_state)"),
        ("scan_output = torch.matmul(ssm_state.to(input_dtype), C[:, index, :].unsqueeze(-1))", "pass"),
        ("scan_outputs.append(scan_output[:, :, 0])", "scan_outputs.append(ssm_state)"),
        (
            "scan_output = torch.stack(scan_outputs, dim=-1)",
            "scan_output = (torch.stack(scan_outputs, dim=1) @ C.unsqueeze(-1)).squeeze(-1).transpose(1, 2)",
        ),
    )
    return with_changes(mamba(), module, mamba_selective_scan=scan)


def gpt2(activation: str, **options: Any) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000, n_embd=128, n_layer=4, n_head=4, activation_function=activation, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 1000, (4, 64))
    return training(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, **options)


def graph_convolutions(prepared: bool) -> Step:
    """A graph convolutional network on a citation graph; the edges are given as a list or as a sparse matrix."""
    from torch_geometric.nn import GCN

    torch.manual_seed(0)
    x, edges, y = torch.randn(3000, 64), torch.randint(0, 3000, (2, 15_000)), torch.randint(0, 7, (3000,))
    edges = edges[:, edges[0] != edges[1]]  # the package treats loops that are given differently in the two forms
    model = GCN(64, 64, 3, 7, dropout=0.5, cached=prepared)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    graph: Any = edges
    if prepared:
        ones = torch.ones(edges.shape[1])
        graph = torch.sparse_coo_tensor(edges.flip(0), ones, (3000, 3000)).coalesce().to_sparse_csr()

    def step() -> None:
        loss = F.cross_entropy(model(x, graph), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def diffusers_training(**options: Any) -> Step:
    """A noise predictor of diffusers in training, with the package's moving average of the weights."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler, average = DDPMScheduler(), EMAModel(model.parameters(), foreach="fused" in options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step() -> None:
        clean, times = torch.randn(4, 3, 16, 16), torch.randint(0, 1000, (4,))
        noise = torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, times)
        F.mse_loss(model(noisy, times).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())

    return step


CASES = [
    Case("transformers-mamba", mamba, mamba_after, steps=1),
    Case("transformers-gpt2", lambda: gpt2("gelu_new"), lambda: gpt2("gelu_pytorch_tanh", fused=True), steps=4),
    Case(
        "torch-geometric-gcn",
        lambda: graph_convolutions(False),
        lambda: graph_convolutions(True),
        steps=6,
        packages=("torch_geometric",),
    ),
    Case(
        "diffusers-unet", diffusers_training, lambda: diffusers_training(fused=True), steps=5, packages=("diffusers",)
    ),
]
