"""Bars of fine-tuning that fits: adapters are what they should be, packing changes nothing, and adapters over a base of
4 bits keep what full fine-tuning gains.

For the last, a model of 33 M parameters is pretrained on the sources of Python's standard library, and fine-tuned on
another domain, the texts of Python's own help (`pydoc_data.topics`), of which a part is held out. Both ways have
their learning rate chosen among as many, on a seed of its own. Every run is stored, so that a measurement continues.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Bar, Deadline, Measured, NotRun, OutOfBudget, stored
from shoestring import run as runs
from shoestring.core.compose import compose
from shoestring.core.feature import Feature, Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import call_model, cross_entropy
from shoestring.core.world import World
from shoestring.data.tokenizer import load_tokenizer
from shoestring.memory import ChunkedLoss, LoRA, Recompute
from shoestring.memory.adapters.leaving import gather_adapters
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.models.loading import load_model
from shoestring.optim import AdamW, Clip, Schedule
from shoestring.training.loop import train

RUNS = Path(".cache/memory")
KEPT = Path("benchmarks/results/runs/memory/qlora")
"""Of what the fine-tunings gave, so that a measurement needs the pretrained model for new ones only."""
SEEDS, TUNING_SEED = (1, 2, 3), 100
WAYS = {"lora": "", "embeddings": ", embeddings trained beside adapters"}
"""Ways of fine-tuning that are compared with the full one, and what is said of them."""
GIB = 2**30


# -- what adapters and packing compute ---------------------------------------------------------------------------------


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=512, context=128, dim=128, layers=4, heads=4, kv_heads=2, hidden=352))


def batch(seed: int, rows: int = 4, tokens: int = 128) -> dict[str, Tensor]:
    draws = torch.randint(512, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return {"inputs": draws[:, :-1], "targets": draws[:, 1:]}


def trained_folder(folder: Path, feature: LoRA) -> tuple[Tensor, Path]:
    """Train adapters of a model in a folder for a few steps: its logits with them beside it, and their folder."""
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    save_pretrained(gpt(), base)
    model = load_model(base)[0]
    with compose(Job(model, world=World()), [feature, AdamW(lr=1e-2)]) as job:
        for step in range(10):
            job.step(batch(step))
        with attachments_of(job).evaluating():
            logits = model(batch(0)["inputs"])
        gather_adapters(attachments_of(job), feature.name, str(base), feature.dropout)(folder)
    return logits, adapter


def merging(_: Deadline) -> Measured:
    """The largest difference of a logit between a model with its adapters merged and beside it."""
    worst = 0.0
    for feature in (LoRA(rank=8), LoRA(rank=8, dora=True)):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            logits, adapter = _trained(Path(folder), feature)
            merged = load_model(adapter)[0](batch(0)["inputs"])
            worst = max(worst, float((merged - logits).abs().max()))
    return Measured(worst, "LoRA and DoRA of rank 8 in all linear layers of 4 blocks, after 10 steps; float32")


def _trained(folder: Path, feature: LoRA) -> tuple[Tensor, Path]:
    with torch.enable_grad():
        return trained_folder(folder, feature)


def in_peft(_: Deadline) -> Measured | NotRun:
    """The largest difference of a logit between PEFT, which loaded the adapters, and the model that trained them."""
    if find_spec("peft") is None:
        return NotRun("peft is not installed")
    worst = 0.0
    for feature in (LoRA(rank=8), LoRA(rank=8, dora=True), LoRA(rank=8, layers=("*.down", "*.qkv"))):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            logits, adapter = _trained(Path(folder), feature)
            theirs = import_module("peft").AutoPeftModelForCausalLM.from_pretrained(adapter)
            worst = max(worst, float((theirs(batch(0)["inputs"]).logits - logits).abs().max()))
    return Measured(worst, "LoRA, DoRA, and LoRA of some layers, loaded by AutoPeftModelForCausalLM; float32")


def packing(_: Deadline) -> Measured:
    """The largest difference of a mean loss between texts that share a sequence and each alone."""
    worst = 0.0
    for model in (gpt(), *_transformers_models()):
        model.double()
        lengths, draws = (5, 40, 1, 60, 22), batch(3, rows=1)["inputs"][0]
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = torch.where(positions == 0, -100, draws)
        packed = {"input_ids": draws[None], "labels": labels[None], "position_ids": positions[None]}
        with torch.no_grad():
            total, count = cross_entropy(call_model(model, packed), packed)
            alone = 0.0
            for tokens, wanted in zip(draws.split(lengths), labels.split(lengths), strict=True):
                if len(tokens) > 1:
                    single = {"input_ids": tokens[None], "labels": wanted[None]}
                    alone += float(cross_entropy(call_model(model, single), single)[0])
        worst = max(worst, abs(float(total) - alone) / float(count))
    return Measured(worst, "5 texts in 128 tokens; our GPT, and transformers' Llama, Qwen2, GPT-2; double precision")


def _transformers_models() -> Iterator[nn.Module]:
    transformers = import_module("transformers")
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False}
    old = {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "use_cache": False}
    for kind, given in (("Llama", shape), ("Qwen2", shape), ("GPT2", old | {"bos_token_id": 0, "eos_token_id": 0})):
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        yield getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**given)).eval()


def loss_in_chunks(_: Deadline) -> Measured:
    """The largest difference of a loss in 10 steps of training with the loss in chunks and without."""

    def losses(*features: Feature) -> list[float]:
        with compose(Job(gpt().double(), world=World()), [*features, AdamW(lr=1e-3)]) as job:
            return [float(job.step(batch(step))) for step in range(10)]

    pairs = zip(losses(ChunkedLoss(tokens=100)), losses(), strict=True)
    return Measured(max(abs(one - other) for one, other in pairs), "512 tokens, 100 at a time; double precision")


# -- what they gain ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """A base model, another domain, and ways of fine-tuning: "full"; "lora", adapters over a base of 4 bits; and
    "embeddings", which are trained beside those adapters."""

    runs: Path
    deadline: Deadline
    kept: Path | None = None
    """Folder of what the fine-tunings gave; by default that of the runs."""
    model: str = "shoestring.models.gpt:small"
    shape: tuple[tuple[str, int], ...] = (("layers", 9),)
    vocabulary: int = 8192
    sequence: int = 256
    pretraining: int = 600
    """Steps of 16 samples."""
    steps: int = 100
    """Of fine-tuning, of 8 samples."""
    rates: tuple[float, ...] = (1.0, 3.0, 9.0)
    """First candidates for the learning rate, ascending by factors of 3, times what each way begins with."""
    more: int = 2
    """Candidates that are added at most where the best is at an edge, one beyond it each time."""

    def base(self) -> Path:
        """The pretrained model's run; OutOfBudget where time ends before it does, and it continues from there.

        Raises:
            OutOfBudget: as said.
        """
        folder = self.runs / "base"
        document: dict[str, Any] = {
            "run": {
                "model": self.model, "data": "python-stdlib", "steps": self.pretraining, "batch": 16,
                "folder": str(folder), "resume": "auto",
            },
            "model": dict(self.shape),
            "data": {"vocabulary": self.vocabulary, "sequence": self.sequence},
            "optim": {
                "adamw": {"lr": 1e-3, "weight_decay": 0.1},
                "clip": {"max_norm": 1.0},
                "schedule": {"shape": "trapezoid", "warmup": min(50, self.pretraining // 4), "final": 0.0},
            },
            "checkpoint": {"plain": {"every": 50, "keep": 1}},
        }  # fmt: skip
        if not (folder / "model" / "config.json").is_file() or not (folder / "done").is_file():
            self.deadline.check()
            result = train(runs.parse(document, name="base"), World(), stop=lambda: self.deadline.left() < 30)
            if result.status != "finished":
                raise OutOfBudget
            (folder / "done").touch()
        return folder / "model"

    def domain(self, base: Path) -> tuple[Tensor, Tensor]:
        """Samples of tokens (samples, sequence + 1) of the domain: to train on, and every eighth topic held out."""
        tokenizer = load_tokenizer(base / "tokenizer.json")
        sides: tuple[list[int], list[int]] = ([], [])
        for number, (_, text) in enumerate(sorted(pydoc_data.topics.topics.items())):
            sides[number % 8 == 0].extend([tokenizer.end_of_text, *tokenizer.encode(text)])
        room = self.sequence + 1
        cut = [torch.tensor(tokens[: len(tokens) // room * room]).view(-1, room) for tokens in sides]
        return cut[0], cut[1]

    def tuned(self, way: str, seed: int, rate: float) -> dict[str, Any]:
        """A fine-tuning: held-out loss before and after, and the bytes of the model's state at the step."""
        path = (self.kept or self.runs) / f"{way}-{seed}-{rate:g}.json"
        return stored(path, self.deadline.check, partial(self._tune, way, seed, rate))

    def _tune(self, way: str, seed: int, rate: float) -> dict[str, Any]:
        base = self.base()
        train_on, held_out = self.domain(base)
        model = load_model(base)[0].float()
        modules = ("embed",) if way == "embeddings" else ()
        lora = LoRA(rank=64, alpha=64.0, base_bits=4, modules_to_train=modules, seed=seed)
        features: list[Feature] = [] if way == "full" else [lora, Recompute(), ChunkedLoss()]
        start = 1e-4 if way == "full" else 3e-4
        features += [
            AdamW(lr=start * rate, betas=(0.9, 0.99), weight_decay=0.0),
            Clip(),
            Schedule(shape="cosine", warmup=min(10, self.steps // 3), final=0.1),
        ]
        order = torch.Generator().manual_seed(seed)
        taken: list[int] = []
        before = _held_out(model, held_out)
        with compose(Job(model, world=World(), progress=Progress(total=self.steps)), features) as job:
            attachments_of(job).at(
                Phase.CLIP, lambda: taken.append(sum(gradient.nbytes for gradient in attachments_of(job).gradients))
            )
            drawn: list[Tensor] = []
            for _ in range(self.steps):
                if not drawn:
                    drawn = list(torch.randperm(len(train_on), generator=order).split(8))
                    drawn = [each for each in drawn if len(each) == 8]
                rows = train_on[drawn.pop()]
                job.step({"inputs": rows[:, :-1], "targets": rows[:, 1:]})
            with attachments_of(job).evaluating():
                after = _held_out(model, held_out)
            state = [value for values in job.optimizer.state.values() for value in values.values()]
            kept = sum(value.nbytes for value in state if isinstance(value, Tensor))
            weights = sum(value.nbytes for value in _distinct(attachments_of(job).weights().values()))
        return {"before": before, "after": after, "bytes": weights + max(taken) + kept}

    def best(self, way: str) -> float:
        """The rate with the lowest held-out loss, on a seed of its own."""
        rates = list(self.rates)
        while True:
            found = min(rates, key=lambda rate: self.tuned(way, TUNING_SEED, rate)["after"])
            if rates[0] < found < rates[-1] or len(rates) == len(self.rates) + self.more:
                return found
            rates = [found / 3, *rates] if found == rates[0] else [*rates, found * 3]

    def results(self, way: str) -> list[dict[str, Any]]:
        """The runs with the best rate of a way."""
        return [self.tuned(way, seed, self.best(way)) for seed in SEEDS]


def _distinct(values: Any) -> list[Tensor]:
    """Tensors, those of one storage once."""
    return list({value.untyped_storage().data_ptr(): value for value in values if isinstance(value, Tensor)}.values())


@torch.no_grad()
def _held_out(model: nn.Module, samples: Tensor) -> float:
    model.eval()
    total, count = 0.0, 0
    for rows in samples.split(8):
        loss, each = cross_entropy(model(rows[:, :-1]), {"targets": rows[:, 1:]})
        total, count = total + float(loss), count + int(each)
    model.train()
    return total / count


def gain(contest: Contest, way: str, _: Deadline) -> Measured:
    """The least share, over seeds, of full fine-tuning's gain that a way keeps."""
    pairs = list(zip(contest.results(way), contest.results("full"), strict=True))
    shares = [(own["before"] - own["after"]) / (full["before"] - full["after"]) for own, full in pairs]
    own, full = ([f"{each['after']:.4f}" for each in runs] for runs in zip(*pairs, strict=True))
    return Measured(
        min(shares),
        f"held-out loss {pairs[0][1]['before']:.4f} before; full {', '.join(full)}; adapters {', '.join(own)}; "
        f"rates chosen: {contest.best('full'):g} x 1e-4 and {contest.best(way):g} x 3e-4",
    )


def state(contest: Contest, way: str, _: Deadline) -> Measured:
    """The largest share of full fine-tuning's bytes of weights, gradients and optimizer state."""
    own, full = (max(each["bytes"] for each in contest.results(each_way)) for each_way in (way, "full"))
    return Measured(own / full, f"{own / 1e6:.0f} MB of {full / 1e6:.0f} MB, by the tensors that are there")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def eight_billion() -> GPTConfig:
    """The shape of Llama 3 8B."""
    return GPTConfig(
        vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14_336, context=2048, tied=False,
        rope_theta=500_000.0,
    )  # fmt: skip


def drawn_in_bf16(config: GPTConfig) -> GPT:
    """A model of this shape on the host in bfloat16, of the scale of fresh weights; drawn in a minute."""
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    draws = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            count = parameter.numel()
            flat = draws.repeat(math.ceil(count / len(draws)))[:count].view_as(parameter)
            parameter.copy_(flat if parameter.dim() > 1 else torch.ones_like(parameter))
    return model


def largest(config: GPTConfig, tokens: int, device: torch.device, steps: int = 3) -> tuple[float, float]:
    """GiB that the device reports as taken at most by fine-tuning with adapters over a base of 4 bits, and the loss."""
    world = World(device=device)
    features = [LoRA(rank=16, base_bits=4), Recompute(), ChunkedLoss(tokens=1024), AdamW(lr=1e-4), Clip()]
    generator = torch.Generator().manual_seed(0)
    lowest, loss = math.inf, math.nan
    with compose(Job(drawn_in_bf16(config), world=world), features) as job:
        for _ in range(steps):
            drawn = torch.randint(config.vocab_size, (1, tokens + 1), generator=generator).to(device)
            loss = float(job.step({"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}))
            if device.type == "cuda":
                lowest = min(lowest, torch.cuda.mem_get_info(device)[0])
    if device.type != "cuda":
        return math.nan, loss
    total = torch.cuda.get_device_properties(device).total_memory
    return (total - lowest) / GIB, loss


def on_gpu(_: Deadline) -> Measured:
    gib, loss = largest(eight_billion(), 2048, torch.device("cuda", 0))
    peak = torch.cuda.max_memory_allocated() / GIB
    return Measured(gib, f"torch's peak {peak:.2f} GiB; adapters of rank 16, blocks recomputed; loss {loss:.2f}")


def rows(folder: Path = RUNS, deadline: Deadline | None = None) -> list[Bar]:
    """The bars.

    Args:
        folder: of the runs of the contest, which a later call continues.
        deadline: when these must have ended.
    """
    contest = Contest(folder, deadline or Deadline(), KEPT if folder == RUNS else None)
    return [
        Bar(
            "memory.lora-merged", "largest difference of a logit, adapters merged and beside", "<=", 1e-5, merging,
            kind="exact",
        ),
        Bar(
            "memory.lora-peft", "largest difference of a logit to PEFT with the same adapters", "<=", 1e-5, in_peft,
            peers=("peft", "transformers"), kind="exact",
        ),
        Bar(
            "memory.packing", "largest difference of a mean loss, texts packed and alone, in nats", "<=", 1e-6, packing,
            peers=("transformers",), kind="exact",
        ),
        Bar(
            "memory.chunked-loss", "largest difference of a loss, in chunks and whole, in nats", "<=", 1e-6,
            loss_in_chunks, kind="exact",
        ),
        *(bar for way, said in WAYS.items() for bar in _fine_tuned(contest, way, said)),
        *gpu_rows(),
    ]  # fmt: skip


def _fine_tuned(contest: Contest, way: str, said: str) -> list[Bar]:
    name = "memory.qlora" if way == "lora" else f"memory.qlora-{way}"
    return [
        Bar(
            f"{name}-gain", f"least share of full fine-tuning's gain with a base of 4 bits{said}", ">=", 0.9,
            partial(gain, contest, way), baseline="full fine-tuning in float32, its rate chosen alike", seeds=SEEDS,
            kind="drawn",
        ),
        Bar(
            f"{name}-state", f"share of full fine-tuning's weights, gradients and optimizer state{said}", "<=", 0.35,
            partial(state, contest, way), baseline="full fine-tuning in float32", seeds=SEEDS, kind="exact",
        ),
    ]  # fmt: skip


def gpu_rows() -> list[Bar]:
    said = "GiB that the device reports, adapters over 8 B parameters of 4 bits at 2,048 tokens"
    return [Bar("memory.qlora-8b", said, "<=", 12.0, on_gpu, gpu=True, kind="exact")]
