"""Texts with unlike adapters in one batch: each is what the model with that adapter merged writes, and what is cached
for one is never read for another."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.decode.adapted import AdaptedRows
from shoestring.decode.adapter import OwnCached, Whole, adapt
from shoestring.decode.compiled import Compiled
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine, Request, generate
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.models import adapter_folder, quantized
from shoestring.models.adapters import LowRank, merge
from shoestring.models.adapters_by_row import place
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from tests.decode.small_adapters import drawn, save_adapter, save_base

SHAPE = GPTConfig(vocab_size=60, dim=32, layers=2, heads=4, kv_heads=2, hidden=64, context=96, init_std=0.3, tied=False)
PROMPTS = [[7 * number % 60, 3, 5, number % 60, 11] for number in range(10)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base in double precision, and eight adapters."""
    home = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    model = GPT(SHAPE).double().eval()
    base = save_base(model, None, home / "base")
    return base, [save_adapter(model, home / f"adapter-{number}", base, number) for number in range(8)]


def texts(engine, requests):
    rows = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    engine.close()
    assert [row.error for row in rows] == [None] * len(rows)
    assert engine.cache.adapters == [None] * engine.cache.rows
    return [row.text for row in rows]


def alone(model, request):
    """The text that a model writes."""
    return list(generate(model, request.tokens, max_new=request.max_new, sampling=request.sampling, context=96))


def requests_for(adapters, count=12, **options):
    return [
        Request(tokens=prompt, max_new=count, sampling=Sampling(seed=seed, temperature=0.8), adapter=adapter, **options)
        for seed, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
    ]


@pytest.mark.parametrize("draft", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("lookup", "skip"))])
def test_eight_adapters_in_a_batch_write_what_each_merged_model_writes(folders, draft):
    base, adapters = folders
    model, _ = load_model(base)
    rows = AdaptedRows(adapt(model))
    loaded = [None, *map(rows.load, adapters), None]
    speculation = Speculation(draft_length=3)
    drafter = {None: None, "lookup": PromptLookup(), "skip": SkippingDrafter(speculation)}[draft]
    requests = requests_for(loaded)
    written = texts(Engine(rows, slots=10, chunk=3, drafter=drafter, speculation=speculation), requests)
    merged = [model, *(load_model(folder)[0] for folder in adapters), model]
    assert written == [alone(*pair) for pair in zip(merged, requests, strict=True)]
    plain = [dataclasses.replace(request, adapter=None) for request in requests]
    changed = sum(text != alone(model, request) for text, request in zip(written, plain, strict=True))
    assert changed == 8


def test_rows_of_the_base_have_the_bits_of_a_batch_without_adapters(folders):
    base, adapters = folders
    model = load_model(base)[0].float()
    rows, tokens = AdaptedRows(adapt(model)), torch.tensor(PROMPTS[:5])
    caches = [rows.new_cache(5, 20) for _ in range(2)]
    for row, folder in ((1, adapters[0]), (3, adapters[6])):
        rows.assign(caches[0], row, rows.load(folder))
    for _ in range(3):
        with_adapters, without = (rows.read(tokens, cache) for cache in caches)
        assert torch.equal(with_adapters[[0, 2, 4]], without[[0, 2, 4]])
        assert not torch.equal(with_adapters[[1, 3]], without[[1, 3]])
        tokens = tokens[:, :1]


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_over_a_rounded_base_are_those_over_its_dequantised_weights(folders, bits):
    """In double precision, rounded layers dequantise for each product; hashes are of the weights before rounding."""
    base, _ = folders
    model, _ = load_model(base)
    folder = save_adapter(
        model, base.parent / f"with-hash-{bits}", base, 1, adapter_folder.fingerprint_of(model, drawn(model, 1))
    )
    quantized.replace(model, dict.fromkeys(drawn(model, 1), bits), rounded=True)
    assert quantized.quantized(model)
    rows = AdaptedRows(adapt(model))
    loaded = [None, *[rows.load(folder), None] * 4, rows.load(folder)]
    dense, _ = load_model(base)
    for name in quantized.quantized(model):
        dense.get_submodule(name).weight.data = model.get_submodule(name).dense(torch.float64)
    requests = requests_for(loaded)
    written = texts(Engine(rows, slots=10), requests)
    merged, _ = load_model(base)
    merged.load_state_dict(dense.state_dict())
    merge(merged, adapter_folder.read(folder, model).layers)
    assert written == [
        alone(dense if adapter is None else merged, request) for adapter, request in zip(loaded, requests, strict=True)
    ]


def test_nothing_that_was_cached_for_one_adapter_is_read_for_another(folders):
    base, adapters = folders
    model, _ = load_model(base)
    rows = AdaptedRows(adapt(model))
    first, again, second = rows.load(adapters[0]), rows.load(adapters[0]), rows.load(adapters[1])
    prompt = list(range(40))
    for slots in (1, 4):
        engine = Engine(rows, slots=slots)
        reused = []
        for adapter in (None, None, first, first, again, second, None):
            row = engine.submit(Request(tokens=prompt, max_new=2, sampling=Sampling(temperature=0), adapter=adapter))
            while engine.busy:
                engine.step()
            reused.append(row.reused)
        assert reused == [0, 39, 0, 39, 0, 0, 39 if slots == 4 else 0]
        engine.close()


@pytest.mark.slow
def test_folders_of_peft_with_a_root_scale_and_unlike_layers_over_a_model_of_transformers(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, attention_bias=True,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).double()
    plain.save_pretrained(tmp_path / "base")
    settings = [
        {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        {"r": 16, "lora_alpha": 3, "target_modules": ["o_proj", "down_proj", "lm_head"]},
        {"r": 2, "rank_pattern": {"k_proj": 5}, "target_modules": ["k_proj", "gate_proj"]},
    ]
    for number, options in enumerate(settings):
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**options))
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.4)
        peft.save_pretrained(tmp_path / f"adapter-{number}", save_embedding_layers=False)
    model = load_model(tmp_path / "base")[0].double()
    rows = AdaptedRows(adapt(model))
    loaded = [rows.load(tmp_path / f"adapter-{number}") for number in range(3)]
    requests = requests_for([*loaded, None] * 2 + [None, loaded[0]])
    written = texts(Engine(rows, slots=5), requests)
    for request, text in zip(requests, written, strict=True):
        one = load_model(tmp_path / "base")[0].double()
        if request.adapter is not None:
            folder = tmp_path / f"adapter-{loaded.index(request.adapter)}"
            merge(one, adapter_folder.read(folder, one).layers)
        assert text == alone(one, request)


@pytest.mark.parametrize("kind", ["whole", "apart", pytest.param("own cache", marks=pytest.mark.slow)])
def test_models_that_read_each_text_by_itself_have_adapters_as_well(kind):
    torch.manual_seed(0)
    if kind == "own cache":
        model = (
            RwkvForCausalLM(RwkvConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, context_length=96))
            .double()
            .eval()
        )
        inner = adapt(model, 96)
        assert isinstance(inner, OwnCached)
    else:
        model = GPT(SHAPE).double().eval()
        inner = Whole(model, 96, apart=kind == "apart")
    rows = AdaptedRows(inner)
    name, site = next(iter(rows.layers.items()))
    shape = site.layer.weight.shape
    low = {name: LowRank(torch.randn(3, shape[1]), torch.randn(shape[0], 3), 0.3)}
    requests = requests_for([None, place(low, rows.layers, "it")] * 5, count=4)
    written = texts(Engine(rows, slots=3), requests)
    plain = [dataclasses.replace(request, adapter=None) for request in requests]
    assert written[::2] == [alone(model, request) for request in plain[::2]]
    merge(model, low)
    assert written[1::2] == [alone(model, request) for request in plain[1::2]]


def test_what_does_not_go_together_is_refused(folders, tmp_path):
    base, adapters = folders
    model, _ = load_model(base)
    with pytest.raises(ConfigError, match="captured or compiled"):
        AdaptedRows(Compiled(model, 96, backend="eager"))
    rows = AdaptedRows(adapt(model))
    with pytest.raises(ConfigError, match="not prepared"):
        adapt(model).assign(rows.new_cache(1, 8), 0, rows.load(adapters[0]))
    engine = Engine(adapt(model))
    row = engine.submit(Request(tokens=[1], max_new=1, adapter=rows.load(adapters[0])))
    engine.step()
    assert row.ending == "failed"
    torch.manual_seed(0)
    wider = GPT(dataclasses.replace(SHAPE, hidden=96)).double()
    with pytest.raises(CheckpointError, match="another model"):
        AdaptedRows(adapt(wider)).load(adapters[0])
    hashed = save_adapter(model, tmp_path / "hashed", base, 2, adapter_folder.fingerprint_of(model, drawn(model, 2)))
    AdaptedRows(adapt(model)).load(hashed)
    torch.manual_seed(1)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        AdaptedRows(adapt(GPT(SHAPE).double())).load(hashed)
