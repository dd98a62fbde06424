"""Adapters in a job and in a run: what is trained, kept and written, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoestring.checkpoint import Plain
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.memory import LoRA, Zero
from shoestring.memory.adapters.layers import sizes
from shoestring.models import adapter_folder
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.models.loading import load_model
from shoestring.models.nf4 import NF4Linear
from shoestring.models.quantized import Quantized
from shoestring.optim import AdamW
from shoestring.run import load
from tests.decode.small_server import tokenizer
from tests.small_runs import write_run_file, write_texts


def gpt(seed=0, **changes):
    shape = {"vocab_size": 257, "dim": 32, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "context": 64}
    torch.manual_seed(seed)
    return GPT(GPTConfig(**shape | changes))


def composed(*features, model=None, total=4):
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    job = Job(model or gpt(), optimizer=sgd, world=World(), progress=Progress(total=total))
    return compose(job, features)


def batch(seed=0):
    tokens = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(seed))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_adapters_alone_are_trained_and_the_model_stays_as_it_was():
    model, plain = gpt(), gpt().state_dict()
    with composed(LoRA(rank=2), model=model) as job:
        assert {name.rpartition(".")[2] for name in attachments_of(job).trained} == {"lora_A", "lora_B"}
        assert len(attachments_of(job).trained) == 2 * 4 * 2
        losses = [float(job.step(batch())) for _ in range(4)]
        assert losses[-1] < losses[0]
        after = dict(model.named_parameters())
        assert all(torch.equal(after[name], plain[name]) for name in plain)
        assert job.trace.facts["adapter_parameters"] == sum(
            each.numel() for each in attachments_of(job).trained.values()
        )
    assert list(model.state_dict()) == list(plain) and all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("bits", [0, 16, 4])
def test_modules_are_trained_beside_adapters(bits, tmp_path):
    """With their own gradients and optimizer state; what is rounded elsewhere is not rounded there."""
    feature = LoRA(rank=2, modules_to_train=("embed", "blocks.1.mlp.down"), base_bits=bits)
    model, plain = gpt(), gpt().state_dict()
    assert sizes(model, (), 2, dora=False, modules=feature.modules_to_train)["adapted_layers"] == 7
    settings = Plain(folder=str(tmp_path), every=1)
    with composed(feature, settings, model=model) as job:
        own = {name for name in attachments_of(job).trained if "lora_" not in name}
        assert own == {"embed.weight", "blocks.1.mlp.down.weight"} and len(attachments_of(job).trained) == 2 + 7 * 2
        job.step(batch())
        after = dict(model.named_parameters())
        changed = {name for name in plain if name in after and not torch.equal(after[name].float(), plain[name])}
        assert own <= changed and (bits == 16 or changed == own)
        assert job.trace.facts["adapter_parameters"] == sum(
            each.numel() for each in attachments_of(job).trained.values()
        )
        assert job.trace.facts["frozen_parameters"] == sum(map(torch.numel, plain.values())) - sum(
            plain[name].numel() for name in own
        )
        trained = {name: tensor.detach().clone() for name, tensor in attachments_of(job).trained.items()}
    with composed(feature, settings) as job:
        assert job.restore("auto") == 1
        assert all(torch.equal(tensor, trained[name]) for name, tensor in attachments_of(job).trained.items())
    with pytest.raises(CheckpointError), composed(replace(feature, modules_to_train=()), settings) as job:
        job.restore("auto")


@pytest.mark.slow
def test_weights_that_lose_small_steps_are_named_and_copies_in_fp32_lose_none(caplog):
    """Steps of a thousandth of the distance between two numbers of 16 bits add up in the copies alone."""

    def moved(*features):
        caplog.clear()
        model = gpt()
        before = model.embed.weight.detach().bfloat16()
        with compose(Job(model, world=World()), [*features, AdamW(lr=1e-6, weight_decay=0.0)]) as job:
            for step in range(20):
                job.step(batch(step))
            stepped = attachments_of(job).trained["embed.weight"].detach().float().view_as(before)
            return float((stepped != before.float()).float().mean()), caplog.text

    lora = LoRA(rank=2, modules_to_train=("embed",), base_bits=16)
    share, said = moved(lora)
    assert share < 0.1 and "memory.lora: `embed.weight` is trained in bfloat16" in said
    share, said = moved(lora, Zero())
    assert share > 0.9 and "small steps" not in said
    assert "small steps" not in moved(replace(lora, base_bits=4))[1]


def test_the_first_loss_is_that_of_the_model_itself():
    with composed(LoRA(rank=2)) as adapted, composed() as plain:
        assert float(adapted.step(batch())) == float(plain.step(batch()))


def test_checkpoints_hold_the_adapters_and_a_hash_of_the_rest(tmp_path):
    plain = Plain(folder=str(tmp_path), every=1)
    with composed(LoRA(rank=2), plain) as job:
        held = job.kept["model"].state.state_dict()
        assert all("lora_" in name for name in held)
        job.step(batch())
        trained = {name: tensor.detach().clone() for name, tensor in attachments_of(job).trained.items()}
    with composed(LoRA(rank=2), plain) as job:
        assert job.restore("auto") == 1
        assert all(torch.equal(tensor, trained[name]) for name, tensor in attachments_of(job).trained.items())
    with (
        pytest.raises(CheckpointError, match=r"has other weights than|other layers, scales or weights"),
        composed(LoRA(rank=2), plain, model=gpt(seed=1)) as job,
    ):
        job.restore("auto")


@pytest.mark.parametrize(("bits", "kind"), [(8, "int"), (4, "int"), (4, "nf4")])
def test_a_rounded_base_takes_fewer_bytes_and_leaves_as_what_was_computed(bits, kind):
    model, tokens = gpt(), batch()["inputs"]
    dense = sum(each.nbytes for each in model.state_dict().values())
    feature = LoRA(rank=2, base_bits=bits, base_type=kind)
    with composed(feature, model=model) as job:
        assert sum(each.nbytes for each in attachments_of(job).weights().values()) < dense * 0.6
        rounded = [name for name, each in model.named_modules() if isinstance(each, Quantized | NF4Linear)]
        assert len(rounded) == 2 * 4 and all("blocks." in name for name in rounded)
        losses = [float(job.step(batch())) for _ in range(4)]
        assert losses[-1] < losses[0]
        with attachments_of(job).evaluating():
            wanted = model(tokens)
        weights = feature.export(
            dict(attachments_of(job).weights()), {name: kept.state.state_dict() for name, kept in job.kept.items()}
        )
    plain = gpt(seed=3)
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain.eval()(tokens), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (LoRA(rank=0), "rank` must be at least 1"),
        (LoRA(alpha=0.0), "alpha` must be a positive number"),
        (LoRA(dropout=1.0), "dropout` is a probability"),
        (LoRA(layers=("blocks.*.attn.*",)), "matches no linear layer of GPT"),
        (LoRA(layers=("blocks.*.attention.*", "*.mpl.*")), r"`\*.mpl.\*` matches no linear layer"),
        (LoRA(base_bits=8, base_type="nf4"), "nf4 has 4 bits, not 8"),
        (LoRA(layers=("*",), adapter="somewhere"), "determines its own layers"),
        (LoRA(modules_to_train=("embd",)), "`embd` matches no module with weights"),
        (LoRA(modules_to_train=("embed",), adapter="somewhere"), "determines its own layers"),
    ],
    ids=lambda value: "" if isinstance(value, LoRA) else value[:12],
)
def test_settings_that_cannot_work_are_refused(feature, said):
    with pytest.raises(ConfigError, match=said):
        composed(feature)


def test_what_dora_would_train_is_what_it_trains():
    with composed(LoRA(dora=True)) as job:
        trained = sum(parameter.numel() for parameter in attachments_of(job).parameters)
    assert sizes(gpt(), (), LoRA().rank, dora=True)["adapter_parameters"] == trained


def test_a_pattern_that_matches_nothing_is_told_what_there_is():
    with pytest.raises(ConfigError) as raised:
        composed(LoRA(layers=("model.layers.*",)))
    assert "blocks.0.attention.qkv" in raised.value.hint


def test_layers_that_share_their_weight_or_have_a_forward_pass_of_their_own_are_left(caplog):
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.blocks[3].weight = self.blocks[2].weight

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    with composed(LoRA(rank=1), model=Net()) as job:
        assert {name.rpartition(".")[0] for name in attachments_of(job).trained} == {"blocks.0"}
    assert "`blocks.1` and 2 more get no adapter: Own has a forward pass of its own" in caplog.text


def test_a_base_of_16_bits_is_trained_beside_adapters_of_32():
    with composed(LoRA(rank=2, base_bits=16)) as job:
        kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in attachments_of(job).weights().items()}
        assert kinds["weight"] == torch.bfloat16 and kinds["lora_A"] == torch.float32
        losses = [float(job.step(batch())) for _ in range(4)]
        assert losses[-1] < losses[0]


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_pretrained(gpt(), folder)
    byte_tokenizer().save(folder / "tokenizer.json")
    return folder


def run_file(folder, base, **lora):
    return write_run_file(
        folder / "run.toml",
        {
            "run": {
                "model": str(base),
                "data": write_texts(folder / "texts"),
                "steps": 6,
                "folder": str(folder / "run"),
            },
            "model": dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden")),
            "data": {"tokenizer": "model"},
            "optim": {"adamw": {"lr": 1e-2}},
            "memory": {"lora": {"rank": 2} | lora},
        },
    )


@pytest.mark.slow
def test_a_run_writes_a_merged_model_and_its_adapter_and_another_run_goes_on_from_it(tmp_path, base, capsys):
    assert main(["train", str(run_file(tmp_path, base))]) == 0
    run, tokens = tmp_path / "run", batch()["inputs"]
    merged, tokenizer = load_model(run)
    apart, _ = load_model(run / "model" / "adapter")
    assert tokenizer is not None
    with torch.no_grad():
        torch.testing.assert_close(apart(tokens), merged(tokens), atol=1e-5, rtol=0)
        assert not torch.allclose(merged(tokens), load_model(base)[0](tokens), atol=1e-3)
    assert json.loads((run / "model/adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert main(["generate", str(run / "model" / "adapter"), "--prompt", "the", "--tokens", "4"]) == 0
    again = tmp_path / "again"
    again.mkdir()
    second = run_file(again, base, adapter=str(run / "model" / "adapter"), rank=16, merge=False)
    assert main(["train", str(second)]) == 0
    assert not (again / "run/model/config.json").exists()
    assert main(["generate", str(again / "run"), "--prompt", "the", "--tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["check", str(second)]) == 0
    assert "predicted from its operators" in capsys.readouterr().out  # with the adapter's own rank, without its numbers
    assert main(["check", str(second), "--memory.lora.adapter", str(tmp_path / "none")]) == 2
    assert "none` holds no adapter" in capsys.readouterr().err
    further = adapter_folder.read(again / "run/model/adapter", gpt()).layers
    assert len(further["blocks.0.mlp.down"].a) == 2
    capsys.readouterr()
    save_pretrained(gpt(seed=5), tmp_path)
    third = run_file(again, tmp_path, adapter=str(run / "model" / "adapter"))
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    assert main(["train", str(third), "--folder", str(tmp_path / "third")]) == 2
    assert "was trained on other weights than this model has" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_fine_tunes_on_chats(tmp_path, capsys, caplog):
    tokenizer().save_pretrained(tmp_path / "base", 64)
    save_pretrained(gpt(vocab_size=259), tmp_path / "base")
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    lines = [{"messages": [{**talk[0], "content": f"{number}?"}, talk[1]]} for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = {"model": tmp_path / "base", "data": tmp_path / "chats.jsonl", "folder": tmp_path / "run"}
    given |= {"epochs": 2, "data.held-out": 0.2}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    assert main(["check", "finetune", *flags]) == 0
    template = tmp_path / "base" / "tokenizer_config.json"
    whole = template.read_text()
    template.write_text(json.dumps({key: value for key, value in json.loads(whole).items() if key != "chat_template"}))
    capsys.readouterr()
    assert main(["check", "finetune", *flags]) == 0  # it gets a template of ours
    template.write_text(whole)
    with caplog.at_level("INFO", logger="shoestring"):
        assert main(["train", "finetune", *flags]) == 0
    assert load(str(tmp_path / "run")).data.sequence == 64  # what the model reads
    assert "2 steps are few: --epochs 60 or --batch 1 --accumulate 1 makes more of them" in caplog.text
    trained = load_model(tmp_path / "run")
    assert trained[1].companions.keys() >= {"tokenizer_config.json"}
    assert (tmp_path / "run/model/adapter/adapter_config.json").is_file()
    assert main(["generate", str(tmp_path / "run"), "--prompt", "1?", "--tokens", "3"]) == 0
    capsys.readouterr()
    lines.append({"messages": talk[:1]})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["train", "finetune", *flags, "--folder", str(tmp_path / "second")]) == 2
    assert "chats.jsonl:13: a chat without answers" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()
