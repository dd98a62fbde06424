"""The predicted peak against that of the same step, traced."""

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring import memory, optim, precision
from shoestring._torch import fake_tensors
from shoestring.cli import main
from shoestring.core.task import cross_entropy
from shoestring.memory.predicted import predict
from shoestring.models.gpt import tiny
from shoestring.testing import Pool
from shoestring.testing.held_resources import fresh_garbage
from tests.memory.observed import needs_compiler
from tests.memory.predicted_ranks import SHARED, batches, step_on_ranks
from tests.small_runs import write_run_file, write_texts

pytestmark = needs_compiler
FEATURES = {
    "adamw": [optim.AdamW()],
    "sgd": [optim.SGD(lr=0.1, momentum=0.0, nesterov=False)],
    "recompute": [optim.AdamW(), memory.Recompute(every_nth=2)],
    "native": [optim.LAMB(), memory.ChunkedLoss()],  # its loops in C must not see fake tensors
    "autocast": [optim.AdamW(), precision.Autocast(dtype="bf16")],
}


def outline(**shape):
    with torch.device("meta"):
        return tiny(vocab_size=512, **shape)


def measured(features, rows, tokens, accumulate):
    with fresh_garbage():
        job = ss.Job(tiny(vocab_size=512))
        with memory.traced() as traced, job, ss.compose(job, features):
            for _ in range(2):
                job.step(*batches(rows, tokens, accumulate))
    window = traced.profile.main
    return window.peak - window.by_kind().get("unnamed", 0)  # left by other tests


@pytest.mark.parametrize(("name", "accumulate"), [(name, 1) for name in FEATURES] + [("adamw", 3), ("recompute", 2)])
def test_the_prediction_is_the_peak(name, accumulate):
    predicted = predict(outline(), FEATURES[name], cross_entropy, (3, 48), ranks=1, accumulate=accumulate)
    peak = measured(FEATURES[name], 3, 48, accumulate)
    assert predicted.peak == pytest.approx(peak, rel=0.01), (predicted.window.by_kind(), name)


@pytest.mark.slow
def test_what_the_recipe_for_fine_tuning_takes_is_predicted_for_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    features = [memory.LoRA(rank=8), memory.Recompute(), memory.ChunkedLoss(), optim.AdamW()]
    held = predict(model, features, cross_entropy, (3, 48), ranks=1).window.by_kind()
    assert held["optimizer state"] < held["parameter"] < 2 * sum(each.nbytes for each in model.parameters())


def test_tied_parameters_count_once_and_kinds_are_told():
    model = outline()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    held = predict(model, FEATURES["adamw"], cross_entropy, (2, 16), ranks=1).window.by_kind()
    assert held["parameter"] == weights
    assert held["optimizer state"] == pytest.approx(2 * weights, rel=0.01)


def test_a_mutant_without_the_backward_pass_would_be_found(monkeypatch):
    whole = predict(outline(), FEATURES["adamw"], cross_entropy, (3, 48), ranks=1).peak
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    without = predict(outline(), FEATURES["adamw"], cross_entropy, (3, 48), ranks=1).peak
    assert without != pytest.approx(whole, rel=0.01)


@pytest.fixture(scope="module")
def pool():
    """Ranks in which no other test has left anything."""
    with Pool(2, timeout=100) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SHARED)
def test_the_prediction_is_the_peak_of_two_ranks(pool, name, accumulate, tmp_path):
    features = [SHARED[name], optim.AdamW()]
    predicted = predict(outline(), features, cross_entropy, (3, 48), ranks=2, accumulate=accumulate)
    pool.call(step_on_ranks, name=name, folder=str(tmp_path), accumulate=accumulate)
    peak = memory.load(tmp_path / "memory.npz").main.peak
    # The thread that ends FSDP2's collectives lets go of their buffers when it comes to it: at the worst moment the
    # gradients of one layer, and a rank's share of them, are held longer than the step's own thread holds them.
    layer = sum(parameter.nbytes for parameter in outline().blocks[0].parameters())
    late = layer + layer // 2 if name == "fsdp" else 0
    assert 0.99 * predicted.peak <= peak <= 1.01 * predicted.peak + late
    assert not torch.distributed.is_initialized()


def test_check_says_what_does_not_fit_and_what_to_change(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shoestring.verbs.check.free_memory", lambda: 1e5)
    tables = {"run": {"steps": 3, "data": write_texts(tmp_path / "texts")}, "optim": {"adamw": {}}}
    path = write_run_file(tmp_path / "run.toml", tables)
    assert main(["check", str(path), "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "sum for a rank: " in said and "it does not fit into this host's free memory" in said
    assert "most is " in said


class NeedsNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(8, 8)

    def forward(self, tokens):
        return self.layer(tokens.numpy())


def test_a_model_that_needs_numbers_is_not_predicted(tmp_path, capsys):
    tables = {
        "run": {"steps": 3, "data": write_texts(tmp_path / "texts"), "model": f"{__name__}:NeedsNumbers"},
        "model": dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden")),
    }
    path = str(write_run_file(tmp_path / "run.toml", tables))
    assert main(["trust", path]) == 0
    assert main(["check", path]) == 0
    assert "memory: not predicted (" in capsys.readouterr().out


def test_native_code_gets_no_address_of_a_fake_tensor():
    with fake_tensors():
        tensor = torch.zeros(4)
        with pytest.raises(RuntimeError, match=r"(?i)fake"):
            tensor.data_ptr()
