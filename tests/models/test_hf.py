"""Models of transformers: trained by name, exported so that transformers computes the same, refused in one line."""

import json
import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoestring.cli import main
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.world import World
from shoestring.data.tokenizer import byte_tokenizer, train_bpe
from shoestring.models import hf, saving
from shoestring.models.loading import build_model, load_model, open_model
from shoestring.models.saving import save_model
from shoestring.naming import TrustError
from shoestring.run import load
from shoestring.testing.pool import Pool
from shoestring.training.data_loading import tokenizer_of
from shoestring.training.loop import train

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 270,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=270, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=256, eos_token_id=256
    ),
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 32,
    "chat_template": TEMPLATE,
}


def write(folder, kind, tokenizer=True):
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    return {kind: write(root / kind, kind) for kind in CONFIGS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text {number}: " + "the quick brown fox jumps over the lazy dog. " * 4)
    return str(folder / "*.txt")


def run_file(folder, source, corpus, **tables):
    run = {
        "model": f"hf:{source}",
        "data": corpus,
        "steps": 3,
        "batch": 4,
        "prompts": ["a"],
        "folder": str(folder / "run"),
    }
    document = {"run": run, "data": {"tokenizer": "model", "sequence": 16, "held_out": 0.3}} | tables
    lines = []
    for table, values in document.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def tokens():
    return torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


def reloaded(folder):
    """As any user of transformers loads it, with nothing missing."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return model


def test_a_switch_that_a_model_turns_off_in_its_first_call_is_on_in_its_export(pretrained, tmp_path):
    source = shutil.copytree(pretrained["llama"], tmp_path / "source")
    written = json.loads((source / "config.json").read_text()) | {"use_kernels_of_a_gpu": True}
    (source / "config.json").write_text(json.dumps(written))
    model = hf.build(str(source), {}, {})
    model.register_forward_hook(lambda module, *_: setattr(module.config, "use_kernels_of_a_gpu", False))
    logits(model)
    (tmp_path / "saved").mkdir()
    hf.save(model, tmp_path / "saved", {})
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["use_kernels_of_a_gpu"] is True and saved["use_cache"] is True


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_trained_exported_and_generates(kind, pretrained, corpus, tmp_path, capsys):
    source, run = shutil.copytree(pretrained[kind], tmp_path / "source"), tmp_path / "run"
    file = run_file(tmp_path, source, corpus)
    assert main(["check", str(file)]) == 0
    assert "activations of a rank for 4 samples" in capsys.readouterr().out
    assert main(["train", str(file)]) == 0
    trained = reloaded(run / "model")
    assert (logits(trained) - logits(reloaded(pretrained[kind]))).abs().max() > 1e-3  # the starting weights moved
    ours, _ = load_model(run)
    assert type(ours) is type(trained) and torch.equal(logits(ours), logits(trained))
    assert trained.config.use_cache == reloaded(pretrained[kind]).config.use_cache

    shutil.rmtree(run / "model")  # as in a run that was killed; and then it moves, and what it began with is gone
    shutil.rmtree(source)
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    for way in ("hf", "safetensors"):
        out = tmp_path / way
        assert main(["checkpoint", "export", str(moved), "--to", str(out), "--as", way]) == 0
        assert torch.equal(logits(reloaded(out)), logits(trained))
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
        assert type(load_model(out)[0]) is type(trained)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "hf"), "--prompt", "the ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    assert main(["generate", f"hf:{pretrained[kind]}", "--prompt", "the ", "--tokens", "5"]) == 0


def test_training_begins_with_the_weights_of_the_folder(pretrained):
    built = build_model(f"hf:{pretrained['llama']}", {}, {"vocab_size": 257, "context": 16}, seed=5)
    assert torch.equal(logits(built), logits(reloaded(pretrained["llama"])))
    assert next(built.parameters()).dtype == torch.float32
    assert built(tokens()).past_key_values is None  # recomputing a layer would add to it again
    half = build_model(f"hf:{pretrained['llama']}", {"dtype": "bfloat16", "attention_dropout": 0.5}, {})
    assert next(half.parameters()).dtype == torch.bfloat16 and half.config.attention_dropout == 0.5


def sharded(source, folder):
    run = load(source, ["--parallel.fsdp", "{}", "--folder", folder])
    import torch.distributed as dist

    result = train(run, World(rank=dist.get_rank(), size=2, local_rank=dist.get_rank(), local_size=2))
    return result.status


@pytest.mark.slow
def test_a_sharded_model_with_tied_weights_is_exported_whole(pretrained, corpus, tmp_path):
    file = run_file(tmp_path, pretrained["qwen"], corpus)
    with Pool(2, timeout=120) as pool:
        assert pool.call(sharded, source=str(file), folder=str(tmp_path / "two")) == ["finished"] * 2
    assert main(["train", str(file)]) == 0
    one, two = (reloaded(tmp_path / name / "model") for name in ("run", "two"))
    assert (logits(one) - logits(two)).abs().max() < 1e-4
    assert two.lm_head.weight is two.model.embed_tokens.weight


@pytest.mark.slow
def test_recomputing_layers_changes_nothing(pretrained, corpus, tmp_path):
    for name, tables in (("plain", {}), ("recompute", {"memory.recompute": {}})):
        (tmp_path / name).mkdir()
        assert main(["train", str(run_file(tmp_path / name, pretrained["llama"], corpus, **tables))]) == 0
    plain, again = (reloaded(tmp_path / name / "run/model") for name in ("plain", "recompute"))
    assert torch.equal(logits(plain), logits(again))


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_takes_its_chat_template_and_special_tokens_along(pretrained, corpus, tmp_path):
    """Also with our GPT, and where the template is a file of its own."""
    source = shutil.copytree(pretrained["llama"], tmp_path / "source")
    (source / "chat_template.jinja").write_text(TEMPLATE.upper())
    shape = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}
    data = {"tokenizer": str(source / "tokenizer.json"), "sequence": 16, "held_out": 0.3}
    file = run_file(tmp_path, "", corpus, model=shape, data=data)
    assert main(["train", str(file), "--model", "shoestring.models.gpt:tiny"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 256)
    assert tokenizer.chat_template == TEMPLATE.upper()


def test_transformers_encodes_as_the_tokenizer_that_was_trained_here(tmp_path):
    trained = train_bpe(["hello world, hello tokenizers\n" * 20], 280)
    shape = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}
    model = build_model("shoestring.models.gpt:tiny", shape, {"vocab_size": 280, "context": 16})
    save_model(model, trained, tmp_path, {"model": "", "arguments": {}, "offered": {"context": 16}})
    theirs, text = transformers.AutoTokenizer.from_pretrained(tmp_path), "Hello  wörld,\n hello"
    assert theirs.encode(text) == trained.encode(text) and theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (trained.end_of_text, 16)
    assert reloaded(tmp_path).generation_config.eos_token_id == trained.end_of_text


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        ("hf:{llama}", "bpe", "was made with another tokenizer"),
        ("hf:{llama}", "bytes", "was made with another tokenizer"),
        ("hf:{llama}", "{other}", "was made with another tokenizer"),
        ("hf:{llama}", "{llama}/tokenizer.json", None),
        ("hf:{llama}", "model", None),
        ("hf:{bare}", "model", "has no tokenizer.json"),
        ("hf:{bare}", "bytes", None),
        ("shoestring.models.gpt:tiny", "model", "has no tokenizer of its own"),
    ],
)
def test_a_model_is_given_its_own_tokens_only(model, tokenizer, message, pretrained, corpus, tmp_path):
    train_bpe(["another"], 258).save(tmp_path / "other.json")
    names = {**pretrained, "bare": write(tmp_path / "bare", "llama", tokenizer=False), "other": tmp_path / "other.json"}
    file = run_file(tmp_path, "", corpus)
    run = load(str(file), ["--model", model.format(**names), "--data.tokenizer", tokenizer.format(**names)])
    if message is None:
        assert tokenizer_of(run) == tokenizer.format(**names).replace("model", f"{pretrained['llama']}/tokenizer.json")
        return
    with pytest.raises(ConfigError, match=message):
        tokenizer_of(run)


# -- what is refused ---------------------------------------------------------------------------------------------------


def without(name):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:200])


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def edited(**entries):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return change


@pytest.mark.parametrize(
    ("change", "arguments", "offered", "message"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), {}, {}, "missing tensor model.layers.1.mlp.up_proj.weight"),
        (cut, {}, {}, "cannot load `hf:"),
        (edited(hidden_size=32), {}, {}, "cannot load `hf:"),
        (edited(model_type="nonsense"), {}, {}, "cannot load `hf:.*nonsense"),
        (edited(auto_map={"AutoModelForCausalLM": "code.Model"}, model_type="mine"), {}, {}, "cannot load `hf:"),
        (lambda folder: (folder / "config.json").unlink(), {}, {}, "cannot load `hf:"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            {},
            {},
            "cannot load `hf:",
        ),
        (lambda folder: None, {"atention_dropout": 0.1}, {}, "has no setting `atention_dropout`"),
        (lambda folder: None, {"trust_remote_code": True}, {}, "has no setting `trust_remote_code`"),
        (lambda folder: None, {"dtype": "int8"}, {}, "`model.dtype` is 'int8'"),
        (lambda folder: None, {}, {"vocab_size": 271}, "has a vocabulary of 270, but the data needs 271"),
        (lambda folder: None, {}, {"context": 33}, "reads 32 tokens, fewer than the 33"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(change, arguments, offered, message, pretrained, tmp_path):
    folder = shutil.copytree(pretrained["llama"], tmp_path / "model")
    change(folder)
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        build_model(f"hf:{folder}", arguments, offered)
    assert "\n" not in str(caught.value)
    if offered or arguments:  # `check` reads no weights
        with pytest.raises(ConfigError, match=message), torch.device("meta"):
            build_model(f"hf:{folder}", arguments, offered)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nosuch", "a/b/c", ""])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_network(name):
    with pytest.raises(ConfigError, match="there is no such folder"):
        build_model(f"hf:{name}", {}, {})


@pytest.fixture
def hub(monkeypatch):
    """A hub that has no model; without the test's server it cannot be reached. Lists the paths that are asked for."""
    import huggingface_hub

    asked = []

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.extend([self.path] * ("models" in self.path))
            self.send_response(500 if "mirrored" in self.path else 404)
            self.send_header("X-Error-Code", "" if "mirrored" in self.path else "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        hf._find.cache_clear()
        yield asked, server.shutdown
        server.shutdown()
        thread.join()
    hf._find.cache_clear()


@pytest.mark.parametrize("away", [False, True])
def test_a_mistyped_folder_is_said_at_once_with_the_one_that_was_meant(hub, away, tmp_path, monkeypatch):
    asked, end = hub
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    if away:
        end()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for target in ("hf:models/smal", "hf:models/smal"):
        with pytest.raises(ConfigError) as caught:
            build_model(target, {}, {})
        assert ("the hub cannot be reached" if away else "the hub has no model of this name") in str(caught.value)
        assert "did you mean `hf:models/small`?" in caught.value.hint
    assert len(asked) == (0 if away else 2)


def test_a_hub_that_cannot_say_what_it_has_is_no_reason_to_refuse(hub):
    hf._find("some/mirrored")


def test_without_a_network_a_model_is_read_from_the_hubs_cache(hub, pretrained, tmp_path, monkeypatch, caplog):
    import huggingface_hub

    _, end = hub
    end()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, cached = "0" * 40, tmp_path / "models--some--model"
    shutil.copytree(pretrained["llama"], cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert hf.file_of("some/model", "config.json") == cached / "snapshots" / commit / "config.json"
    assert "hf:some/model is read from its cache" in caplog.text


def test_an_interrupted_export_over_a_model_is_not_a_model(pretrained, tmp_path, monkeypatch):
    folder = shutil.copytree(pretrained["llama"], tmp_path / "model")
    model = build_model(f"hf:{folder}", {}, {})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        hf.save(model, folder, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(hf, "write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        hf.save(model, folder, {})
    with pytest.raises(CheckpointError, match="holds no model"):
        load_model(folder)


# -- formats -----------------------------------------------------------------------------------------------------------


def test_a_model_folder_is_opened_by_the_format_it_is_marked_with(pretrained, tmp_path):
    for kind, form in (("llama", "GPT"), ("gpt2", "GPT2LMHeadModel"), ("qwen", "Qwen3ForCausalLM")):
        assert type(load_model(pretrained[kind])[0]).__name__ == form  # of transformers, without a mark
    folder = shutil.copytree(pretrained["llama"], tmp_path / "llama")
    edited(shoestring={"format": "transformers"})(folder)
    assert type(load_model(folder)[0]).__name__ == "LlamaForCausalLM"
    edited(shoestring={"format": "int4"})(folder)
    with pytest.raises(
        CheckpointError,
        match="has the format 'int4'; this version reads gpt, module, packed, adapted, quantized, transformers",
    ):
        load_model(folder)


def test_a_model_is_opened_by_its_name_its_folder_or_the_callable_that_builds_it(pretrained, tmp_path):
    """What a teacher or a drafter is given as: three forms of source, one function, random numbers untouched."""
    before = torch.get_rng_state()
    built = open_model("shoestring.models.gpt:tiny", from_data={"vocab_size": 280, "context": 16}, seed=3)
    assert torch.equal(torch.get_rng_state(), before) and not built.training
    save_model(built, None, tmp_path / "run" / "model", {"model": "", "arguments": {}, "offered": {"context": 16}})
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        again = open_model(str(folder))
        assert all(map(torch.equal, again.state_dict().values(), built.state_dict().values())) and not again.training
    assert type(open_model(f"hf:{pretrained['gpt2']}")).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("source", "arguments", "error", "said"),
    [
        ("nowhere", {}, CheckpointError, "`nowhere` holds no model"),
        ("nowhere", {"width": 4}, ConfigError, "takes no arguments, got width"),
        ("shoestring.models.gpt:tinny", {}, ConfigError, "has no callable `tinny`"),
        ("shoestring.models.gpt:tiny", {"with": 4}, ConfigError, "unknown model setting `with`"),
    ],
)
def test_what_opens_no_model_is_refused(source, arguments, error, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        open_model(source, arguments)


def test_a_packed_model_of_transformers_opens_again(pretrained, tmp_path):
    model, _ = load_model(pretrained["qwen"])
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "down_proj")):
            module.weight.data = module.weight.data * torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(module.in_features // 4)
    tokens = torch.randint(model.config.vocab_size, (1, 9))
    expected = model(tokens).logits
    names = saving.save_packed(model, pretrained["qwen"], tmp_path / "packed")
    assert len(names) == 2 * model.config.num_hidden_layers
    again, _ = load_model(tmp_path / "packed")
    assert type(again).__name__ == "Qwen3ForCausalLM"
    torch.testing.assert_close(again(tokens).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_configuration_that_names_a_kernel_of_the_hub_is_refused(tmp_path, key):
    """That is compiled code, which transformers would fetch and run where the package `kernels` is installed."""
    folder = write(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: "someone/kernel"}))
    for start in (load_model, open_model, lambda name: build_model(name, {}, {})):
        with pytest.raises(TrustError, match="names code to run, `someone/kernel`"):
            start(f"hf:{folder}")
