"""Exports keep what lay beside the model that they are made from, and switch back what training switched."""

import json

import pytest

from shoestring.cli import main
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models import adapter_folder
from shoestring.models.description import describe_model
from shoestring.models.loading import load_model
from shoestring.verbs.interchange import export
from shoestring.verbs.prune import prune
from shoestring.verbs.quantize import quantize
from shoestring.verbs.settings import OneShotPruning, Quantization
from tests.small_runs import write_texts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 256, "pad_token_id": 3,
}  # fmt: skip
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
BESIDE = {
    "LICENSE": "mine", "README.md": "# model", "preprocessor_config.json": "{}", "merges.txt": "a b",
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
}  # fmt: skip
GENERATIONS = {
    "ends and sampling": {"eos_token_id": [256, 5, 7], "bos_token_id": 256, "pad_token_id": 3, **SAMPLING},
    "sampling alone": SAMPLING,
    "none": None,
}
"""Contents of generation_config.json; where it names no ends, config.json does."""
KINDS = ("full", "lora", "adapters", "checkpoint, hf", "checkpoint, safetensors", "8 bits", "pruned", "packed")
SWITCHED = {"architectures", "dtype", "torch_dtype", "transformers_version", "shoestring"}


def base_of(folder, kind, generation):
    ends = 256 if generation and "eos_token_id" in generation else [256, 5, 7]
    config = transformers.AutoConfig.for_model(kind, **SIZES, eos_token_id=ends)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    byte_tokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "extra": 1}))
    for name, content in BESIDE.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of base models, and the names by which they are opened."""
    made = {}
    for opened, kind, prefix in (("a folder of llama", "llama", ""), ("hf: of qwen3", "qwen3", "hf:")):
        for name, generation in GENERATIONS.items():
            base = base_of(tmp_path_factory.mktemp("base"), kind, generation)
            made[opened, name] = base, f"{prefix}{base}"
    return made


def trained(root, model, how):
    tables = {"full": "", "lora": "[memory.lora]\nrank = 2\n", "adapters": "[memory.lora]\nrank = 2\nmerge = false\n"}
    (root / "run.toml").write_text(
        f'[run]\nmodel = "{model}"\ndata = "{write_texts(root / "texts")}"\nsteps = 1\nbatch = 4\n'
        f'[data]\ntokenizer = "model"\nsequence = 16\nheld_out = 0.3\n[checkpoint.plain]\nevery = 1\n{tables[how]}'
    )
    assert main(["train", str(root / "run.toml"), "--folder", str(root / "run")]) == 0
    return root / "run"


def exported(root, base, model, kind):
    """The folder of an export of a kind; exports of checkpoints share a run."""
    if kind in ("full", "lora"):
        return trained(root, model, kind) / "model"
    if kind == "adapters":
        return trained(root, model, kind) / "model" / adapter_folder.FOLDER
    out = root / "out"
    if kind.startswith("checkpoint"):
        run = base.with_name(f"{base.name}-run")
        run.mkdir(exist_ok=True)
        export(run / "run" if (run / "run").exists() else trained(run, model, "full"), out, format=kind.split(", ")[1])
    elif kind == "8 bits":
        quantize(model, out, Quantization())
    else:
        prune(model, out, OneShotPruning(format="packed" if kind == "packed" else "dense"))
    return out


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("opened", ["a folder of llama", "hf: of qwen3"])
def test_an_export_keeps_what_lay_beside(bases, tmp_path, opened, generation, kind):
    base, model = bases[opened, generation]
    out = exported(tmp_path, base, model, kind)
    for name, content in BESIDE.items():
        assert (out / name).read_text() == content, name
    assert json.loads((out / "tokenizer_config.json").read_text())["extra"] == 1
    built, tokenizer = load_model(out)
    before, after = describe_model(base, tokenizer), describe_model(out, tokenizer, built)
    assert before.ends == after.ends == (256, 5, 7)
    assert before.sampling == after.sampling
    if GENERATIONS[generation] is not None:
        assert json.loads((out / "generation_config.json").read_text()).items() >= GENERATIONS[generation].items()
    if kind != "adapters":
        config, original = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
        changed = {name for name in original if name in config and config[name] != original[name]}
        assert changed <= SWITCHED
        if (out / "generation_config.json").exists():
            assert "use_cache" not in json.loads((out / "generation_config.json").read_text())
