"""`check` and `train` refuse alike: the same exit code, message and hint, for every refusal before the first step."""

import json
import os
import random
import shutil
import sys

import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

from shoestring.cli import main
from shoestring.core.errors import ShoestringError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.run import load
from shoestring.testing.pool import Pool
from shoestring.verbs.check import check
from tests.foundation import refused_on_ranks
from tests.small_runs import write_run_file

SHAPE = {"dim": 8, "hidden": 8, "layers": 1, "heads": 1, "kv_heads": 1, "vocab_size": 257, "context": 64}
CHATS = ["--data", "chats.jsonl", "--data.form", "chat"]
SCALED = ["--precision.autocast.dtype", "fp16"]
OWN = ["--model", "toy:model", "--data", "toy:samples"]
TRAPEZOID = ["--optim.schedule.shape", "trapezoid", "--optim.schedule.warmup", "0"]
CASES = {
    # data
    "chats as text": ["--data", "chats.jsonl"],
    "chats without a template": [*CHATS, "--data.tokenizer", "own/tokenizer.json"],
    "chats and bpe": [*CHATS, "--data.tokenizer", "bpe"],
    "text as chats": ["--data.form", "chat"],
    "no such field": ["--data", "chats.jsonl", "--data.field", "mesages"],
    "no json": ["--data", "broken.jsonl"],
    "a mixture with a short part": ["--data", '["text/*.txt", "short-*.txt"]'],
    "a mixture that is short of weights": ["--data", '["text/*.txt", "short-*.txt"]', "--data.weights", "[1.0]"],
    "a short corpus for bpe": ["--data", "short-*.txt", "--data.tokenizer", "bpe"],
    "a sequence of all text": ["--data.sequence", "100000"],
    "a damaged tokenizer": ["--data.tokenizer", "damaged.json"],
    "a damaged token file": ["--data", "damaged.tokens"],
    "damage behind the beginning of a large corpus": ["--data", "large.txt"],
    "a damaged line of a large corpus": ["--data", "large.jsonl"],
    "template of text": ["--data.template", "chat.jinja"],
    "cached text": ["--data.cache_memory", "1.0"],
    "weights of one source": ["--data.weights", "[1.0, 2.0]"],
    # data sets of the user's own
    "no such data": ["--model", "toy:model", "--data", "toy:smaples"],
    "no data set": ["--model", "toy:model", "--data", "builtins:dict"],
    "baselines of numbers": [*OWN, "--baselines", "true"],
    "prompts of numbers": [*OWN, "--prompts", '["a"]'],
    "patience without held-out data": [*OWN, "--evaluate_every", "1", "--patience", "2"],
    "the best without held-out data": [*OWN, "--evaluate_every", "1", "--save_best", "true"],
    # the run
    "no loss": ["--loss", "toy:no_such"],
    "no evaluation": ["--evaluate", "toy:no_such"],
    "no sink": ["--sinks", '["tensorbord"]'],
    "no own sink": ["--sinks", '["toy:no_such"]'],
    "patience alone": ["--patience", "2"],
    "two lengths": ["--steps", "2", "--minutes", "1"],
    "no model": ["--model", ""],
    "batch": ["--batch", "5", "--accumulate", "2"],
    "another run's folder": ["--folder", "taken", "--resume", "auto"],
    "a folder of something else": ["--folder", "foreign"],
    "a file": ["--folder", "file"],
    # a model's weights
    "weights cut short": ["--model", "sound-cut"],
    "weights without a header": ["--model", "sound-headless"],
    "a weight is missing": ["--model", "sound-lacking"],
    "a weight of another shape": ["--model", "sound-reshaped"],
    "a weight of whole numbers": ["--model", "sound-whole-numbers"],
    "weights of a module cut short": ["--model", "module-cut"],
    "a weight of a module is missing": ["--model", "module-lacking"],
    "a teacher cut short": ["--decode.distill.teacher", "sound-cut"],
    "a dense model cut short": ["--sparse.ast.teacher", "sound-cut"],
    "a dense model that is not there": ["--sparse.ast.teacher", "missing"],
    # features
    "steps that are skipped, and moments that are held": ["--sparse.step", *SCALED],
    "steps that are skipped, and replayed": ["--checkpoint.tiered.differences", "4", *SCALED],
    "an average of copies": ["--memory.offload", "--optim.ema"],
    "no matrix": ["--optim.muon.adamw", '["*"]'],
    "memory that others may write to": ["--checkpoint.tiered.memory_folder", "shared"],
    "two optimizers": ["--optim.adamw.lr", "1e-3", "--optim.sgd.lr", "0.1"],
    "two shards": ["--memory.zero", "--parallel.fsdp"],
    "rank of adapters": ["--memory.lora.rank", "0"],
    "layers of adapters": ["--memory.lora.layers", '["none"]'],
    "no adapter": ["--memory.lora.adapter", "missing"],
    "blocks to recompute": ["--memory.recompute.blocks", "9"],
    "no operator": ["--memory.recompute.saved_operators", '["addd"]'],
    "groups of the optimizer": ["--optim.adamw.groups", '[{names = ["no.such"], lr = 1.0}]'],
    "rate": ["--optim.sgd.lr", "-1.0"],
    "betas": ["--optim.adamw.betas", "[2.0, 0.9]"],
    "decay of the average": ["--optim.ema.decay", "2.0"],
    "norm": ["--optim.clip.max_norm", "0.0"],
    "cool-down": [*TRAPEZOID, "--optim.schedule.cooldown", "3.0"],
    "schedule of one's own": ["--optim.schedule.function", "toy:no_such"],
    "noise of one gradient": ["--optim.adascale"],
    "a step that is not divided": ["--optim.adascale.scale", "0.5"],
    "sparse layers": ["--sparse.ste.layers", '["none"]'],
    "no teacher": ["--decode.distill.teacher", "missing"],
    "budget of nothing": ["--memory.budget.gib", "0.0"],
    "share of a profile": ["--profile.callpaths.sample_rate", "0.0"],
    "chunks": ["--memory.chunkedloss.chunk", "0"],
    "checkpoints": ["--checkpoint.tiered.keep", "0"],
    "an exchange without ranks": ["--comm.powersgd.rank", "0"],
}  # fmt: skip
OF_HUGGING_FACE = {
    "a damaged data set": ["--data", "hf:damaged-rows"],
    "no such field": ["--data", "hf:rows", "--data.field", "txt"],
    "no such split": ["--data", "hf:rows:test"],
    "weights cut short": ["--model", "hf:transformers-cut"],
    "a missing weight": ["--model", "hf:transformers-lacking"],
    "no weights": ["--model", "hf:transformers-without"],
}
ON_RANKS = {
    "batch": ["--batch", "3"],
    "batch and micro-batches": ["--batch", "6", "--accumulate", "2"],
    "two exchanges": ["--comm.bf16", "--comm.topk"],
    "an exchange of shards": ["--parallel.fsdp", "--comm.powersgd"],
    "rank of an exchange": ["--comm.powersgd.rank", "0"],
    "density": ["--comm.topk.density", "2.0"],
    "merges": ["--comm.localsgd.every", "0"],
    "short corpus": ["--data", "short-*.txt"],
    "replicas that skip different steps": ["--comm.localsgd", "--precision.autocast.dtype", "fp16"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(5):
        words = " ".join("".join(draw.choices("abcdef", k=4)) for _ in range(40))
        (folder / "text" / f"{number}.txt").write_text(words)
    chats = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "x"}]} for n in range(9)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "short-a.txt").write_text("short")
    (folder / "short-b.txt").write_text("brief")
    (folder / "damaged.json").write_text("{")
    (folder / "damaged.tokens").write_bytes(b"\0" * 99)
    (folder / "file").write_text("")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "run.toml").write_text("[run]\n")
    (folder / "taken" / "checkpoints").mkdir(parents=True)
    (folder / "taken" / "run.toml").write_text("[run]\n")
    tables = {"run": {"data": "text/*.txt", "steps": 3, "folder": "out"}, "data": {"held_out": 0.2}}
    write_run_file(folder / "run.toml", tables)
    (folder / "own").mkdir()
    byte_tokenizer().save(folder / "own" / "tokenizer.json")
    (folder / "large.txt").write_bytes(b"words of a text\n" * 90_000 + b"\xff\xfe\n")
    (folder / "large.jsonl").write_text('{"text": "words of a record"}\n' * 50_000 + '{"text": 1}\n')
    (folder / "shared" / f"shoestring-{os.geteuid()}").mkdir(parents=True)
    (folder / "shared" / f"shoestring-{os.geteuid()}").chmod(0o777)
    write_models(folder)
    (folder / "start.toml").write_text(
        '[run]\ndata = "text/*.txt"\nsteps = 3\nfolder = "out"\nbatch = 4\n'
        '[data]\ntokenizer = "model"\nsequence = 16\nheld_out = 0.2\n'
    )
    (folder / "plain.toml").write_text('[run]\nsteps = 3\nbatch = 4\nfolder = "out"\n')
    return folder


@pytest.fixture(scope="module")
def of_hugging_face(files):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    for name, line in (("rows", '{"text": "b"}'), ("damaged-rows", '{"text": ')):
        (files / name).mkdir()
        (files / name / "a.jsonl").write_text('{"text": "a"}\n' * 9 + line + "\n")
    config = transformers.GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(files / "transformers")
    byte_tokenizer().save(files / "transformers" / "tokenizer.json")
    damage(files, "transformers")
    shutil.copytree(files / "transformers", files / "transformers-without")
    (files / "transformers-without" / "model.safetensors").unlink()
    return files


def write_models(folder):
    """A model of ours in each form, and copies of it with damaged weights."""
    model = GPT(GPTConfig(**SHAPE))
    save_pretrained(model, folder / "sound")
    mark = {"format": "module", "model": "shoestring.models.gpt:tiny", "arguments": SHAPE, "offered": {}}
    (folder / "module").mkdir()
    (folder / "module" / "config.json").write_text(json.dumps({"shoestring": mark}))
    save_file(model.state_dict(), folder / "module" / "model.safetensors")
    for name in ("sound", "module"):
        byte_tokenizer().save(folder / name / "tokenizer.json")
    damage(folder, "sound", "module")


def damage(folder, *names):
    """Copies of models whose weights are cut short, without a tensor, and so on."""
    for name in names:
        weights = load_file(folder / name / "model.safetensors")
        first, *others = sorted(weights)
        tensors = {
            "lacking": {key: weights[key] for key in others},
            "reshaped": weights | {first: torch.zeros(3, 3)},
            "whole-numbers": weights | {first: weights[first].to(torch.int32)},
        }
        for kind in ("cut", "headless", *tensors):
            copied = shutil.copytree(folder / name, folder / f"{name}-{kind}") / "model.safetensors"
            if kind in tensors:
                save_file(tensors[kind], copied, {"format": "pt"})
            else:
                content = copied.read_bytes()
                copied.write_bytes(content[:-8] if kind == "cut" else b"\0" * 8 + content[8:])


def without_progress(text):
    """Without the progress bars of the `datasets` library."""
    return [line for line in text.splitlines() if line and "Generating" not in line]


def refuse(flags, files, monkeypatch, capsys):
    """Both verbs refuse a run with these flags, in the same words."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ranks.HERE)])
    shutil.rmtree("out", ignore_errors=True)  # of a case that failed
    source = "start.toml" if flags[0] == "--model" and flags[1] not in ("", "toy:model") else "run.toml"
    source = "plain.toml" if "toy:model" in flags else source
    assert main(["train", source, *flags]) == 2
    trained = without_progress(capsys.readouterr().err)
    assert main(["check", source, *flags]) == 2
    assert without_progress(capsys.readouterr().err) == trained and any(line.startswith("error: ") for line in trained)
    assert not (files / "out" / "run.toml").exists()


@pytest.mark.parametrize("case", CASES)
def test_check_says_what_training_says(case, files, monkeypatch, capsys):
    refuse(CASES[case], files, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_HUGGING_FACE)
def test_check_says_what_training_says_of_others_formats(case, of_hugging_face, monkeypatch, capsys):
    refuse(OF_HUGGING_FACE[case], of_hugging_face, monkeypatch, capsys)


def test_a_run_that_has_the_folder_is_said_and_not_refused(files, monkeypatch, capsys):
    """The run file is right, and was used: `check` of it is as before."""
    monkeypatch.chdir(files)
    assert main(["check", "run.toml", "--folder", "taken"]) == 0
    said = "`taken` holds a run already; add --run.resume auto to continue it, or choose another --run.folder"
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.slow
def test_ranks_say_what_check_says_of_them(files, monkeypatch):
    monkeypatch.chdir(files)
    with Pool(2, timeout=100) as pool:
        told = pool.call(
            refused_on_ranks.train_each, folder=str(files), source="run.toml", cases=list(ON_RANKS.values())
        )
    for (case, flags), *said in zip(ON_RANKS.items(), *told, strict=True):
        with pytest.raises(ShoestringError) as raised:
            list(check(load("run.toml", flags), 2))
        for kind, message, hint in said:  # a rank says which other one it has heard of
            assert [kind, message.removeprefix("rank 0: "), hint] == raised.value.parts(), case
