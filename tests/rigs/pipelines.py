"""Runs of pipelines and of split layers beside runs of one process, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.feature import DATA, Feature
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import call_model
from shoestring.models.blocks import repeated
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.testing.scenarios import here

VOCABULARY, LENGTH, STEPS = 48, 10, 5
BESIDE = {
    "alone": [],
    "clip": [ss.optim.Clip(max_norm=0.05)],
    "recompute": [ss.memory.Recompute()],
    "lamb": [ss.optim.LAMB(lr=1e-2)],
    "fp16": [ss.precision.Autocast(dtype="fp16")],
    "exchange": [ss.comm.Dense()],
    "chunked": [ss.memory.ChunkedLoss()],
    "lora": [ss.memory.LoRA(rank=2)],
    "fsdp": [ss.parallel.FSDP()],
    "compile": [ss.graph.Compile(backend="eager")],
}
OVER = {
    "ddp": ss.parallel.DDP,
    "zero": ss.memory.Zero,
    "zero 1": lambda: ss.memory.Zero(stage=1),
    "dense": ss.comm.Dense,
}


def gpt(**settings: Any) -> nn.Module:
    shape: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 4, "hidden": 24, "context": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, **{**shape, **settings}))


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    others = {"num_key_value_heads": 2, "tie_word_embeddings": tied, "use_cache": False}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **others)
    return in_double(LlamaForCausalLM(config))


def in_double(model: nn.Module) -> nn.Module:
    """Replace norms that compute in fp32, whatever the weights are."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(len(child.get_parameter("weight")), eps=1e-6))
    return model


def qwen3() -> nn.Module:
    """Its norms of queries and keys are of single heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    others = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "use_cache": False}
    return in_double(Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **others)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config).eval()  # no dropout


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(image_size=8, patch_size=4, **sizes)
    config.num_labels = VOCABULARY
    return ViTForImageClassification(config)


class Added(nn.Module):
    """A block that also gets the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        return self.linear(hidden) + first


class Strange(nn.Module):
    """Models that a pipeline cannot cut, by what is strange in them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.late = nn.Linear(8, 8)
        blocks: list[nn.Module] = [nn.Linear(8, 8) for _ in range(4)]
        if what == "batch norms":
            blocks[2] = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (-1, LENGTH)))
        if "side inputs" in what:
            blocks = [Added() for _ in range(4)]
            self.embed.requires_grad_("frozen" not in what)
        if what == "shared blocks":
            blocks[3] = blocks[0]
        if what == "tied inside":
            self.late.weight = nn.Parameter(blocks[1].get_parameter("weight").detach())
            blocks[1].register_parameter("weight", self.late.weight)
        self.blocks: Any = nn.Sequential(*blocks) if what == "no blocks" else nn.ModuleList(blocks)
        self.others = nn.ModuleList([nn.Linear(8, 8)] if what == "two lists" else [])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        first = hidden = self.embed(inputs)
        for block in self.blocks if self.what != "skips" else self.blocks[:1]:
            hidden = block(hidden, first) if "side inputs" in self.what else block(hidden)
        return self.head(self.late(hidden) if self.what == "reads back" else hidden)


def frozen() -> nn.Module:
    model = gpt(tied=False)
    for name in ("embed", "blocks.0.mlp", "blocks.2.attention", "blocks.3.mlp"):
        model.get_submodule(name).requires_grad_(False)
    return model


def frozen_block() -> nn.Module:
    model = gpt(tied=False)
    for name in ("embed", "blocks.0"):
        model.get_submodule(name).requires_grad_(False)
    return model


MODELS = {
    "tied": gpt,
    "untied": lambda: gpt(tied=False),
    "grouped": lambda: gpt(kv_heads=2),
    "one head": lambda: gpt(kv_heads=1),
    "llama": llama,
    "tied llama": lambda: llama(tied=True),
    "qwen3": qwen3,
    "gpt2": gpt2,
    "vit": vit,
    "frozen": frozen,
    "frozen block": frozen_block,
}


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["inputs"]) + model(batch["inputs"].flip(0))


def batches(model: str, step: int, micro: int, index: int, ranks: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a rank: rows of all samples of the step, of which some have ignored targets."""
    draw = torch.Generator().manual_seed(100 + step)
    rows = 4 * micro
    if model == "vit":
        inputs: Tensor = torch.randn(rows, 3, 8, 8, generator=draw).double()
        targets = torch.randint(VOCABULARY, (rows,), generator=draw)
    else:
        tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=draw)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
    made = []
    for number in range(micro):
        mine = range(index, rows, ranks)[number * 4 // ranks : (number + 1) * 4 // ranks]
        cut = ... if model == "vit" else (..., slice(0, LENGTH - number % 2))  # texts of unequal lengths
        made.append({"inputs": inputs[[*mine]][cut], "targets": targets[[*mine]][cut]})
    return made


def _built(model: str) -> nn.Module:
    if model.startswith("zoo: "):  # a family of transformers
        from benchmarks.models import zoo

        family = zoo.build(model.removeprefix("zoo: "), 0)
        family.config.use_cache = False
        return family.eval()
    return MODELS[model]() if model in MODELS else Strange(model)


def _mixed(value: Tensor) -> float:
    """A sum that depends on where each number stands."""
    draw = torch.Generator().manual_seed(value.numel())
    return float(value.flatten() @ torch.randn(value.numel(), generator=draw, dtype=value.dtype))


def train(
    *,
    model: str = "tied",
    pipeline: dict[str, Any] | None = None,
    tensor: dict[str, Any] | None = None,
    beside: str = "alone",
    over: str = "ddp",
    micro: int = 4,
    folder: str = "",
    resume: bool = False,
    stop: int = STEPS,
    checkpoint: str = "tiered",
    seeds: Sequence[int] = (0,),
) -> dict:
    """Losses of the steps, norms of clipped gradients, the held-out loss, and the weights."""
    world = here()
    features: list[Feature] = [ss.parallel.Pipeline(**pipeline)] if pipeline is not None else []
    features += [ss.parallel.Tensor(**tensor)] if tensor is not None else []
    ways = {"stages": 1} if pipeline is None else pipeline, {"ways": 1} if tensor is None else tensor
    if world.size > ways[0].get("stages", world.size) * ways[1].get("ways", world.size):
        features.append(OVER[over]())
    features += BESIDE[beside] if world.size > 1 or beside != "exchange" else []
    if checkpoint == "plain":
        features.append(ss.checkpoint.Plain(folder=folder))
    elif folder:
        settings = {"memory_folder": f"{folder}/memory", "memory_every": 1, "disk_every": 1}
        features.append(ss.checkpoint.Tiered(folder=f"{folder}/checkpoints", **settings))

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)

    torch.manual_seed(seeds[world.rank % len(seeds)])
    built = _built(model).double()
    if beside == "fp16":  # the gradient of one block overflows in the second step
        last = repeated(built)[-1]
        factors = iter([1.0] * micro + [inf] * micro)
        norm = next(module for module in last.modules() if "Norm" in type(module).__name__)
        norm.get_parameter("weight").register_hook(lambda grad: grad * next(factors, 1.0))
    forward = twice if model == "two calls" else call_model
    job = ss.compose(Job(built, forward, optimizer=adam, progress=Progress(total=STEPS), world=world), features)
    with job:
        began = job.restore("auto") if resume and job.restore else None
        attachments, losses, norms = attachments_of(job), [], []
        index, readers = job.world.index_over(DATA), job.world.ranks_over(DATA)
        while not job.done and job.progress.step < stop:
            losses.append(float(job.step(*batches(model, job.progress.step, micro, index, readers))))
            norms.append(float(job.numbers.get("grad_norm", 0.0)))
        total, count = job.evaluate(batches(model, 99, 1, index, readers))
        weights = {
            name: attachments.whole(name, value).detach().clone() for name, value in attachments.weights().items()
        }
    sums = {name: [float(value.sum()), float(value.square().sum()), _mixed(value)] for name, value in weights.items()}
    scale = attachments.scaler.get_scale()
    return {
        "losses": losses,
        "norms": norms,
        "scale": scale,
        "began": began,
        "held out": [total, count],
        "weights": sums,
    }
