"""Compiled passes of rounded shapes: the texts are those of passes of exact shapes."""

import pytest
import torch

from benchmarks.decode import gpu
from shoestring.core.errors import ConfigError
from shoestring.decode import stopwatch
from shoestring.decode.adapter import OwnModel
from shoestring.decode.compiled import Compiled, choose_passes, rounded
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.decode.skipping.adapters import OnlineSkipping
from shoestring.models.gpt import GPT, GPTConfig


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 48}
    return GPT(GPTConfig(**shape, context=300, init_std=0.3)).double()


def texts(adapter, slots, **options):
    engine = Engine(adapter, slots=slots, chunk=20, **options)
    numbers = torch.Generator().manual_seed(0)
    rows = [
        engine.submit(
            Request(
                tokens=torch.randint(50, (length,), generator=numbers).tolist(),
                max_new=12,
                sampling=Sampling(temperature=index % 2, seed=index),
            )
        )
        for index, length in enumerate((3, 40, 250))
    ]
    while engine.busy:
        engine.step()
    return [row.text for row in rows]


@pytest.mark.slow
def test_texts_are_those_of_the_model_that_is_not_compiled_and_few_shapes_are_compiled(model):
    seen = []

    def count(graph, _):
        seen.append(graph)
        return graph.forward

    compiled = Compiled(model, 300, backend=count)
    assert texts(compiled, 3) == texts(model, 3)
    # Rows 1, 2 and 3 (all of them), 1 to 16 tokens, 256 or all 300 positions.
    assert 1 <= len(seen) <= 3 * 5 * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_compiles_where_a_plain_one_takes_the_native_attention(dtype):
    shape = {"vocab_size": 50, "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 48}
    adapter = Compiled(GPT(GPTConfig(**shape, context=64)).to(dtype), 64, backend="eager")
    cache = adapter.new_cache(1, 64)
    for count in (20, 1):
        assert adapter.read(torch.arange(count)[None], cache).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "length", "backend"), [(3, 3, None), (3, 0, None), (1, 3, "eager")])
def test_texts_with_drafts_through_passes_of_rounded_shapes_are_those_of_plain_decoding(model, slots, length, backend):
    """The drafter's passes are compiled as well: it shares the model's embedding, and so agrees with it at times."""
    torch.manual_seed(2)
    small = GPT(model.config).double()
    small.load_state_dict({name: 0.97 * weight for name, weight in model.state_dict().items()})
    speculation = Speculation(draft_length=length)
    drafter = ModelDrafter(Compiled(small, 300, backend=backend), slots, speculation)
    compiled = Compiled(model, 300, backend=backend)
    assert texts(compiled, slots, drafter=drafter, speculation=speculation) == texts(model, slots)
    assert len(compiled._passes) == len(drafter.model._passes) == 1  # both went through them


@pytest.mark.slow
def test_the_time_that_compiling_takes_is_no_cost_of_a_pass(model, monkeypatch):
    """Otherwise the first round with drafts would look a thousand times slower than it is."""
    now = 0.0
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: now)

    def slow(graph, _):
        nonlocal now
        now += 100.0
        return graph.forward

    speculation = Speculation(draft_length=2)
    drafter = ModelDrafter(Compiled(model, 300, backend=slow), 1, speculation)
    engine = Engine(Compiled(model, 300, backend=slow), drafter=drafter, speculation=speculation)
    engine.submit(Request(tokens=[1, 2, 3], max_new=9, sampling=Sampling(temperature=0)))
    while engine.busy:
        engine.step()
    assert now >= 300
    assert {rounds.drafting + rounds.reading for rounds in engine.speculator.rounds.values()} == {0.0}


def test_passes_are_plain_unless_a_gpu_or_the_user_says_otherwise(model):
    assert type(choose_passes(model, None, "auto")) is type(choose_passes(model, 100, "plain")) is OwnModel
    compiled = choose_passes(model, 100, "compiled")
    assert isinstance(compiled, Compiled) and compiled.context == 100
    with pytest.raises(ConfigError, match="a CPU has no CUDA graphs"):
        choose_passes(model, None, "graphs")
    with pytest.raises(ConfigError, match="passes of Embedding cannot be compiled"):
        choose_passes(torch.nn.Embedding(9, 9), 8, "compiled")


@pytest.mark.slow
def test_the_bar_for_speculation_on_a_gpu_runs_in_a_small_size(monkeypatch):
    """So that it works at first try where there is a GPU: the pair, its ε, and the two ways to generate."""
    for name, few in (("TRIALS", 4), ("TEXTS", 2), ("PROMPT", 8)):
        monkeypatch.setattr(gpu, name, few)
    torch.manual_seed(0)
    shape = gpu.SHAPE | {"vocab_size": 40, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48}
    target = GPT(GPTConfig(**(shape | {"context": 80}), init_std=0.3)).eval()
    draft = gpu.first_blocks(target)
    assert draft.head is target.head and [*draft.blocks] == [*target.blocks][:2]
    written = [block.mlp.down.weight.detach().clone() for block in target.blocks]
    measured = gpu.speedup(
        Compiled(target, 80, backend=None), lambda draft: Compiled(draft, 80, backend=None), new=20, rounds=6
    )
    scales = [block.mlp.down.weight.detach() / before for block, before in zip(target.blocks, written, strict=True)]
    epsilon = float(scales[2].mean())
    assert [float(scale.mean()) for scale in scales] == pytest.approx([1, 1, epsilon, epsilon], rel=1e-5)
    assert measured.value > 0 and "texts the same" in measured.note
    share = float(measured.note.split(" of the tried tokens")[0].split()[-1])
    assert 0.5 < share < 1 and 0 < epsilon < 2


@pytest.mark.slow
def test_what_padding_writes_is_never_seen(model):
    compiled = Compiled(model, 300, backend="eager")
    tokens = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = compiled.new_cache(3, 24)
    compiled.read(tokens[:1, :20], cache, rows=slice(0, 1))
    compiled.read(tokens[1:, :9], cache, rows=slice(2, 3))
    got = compiled.read(tokens[:1, 20:23], cache, rows=slice(0, 1))  # writes padding to rows 0, 1 and 2
    torch.testing.assert_close(got, model(tokens[:1, :23])[:, 20:], rtol=0, atol=1e-12)
    got = compiled.read(tokens[1:, 9:14], cache, rows=slice(2, 3))
    torch.testing.assert_close(got, model(tokens[1:, :14])[:, 9:], rtol=0, atol=1e-12)
    got = compiled.read(tokens[:1, 23:24], cache, rows=slice(0, 1), wanted="last")
    torch.testing.assert_close(got, model(tokens[:1, :24])[:, 23:], rtol=0, atol=1e-12)


def test_rounding():
    assert [rounded(n) for n in (0, 1, 2, 3, 4, 5, 16, 17)] == [1, 1, 2, 4, 4, 8, 16, 32]


def test_a_compiled_model_skips_nothing_and_says_so(model):
    compiled = Compiled(model, 300, backend="eager")
    with pytest.raises(ConfigError, match="a compiled model cannot skip sublayers"):
        Engine(compiled, drafter=SkippingDrafter(Speculation(draft="skip")))
    with pytest.raises(ConfigError, match="a compiled model cannot skip sublayers"):
        OnlineSkipping(compiled, 0.2, 100)
