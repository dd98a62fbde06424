"""Models of others: what they ask for is compared with what they hold, and they are read inside of their folders."""

import json
import os
import shutil
import signal
import struct

import pytest
import torch

from shoestring.cli import main
from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.decode.skipping.plan import SkipPlan
from shoestring.models import gguf, hf, saving
from shoestring.models.adapter_config import AdapterConfig
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model, outline

SECRET = "PRIVATE KEY"


@pytest.fixture(autouse=True)
def soon():
    """What waits, or builds without end, is a failure."""

    def ended(*_):
        raise AssertionError("it takes more than 10 s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A GPT with a tokenizer, in Llama's layout."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "gpt"
    model = GPT(GPTConfig(vocab_size=257, dim=32, layers=1, heads=2, kv_heads=1, hidden=32, context=32))
    saving.save_model(model, byte_tokenizer(), folder, {"offered": {"context": 32}})
    gguf.save(model, byte_tokenizer(), folder.parent / "model.gguf", "f32")
    return folder


@pytest.fixture
def theirs(small, tmp_path):
    return shutil.copytree(small, tmp_path / "theirs")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(theirs, name, kind):
    (theirs / name).unlink()
    if kind == "pipe":
        os.mkfifo(theirs / name)
    elif kind == "folder":
        (theirs / name).mkdir()
    else:
        (theirs / name).symlink_to("/dev/zero")
    with pytest.raises(ShoestringError):
        load_model(theirs)


def marked(theirs, form):
    if form == "transformers":
        return edit(theirs / "config.json", shoestring={"format": form})
    arguments = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}
    origin = {"model": "shoestring.models.gpt:tiny", "arguments": arguments}
    return edit(theirs / "config.json", shoestring={"format": form, **origin, "offered": {"vocab_size": 257}})


@pytest.mark.parametrize("form", ["gpt", "transformers", "module"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_counts_are_compared_with_the_weights(theirs, form, name):
    if form != "gpt":
        marked(theirs, form)
    config = json.loads((theirs / "config.json").read_text())
    its = {"num_hidden_layers": "layers", "hidden_size": "dim", "num_attention_heads": "heads"}.get(name, name)
    table = {"vocab_size": "offered"}.get(its, "arguments")
    if form == "module":
        config["shoestring"][table][its] = 2**31
    else:
        config[name] = 2**31
    (theirs / "config.json").write_text(json.dumps(config))
    for opened in (load_model, lambda path: outline(str(path))):
        with pytest.raises(CheckpointError, match="2,147,483,648, and the weights are"):
            opened(theirs)


@pytest.mark.slow  # transformers is imported for it; ours are compared in the quick tests
def test_the_size_of_a_transformers_model_is_compared_with_the_weights(theirs):
    marked(theirs, "transformers")
    edit(theirs / "config.json", hidden_size=8192, intermediate_size=8192, vocab_size=60_000)
    with pytest.raises(CheckpointError, match=r"describes a model of .* numbers, and its weights are"):
        hf.load(str(theirs))


@pytest.mark.parametrize("value", [None, True, "x", [], {}, -1, 0.5, 1e400, 2**70, [[]], "\ud800"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "rope_parameters", "rms_norm_eps", "model_type", "shoestring"])
def test_a_value_of_another_type_is_one_line(theirs, name, value):
    edit(theirs / "config.json", **{name: value})
    try:
        load_model(theirs)
    except ShoestringError as error:
        assert "\n" not in error.parts()[1]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"eos_token":' * 100_000, "[1]", '"x"', "{", "\ufeff", '{"a": 1' + "0" * 5000]
)
def test_malformed_json_is_one_line(theirs, name, text):
    (theirs / name).write_text(text)
    with pytest.raises(ShoestringError):
        load_model(theirs)


@pytest.mark.parametrize("value", [7, [], {"content": 7}, [[]], "\ud800"])
def test_special_tokens_of_another_type_are_one_line(theirs, value):
    edit(theirs / "tokenizer_config.json", eos_token=value)
    if value == []:
        with pytest.raises(ShoestringError, match="eos_token is not a table"):
            load_model(theirs)
    else:
        with pytest.raises(ShoestringError, match=r"tokenizer_config\.json"):
            load_model(theirs)


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("count", [2**31, 2**63, 2**64 - 1])
def test_counts_of_a_gguf_file_are_compared_with_its_size(small, tmp_path, place, count):
    data = bytearray((small.parent / "model.gguf").read_bytes())
    struct.pack_into("<Q", data, place, count)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "behind", "form", "count"),
    [
        (b"llama.block_count", 4, "<I", 2**31),
        (b"llama.embedding_length", 4, "<I", 2**31),
        (b"tokenizer.ggml.tokens", 8, "<Q", 2**31),
        (b"tokenizer.ggml.token_type", 8, "<Q", 2**40),
        (b"token_embd.weight", 4, "<Q", 2**40),
        (b"token_embd.weight", 0, "<I", 2**31),
    ],
)
def test_counts_inside_of_a_gguf_file_are_compared_with_its_size(small, tmp_path, name, behind, form, count):
    data = bytearray((small.parent / "model.gguf").read_bytes())
    struct.pack_into(form, data, data.index(name) + len(name) + behind, count)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").unlink()
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "change",
    [{"lora_alpha": "x"}, {"alpha_pattern": {"(a+)+": 1}}, {"alpha_pattern": {"(": 1}}, {"alpha_pattern": [1]},
     {"modules_to_save": {"a": 1}}, {"use_rslora": "no"}, {"base_model_name_or_path": 7}, {"peft_type": [["LORA"]]},
     {"lora_alpha": 10**400}, {"alpha_pattern": {".*.*.*.*.*x": 1}}],
)  # fmt: skip
def test_an_adapter_of_other_types_or_endless_patterns_is_one_line(tmp_path, change):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2, "bias": "none"} | change))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        AdapterConfig.read(path)


@pytest.mark.parametrize(
    "change",
    [{"ratios": {"blocks.0.mlp": "x"}}, {"ratios": [1]}, {"context": 2**40}, {"saved": None}, {"format": True},
     {"x": 1}, {"loss_before": "\ud800"}, {"ratios": {"blocks.0.mlp": 1e400}}],
)  # fmt: skip
def test_a_skip_plan_of_other_types_is_one_line(tmp_path, change):
    path = tmp_path / "plan.json"
    plan = {"format": 1, "ratios": {"blocks.0.mlp": 0.5}, "context": 8, "saved": 0.1, "loss_before": 1, "loss_after": 2}
    path.write_text(json.dumps(plan))
    assert SkipPlan.load(path).ratios == {"blocks.0.mlp": 0.5}
    path.write_text(json.dumps(plan | change))
    with pytest.raises(ShoestringError, match="is no skip plan"):
        SkipPlan.load(path)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["quantize", "prune"])
def test_what_a_link_leads_to_outside_is_not_published(theirs, tmp_path, monkeypatch, caplog, verb):
    """Nor is it waited for; licences that are files of the folder are copied."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "id").write_text(SECRET)
    (theirs / "LICENSE.md").symlink_to(tmp_path / "id")
    (theirs / "NOTICE").symlink_to("../id")
    os.mkfifo(theirs / "README.md")
    (theirs / "COPYING").write_text("MIT")
    (theirs / "COPYING.txt").symlink_to("COPYING")
    assert main([verb, "theirs", "--out", "made"]) == 0
    made = {path.name: path.read_text(errors="replace") for path in (tmp_path / "made").iterdir()}
    assert made["COPYING"] == made["COPYING.txt"] == "MIT"
    assert not {"LICENSE.md", "NOTICE", "README.md"} & made.keys() and SECRET not in "".join(made.values())
    said = " ".join(caplog.messages)
    assert all(name in said for name in ("LICENSE.md", "NOTICE", "README.md"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_link_out_of_the_folder_is_not_read(theirs, tmp_path, name):
    """Its content would come out again beside the next model's weights."""
    (tmp_path / "secret").write_text(json.dumps({"password": SECRET}))
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ShoestringError, match="leads out of") as caught:
        load_model(theirs)
    assert SECRET not in str(caught.value)
    if name == "config.json":
        with pytest.raises(CheckpointError, match="leads out of"):
            saving.remember(str(theirs), tmp_path / "run")


def test_a_snapshot_of_hugging_faces_cache_opens(theirs, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0f", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(theirs.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert isinstance(load_model(snapshot)[0], GPT)
    marked(snapshot, "transformers")
    assert hf.is_pretrained(load_model(snapshot)[0])


def test_names_of_others_do_not_reach_the_terminal_as_they_are(theirs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs.rename(tmp_path / "a\x1b[31m")
    (tmp_path / "a\x1b[31m/config.json").unlink()
    assert main(["generate", "a\x1b[31m"]) == 2
    assert "a\\x1b[31m" in (said := capsys.readouterr().err) and "\x1b" not in said


@pytest.mark.parametrize("length", [1, 2, 40])
def test_adapters_on_adapters_alone_are_refused(length, tmp_path):
    """The last one names the first one as its model, or there are too many of them."""
    for number in range(length):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        base = str(tmp_path / f"{(number + 1) % length}")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    with pytest.raises(CheckpointError, match="belongs to other adapters, whose bases do not lead to a model"):
        load_model(tmp_path / "0")
