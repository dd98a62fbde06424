"""Muon against torch's and against singular vectors; what AdamW takes; replicas that share the work."""

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim import muon
from shoestring.optim.muon import MuonAdamW, orthogonalized_all


def test_steps_have_the_singular_vectors_of_the_gradient_and_singular_values_near_one():
    chance = torch.Generator().manual_seed(0)
    shapes = [(8, 20), (20, 8), (8, 20), (6, 3, 2, 2), (5, 5)]
    tensors = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]
    for each, found in zip(tensors, orthogonalized_all(tensors, 5), strict=True):
        assert found.shape == each.shape
        u, _, v = torch.linalg.svd(each.flatten(1), full_matrices=False)
        values = torch.diagonal(u.T @ found.flatten(1) @ v.T)
        off = u.T @ found.flatten(1) @ v.T - values.diag()
        assert off.abs().max() < 1e-9
        assert values.min() > 0.5
        assert values.max() < 1.3


@pytest.mark.parametrize("match_adamw", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(match_adamw, nesterov, monkeypatch):
    """With torch's iteration in place of ours, which is in bf16 there."""
    from torch.optim._muon import _zeropower_via_newtonschulz as iteration

    monkeypatch.setattr(
        muon, "orthogonalized_all", lambda all_of, n: [iteration(e, muon.COEFFICIENTS, n, 1e-7).float() for e in all_of]
    )
    chance = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=chance) for shape in [(6, 9), (9, 6), (4, 4)]]
    ours, theirs = ([nn.Parameter(each.clone()) for each in starts] for _ in range(2))
    one = MuonAdamW([{"params": ours, "lr": 0.02}], nesterov=nesterov, match_adamw=match_adamw)
    adjust = "match_rms_adamw" if match_adamw else "original"
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=chance)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_rest_is_torchs_adamw():
    chance = torch.Generator().manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 4))] for _ in range(2))
    one = MuonAdamW([{"params": ours, "lr": 0.02, "muon": False}])
    other = torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=chance)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert all(map(torch.equal, ours, theirs))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.inner(self.embedding(tokens))))


def test_embeddings_heads_and_vectors_are_adamws():
    job = compose(Job(Net(), world=World()), [optim.Muon(lr=0.02, adamw_lr=0.003, weight_decay=0.1)])
    names = {id(parameter): name for name, parameter in attachments_of(job).module.named_parameters()}
    groups = {
        (group["muon"], group["lr"], group["weight_decay"]): {names[id(each)] for each in group["params"]}
        for group in job.optimizer.param_groups
    }
    assert groups == {
        (True, 0.02, 0.1): {"inner.weight"},
        (False, 0.003, 0.1): {"embedding.weight", "head.weight"},
        (False, 0.003, 0.0): {"inner.bias", "norm.weight", "norm.bias"},
    }
    job.close()


def test_a_model_of_embeddings_alone_is_refused():
    with pytest.raises(ConfigError, match="no matrix"):
        compose(Job(Net(), world=World()), [optim.Muon(adamw=("inner.*",))])
    with pytest.raises(ConfigError, match="iterations"):
        compose(Job(Net(), world=World()), [optim.Muon(iterations=0)])
