"""A drafter and targets that agree with it as often as one likes, on natural text.

The drafter is a GPT of one block, 768 wide, trained on text. A target is the same model deepened to 12 blocks: those
that are added have random weights, and what they write to the residual stream is scaled by ε. So the target costs what
a model of 12 blocks costs, and its agreement with the drafter falls as ε grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import stored
from benchmarks.training import recipe, train_to_end
from shoestring.data.tokenizer import Tokenizer
from shoestring.models.gpt import GPT, Block
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model

BLOCKS, WIDTH, HEADS, HIDDEN, CONTEXT = 12, 768, 12, 2048, 512
STEPS, SAMPLE = 160, 256


@dataclass
class Pairs:
    """The drafter, trained once into the cache, and its targets; `check` raises when the time is up."""

    cache: Path
    steps: int = STEPS
    check: Callable[[], None] = field(default=lambda: None)

    @property
    def folder(self) -> Path:
        """The drafter's run, trained now, or further, if it is not finished."""
        folder = self.cache / f"drafter-{self.steps}"

        def make() -> dict[str, Any]:
            document = recipe(self.steps, seed=0, rate=2e-3)
            document["run"] |= {"folder": str(folder), "resume": "auto", "batch": 2048 // SAMPLE}
            document["model"] = {
                "layers": 1, "dim": WIDTH, "heads": HEADS, "kv_heads": HEADS, "hidden": HIDDEN, "context": CONTEXT,
                "init_std": 0.03,
            }  # fmt: skip
            document["data"] |= {"sequence": SAMPLE}
            document["checkpoint"] = {"tiered": {}}
            metrics = train_to_end(document, self.check)
            return {"steps": self.steps, "bits_per_byte": metrics["held_out_bits_per_byte"]}

        stored(folder.with_suffix(".json"), self.check, make)
        return folder

    def drafter(self) -> tuple[GPT, Tokenizer]:
        """The trained model of one block."""
        model, tokenizer = load_model(self.folder)
        assert isinstance(model, GPT) and tokenizer is not None
        return model.eval(), tokenizer

    def saved(self, epsilon: float) -> tuple[Path, Path]:
        """Folders of the drafter and of the target of ε, in the layout that transformers reads too."""
        model, _ = self.drafter()
        folders = (self.cache / "pair-drafter", self.cache / f"pair-target-{epsilon:g}")
        for folder, built in zip(folders, (model, deepened(model, epsilon)), strict=True):
            if not folder.exists():
                save_model(built, None, folder, {})
        return folders


def deepened(model: GPT, epsilon: float, blocks: int = BLOCKS) -> GPT:
    """The model with random blocks behind its own, whose part of the residual stream is scaled by ε."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        deep = GPT(replace(model.config, layers=blocks))
    weights = deep.state_dict() | model.state_dict()
    deep.load_state_dict(weights)
    with torch.no_grad():
        for block in deep.blocks[len(model.blocks) :]:
            assert isinstance(block, Block)
            for written in (block.attention.out, block.mlp.down):
                written.weight.mul_(epsilon)
    return deep.eval()
