"""A GPT of 12 layers trained at a context of 2048, for measurements that need a model whose layers have learnt.

It trains on samples of 256 tokens first, where a step costs little, and continues on samples of 2048. Both runs lie in
the cache and continue where they were stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import stored
from benchmarks.training import recipe, train_to_end

LAYERS, CONTEXT, SHORT = 12, 2048, 256
STEPS = {SHORT: 720, CONTEXT: 64}
"""Steps of 2048 tokens at each length of sample."""


@dataclass
class Pretrained:
    """Both runs; `check` raises when the time is up."""

    cache: Path
    steps: dict[int, int] = field(default_factory=lambda: dict(STEPS))
    check: Callable[[], None] = field(default=lambda: None)

    @property
    def folder(self) -> Path:
        """The folder of the second run; trained now, or further, if it is not finished."""
        short = self._run(SHORT, "shoestring.models.gpt:tiny", rate=3e-3, final=0.2)
        return self._run(CONTEXT, str(short), rate=6e-4, final=0.0)

    def _run(self, length: int, start: str, *, rate: float, final: float) -> Path:
        steps = self.steps[length]
        folder = self.cache / f"gpt{LAYERS}-{length}-{steps}"

        def make() -> dict[str, Any]:
            document = recipe(steps, seed=0, rate=rate)
            document["run"] |= {"folder": str(folder), "resume": "auto", "model": start, "batch": 2048 // length}
            document["data"] |= {"sequence": length}
            document["optim"]["schedule"] |= {"warmup": steps // 20, "final": final}
            document["checkpoint"] = {"tiered": {}}
            if length == SHORT:
                document["model"] = {"layers": LAYERS, "context": CONTEXT}
            else:
                document["data"]["tokenizer"] = "model"
            metrics = train_to_end(document, self.check)
            return {"steps": steps, "bits_per_byte": metrics["held_out_bits_per_byte"]}

        stored(folder.with_suffix(".json"), self.check, make)
        return folder
