"""Losses and gradients of all variants against TRL's, for the same model on the same batches.

The batches have prompts of 0 to 13 tokens and answers of 1 to 11. TRL pads each answer to a row; ours are packed into
two rows. Policy and reference differ by noise, so that no log-ratio is 0.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.preference import peer
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.task import IGNORED
from shoestring.core.world import World
from shoestring.data.preferences import ANSWERS, KINDS
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.memory import LoRA
from shoestring.optim import SGD
from shoestring.preference import DPO, KTO, ORPO, SimPO

VOCABULARY, ROW, NOISE, RANK = 300, 128, 0.02, 4
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Record:
    """A prompt with two answers, as tokens; for KTO, its own answer is `chosen` or `rejected`, by `desirable`."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    mismatched: tuple[int, ...]
    desirable: bool


@cache
def records(prompts: tuple[int, ...] = (0, 1, 2, 7, 13, 0, 5)) -> tuple[Record, ...]:
    """A record for each length of a prompt; without a prompt, answers have two tokens at least: the first has no
    context to be predicted from."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 256, (length,), generator=generator).tolist())

    lengths = [(int(prompt == 0) + 1 + number, 11 - number, 1 + 2 * number) for number, prompt in enumerate(prompts)]
    return tuple(
        Record(text(prompt), text(one), text(max(two, 2)), text(max(other, 2)), number % 3 != 1)
        for number, (prompt, (one, two, other)) in enumerate(zip(prompts, lengths, strict=True))
    )


# -- ours --------------------------------------------------------------------------------------------------------------


def packed(rest: Sequence[Record], *, rated: bool) -> dict[str, Tensor]:
    """The records in two rows, each answer behind its prompt, with positions that restart."""
    rows = [rest[::2], rest[1::2]] if len(rest) > 1 else [rest]
    shape = len(rows), ROW
    inputs, labels, answers = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED), torch.full(shape, -1)
    positions = torch.arange(ROW).repeat(len(rows), 1)
    for row, part in enumerate(rows):
        at = 0
        for number, record in enumerate(part):
            sides = {0: record.chosen, 1: record.rejected}
            if rated:
                own = 0 if record.desirable else 1
                sides = {own: sides[own], 2: record.mismatched}
            for kind, answer in sides.items():
                text = torch.tensor([*record.prompt, *answer])
                end, start = at + len(text), at + max(1, len(record.prompt))
                inputs[row, at:end], answers[row, at:end] = text, KINDS * number + kind
                labels[row, start:end] = text[start - at :]
                positions[row, at:] = torch.arange(ROW - at)
                at = end
        positions[row, at:] = torch.arange(ROW - at)
    return {"input_ids": inputs, "labels": labels, "position_ids": positions, ANSWERS: answers}


def llama() -> Any:
    """A small Llama of transformers in double precision."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=ROW, initializer_range=0.3, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def plain_name(name: str) -> str:
    """The name of a parameter without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default.weight", "")


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Move what is trained, by noise that depends on its name: adapters of both libraries to the same values."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(sum(plain_name(name).encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "lora_" in name:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(NOISE * noise)


def ours(feature: Feature, rest: Sequence[Record], *, adapters: bool) -> tuple[float, Gradients]:
    """The loss of a step, and the gradients, which plain descent at the rate 1 takes off the weights."""
    model = llama()
    features = [LoRA(rank=RANK, alpha=2 * RANK)] if adapters else []
    with compose(Job(model, world=World()), [*features, feature, SGD(lr=1.0, momentum=0.0, nesterov=False)]) as job:
        move(model)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        before = {name: value.detach().clone() for name, value in trained.items()}
        loss = float(job.step(packed(rest, rated=isinstance(feature, KTO))))
        return loss, {name: before[name] - value.detach() for name, value in trained.items()}


# -- TRL's -------------------------------------------------------------------------------------------------------------


@dataclass
class Theirs:
    """A trainer of TRL with the model and the weights of `ours`."""

    kind: str
    adapters: bool
    folder: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        peer.offline()
        model = llama()
        file = Path(self.folder) / "tokenizer.json"
        engine = byte_tokenizer()
        engine.engine.add_special_tokens(["<|im_end|>"])
        engine.save(file)
        side = {"prompt": "a", "completion": "b", "label": True}
        record = side if self.kind == "KTO" else {"prompt": "a", "chosen": "b", "rejected": "c"}
        lora = importlib.import_module("peft").LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        reference = None if self.adapters or self.kind in ("CPO", "ORPO") else copy.deepcopy(model)
        self.trainer = peer.trainer(
            self.kind, model, peer.fast_tokenizer(str(file), ""), [record] * 2, self.folder, reference=reference,
            adapters=lora if self.adapters else None, **self.settings,
        )  # fmt: skip
        self.model = self.trainer.model.double().train()
        move(self.model)

    def gradients(self, loss: Tensor) -> tuple[float, Gradients]:
        """The loss, and its gradients by the names of the parameters in ours."""
        self.model.zero_grad()
        loss.backward()
        trained = ((plain_name(name), value) for name, value in self.model.named_parameters() if value.requires_grad)
        return float(loss.detach()), {
            name: torch.zeros_like(value) if value.grad is None else value.grad.double() for name, value in trained
        }

    def dpo(self, rest: Sequence[Record]) -> Tensor:
        collate = importlib.import_module("trl.trainer.dpo_trainer").DataCollatorForPreference(pad_token_id=0)
        batch = collate(
            [
                {"prompt_ids": [*each.prompt], "chosen_ids": [*each.chosen], "rejected_ids": [*each.rejected]}
                for each in rest
            ]
        )
        batch["completion_mask"][:, 0] = 0  # the first token of a text has no probability; TRL's means would count it
        return self.trainer.compute_loss(self.model, batch)

    def kto(self, rest: Sequence[Record]) -> Tensor:
        collate = importlib.import_module("trl.trainer.kto_trainer").DataCollatorForUnpairedPreference(pad_token_id=0)
        examples = []
        for record in rest:
            own = record.chosen if record.desirable else record.rejected
            examples.append(
                {
                    "prompt_ids": [*record.prompt],
                    "completion_ids": [*own],
                    "KL_completion_ids": [*record.mismatched],
                    "label": record.desirable,
                }
            )
        return self.trainer.compute_loss(self.model, collate(examples))

    def padded(self, rest: Sequence[Record]) -> dict[str, Tensor]:
        """A batch of the experimental trainers: each side padded by itself."""
        batch: dict[str, Tensor] = {}
        for side in ("chosen", "rejected"):
            texts = [torch.tensor([*record.prompt, *getattr(record, side)]) for record in rest]
            starts = [len(record.prompt) for record in rest]
            labels = [
                text.masked_fill(torch.arange(len(text)) < at, IGNORED) for text, at in zip(texts, starts, strict=True)
            ]
            pad = torch.nn.utils.rnn.pad_sequence
            batch[f"{side}_input_ids"] = pad(texts, batch_first=True)
            batch[f"{side}_labels"] = pad(labels, batch_first=True, padding_value=IGNORED)
            batch[f"{side}_attention_mask"] = pad([torch.ones_like(text) for text in texts], batch_first=True)
        return batch

    def simpo(self, rest: Sequence[Record]) -> Tensor:
        return self.trainer.get_batch_loss_metrics(self.model, self.padded(rest))[0]

    def orpo(self, rest: Sequence[Record]) -> Tensor:
        """TRL's term of the odds, and the mean log-probability of chosen answers as TRL computes it."""
        chosen, rejected = self.trainer.concatenated_forward(self.model, self.padded(rest))[:2]
        return (-chosen - self.trainer.odds_ratio_loss(chosen, rejected)[0]).mean()

    def whole_orpo(self, rest: Sequence[Record]) -> Tensor:
        return self.trainer.get_batch_loss_metrics(self.model, self.padded(rest))[0]


# -- the bars ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One of our objectives, and how TRL computes it."""

    feature: Feature
    kind: str
    loss: Callable[[Theirs, Sequence[Record]], Tensor]
    settings: Mapping[str, Any]
    alone: bool = False
    """Whether TRL's batches have one record each."""
    note: str = ""
    prompts: tuple[int, ...] = (0, 1, 2, 7, 13, 0, 5)


_MEANS = "TRL's mean counts the first token of a text without a prompt, which has no probability: its mask is cleared"
VARIANTS: dict[str, Variant] = {
    "sigmoid": Variant(DPO(beta=0.3, cache_folder=""), "DPO", Theirs.dpo, {"beta": 0.3}),
    "smoothing": Variant(
        DPO(beta=0.3, smoothing=0.2, cache_folder=""), "DPO", Theirs.dpo,
        {"beta": 0.3, "loss_type": ["aot"], "label_smoothing": 0.2}, alone=True,
        note="TRL's sigmoid loss ignores label_smoothing; its aot loss is the smoothed one where a batch has one pair",
    ),
    "ipo": Variant(
        DPO(beta=0.3, variant="ipo", cache_folder=""), "DPO", Theirs.dpo, {"beta": 0.3, "loss_type": ["ipo"]},
        note=_MEANS,
    ),
    "hinge": Variant(
        DPO(beta=0.3, variant="hinge", cache_folder=""), "DPO", Theirs.dpo, {"beta": 0.3, "loss_type": ["hinge"]}
    ),
    "normalized": Variant(
        DPO(beta=0.3, variant="normalized", cache_folder=""), "DPO", Theirs.dpo,
        {"beta": 0.3, "loss_type": ["sigmoid_norm"]}, note=_MEANS,
    ),
    "simpo": Variant(
        SimPO(beta=2.0, margin=0.7, smoothing=0.1), "CPO", Theirs.simpo,
        {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "orpo": Variant(
        ORPO(weight=0.4), "ORPO", Theirs.orpo, {"beta": 0.4},
        note="TRL's likelihood also counts prompts, and long answers for more: here its terms of answers are added",
    ),
    "orpo-whole": Variant(
        ORPO(weight=0.4), "ORPO", Theirs.whole_orpo, {"beta": 0.4}, alone=True, prompts=(1, 1, 1),
        note="TRL's own sum, where that is the same: one pair a batch, and prompts of one token",
    ),
    "kto": Variant(
        KTO(beta=0.3, desirable_weight=0.7, undesirable_weight=1.3, cache_folder=""), "KTO", Theirs.kto,
        {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.3, "per_device_train_batch_size": 2},
    ),
}  # fmt: skip


@contextmanager
def _variant(name: str, *, adapters: bool) -> Iterator[tuple[Variant, Theirs]]:
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        yield variant, Theirs(variant.kind, adapters, folder, variant.settings)


def differences(name: str, *, adapters: bool) -> tuple[float, float]:
    """The difference of the losses, and the largest of a gradient over the largest gradient.

    Raises:
        AssertionError: the two libraries train other parameters.
    """
    with _variant(name, adapters=adapters) as (variant, theirs):
        rest = records(variant.prompts)
        loss, gradients = ours(variant.feature, rest, adapters=adapters)
        parts = [[record] for record in rest] if variant.alone else [rest]
        found = [theirs.gradients(variant.loss(theirs, part)) for part in parts]
    other = sum(value for value, _ in found) / len(found)
    assert gradients.keys() == found[0][1].keys(), gradients.keys() ^ found[0][1].keys()
    means = {key: torch.stack([each[key] for _, each in found]).mean(0) for key in gradients}
    largest = max(float(value.abs().max()) for value in means.values())
    worst = max(float((gradients[key] - means[key]).abs().max()) for key in gradients)
    return abs(loss - other), worst / largest


def equal(name: str, deadline: Deadline) -> Measured | NotRun:
    """The larger of the two differences, without and with adapters."""
    if absent := peer.missing():
        return absent
    both = {}
    for said, adapters in (("all weights", False), ("LoRA", True)):
        deadline.check()
        both[said] = differences(name, adapters=adapters)
    parts = [f"{said}: loss {one:.1e}, gradients {two:.1e}" for said, (one, two) in both.items()]
    note = VARIANTS[name].note
    return Measured(max(map(max, both.values())), "; ".join([*parts, note] if note else parts))


def rows() -> list[Bar]:
    """A bar for each variant."""
    what = "difference to TRL's of the loss of {}, and of a gradient over the largest gradient, with and without LoRA"
    return [
        Bar(
            f"preference.equal-{name}", what.format(name), "<=", 1e-5, partial(equal, name), baseline="TRL",
            peers=peer.PEERS, kind="exact",
        )
        for name in VARIANTS
    ]  # fmt: skip
