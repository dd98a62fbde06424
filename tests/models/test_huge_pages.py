"""Weights in huge pages: the same numbers in the same parameters, wherever they began."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring.decode.adapter import adapt
from shoestring.models import huge_pages, quantized
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.huge_pages import HUGE, settle


def gpt(bits=None, tied=True):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=512, dim=512, layers=2, heads=4, kv_heads=2, hidden=1408, context=32, tied=tied)
    model = GPT(config).eval()
    if bits:
        quantized.replace(model, quantized.choose(model, bits)[0], rounded=True)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_computes_the_same_and_holds_its_tensors_in_one_piece(bits, tied, monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "_POLICY", tmp_path / "enabled")
    huge_pages._POLICY.write_text("always [madvise] never\n")
    model = gpt(bits, tied)
    tokens, adapter = torch.arange(9)[None], adapt(model)

    def read():
        cache = adapter.new_cache(1, 20)
        return torch.cat([adapter.read(tokens, cache), adapter.read(tokens[:, :1], cache)], 1)

    before, objects = read(), dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count = settle(model)
    assert torch.equal(read(), before)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in objects.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    places = {tensor.untyped_storage().data_ptr() for tensor in after.values() if tensor.numel()}
    assert len(places) == 1 and count >= sum(tensor.nbytes for tensor in after.values())
    first = min(tensor.data_ptr() for tensor in after.values() if tensor.numel())
    assert first % HUGE == 0 and all(tensor.data_ptr() % 64 == 0 for tensor in after.values())


def test_tensors_that_others_see_too_stay_where_they_are():
    whole = torch.randn(3, 1 << 20)
    model = nn.Module()
    model.register_buffer("part", whole[1])
    model.register_buffer("transposed", torch.randn(2048, 512).T)
    model.register_parameter("own", nn.Parameter(torch.randn(1 << 20)))
    shared = torch.randn(1 << 20)
    model.register_parameter("one", nn.Parameter(shared))
    model.register_parameter("other", nn.Parameter(shared))
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("nothing", None)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    settle(model)
    moved = {name for name, tensor in model.state_dict().items() if tensor.data_ptr() != places[name]}
    assert (
        moved <= {"own"}
        and model.one.data_ptr() == model.other.data_ptr()
        and model.part.data_ptr() == whole[1].data_ptr()
    )


def test_small_models_and_systems_without_huge_pages_are_left_alone(monkeypatch, tmp_path):
    assert settle(nn.Linear(8, 8)) == 0
    policy = tmp_path / "enabled"
    for text in ("always madvise [never]\n", None):
        policy.write_text(text) if text else policy.unlink()
        monkeypatch.setattr(huge_pages, "_POLICY", policy)
        model = gpt()
        place = model.embed.weight.data_ptr()
        assert settle(model) == 0 and model.embed.weight.data_ptr() == place


@pytest.mark.skipif("[never]" in huge_pages._POLICY.read_text(), reason="the system has no huge pages")
def test_the_system_gives_huge_pages():
    model = nn.Linear(2048, 4096)  # 32 MiB
    assert settle(model) > 1 << 25
    address, size = model.weight.data_ptr(), 0
    for area in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        header = next(line for line in area.splitlines() if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0])
        first, end = (int(part, 16) for part in header.split(" ")[0].split("-"))
        if first <= address < end:
            size = int(area.split("AnonHugePages:")[1].split()[0])
    assert size >= 16 << 10
