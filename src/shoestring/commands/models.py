"""Arguments of the verbs for trained models: generate, evaluate, serve, skip, prune and quantize."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from shoestring.commands.printing import say, write_text
from shoestring.decode.serve.settings import Serving
from shoestring.decode.settings import Decoding, Generation, SamplingOptions
from shoestring.verbs.settings import OneShotPruning, Quantization, SkipChoice, TaskEvaluation


@dataclass(frozen=True)
class TrainedModel:
    """Arguments that name a trained model."""

    model: Positional[str]
    """Trained model: a run folder, a model folder, a .gguf file, or hf:NAME."""


@dataclass(frozen=True)
class Generate(TrainedModel):
    """Arguments of `shoestring generate`."""

    prompt: str = "def "
    """Text that the model continues."""
    settings: Generation = field(default_factory=Generation)
    """Settings of the generation."""
    report: bool = False
    """Print, after the text, the tokens per pass, the acceptance of drafts and the cost of passes."""

    def __call__(self) -> int:
        from shoestring.verbs.generate import generate

        lines: list[str] = []
        pieces = generate(self.model, self.prompt, self.settings, report=lines.append if self.report else None)
        write_text(self.prompt + next(pieces, ""))  # errors are raised before anything is printed
        for piece in pieces:
            sys.stdout.flush()
            write_text(piece)
        write_text("\n")
        sys.stdout.flush()
        for line in lines:
            say(line, sys.stderr)
        return 0


@dataclass(frozen=True)
class EvaluateModel(TrainedModel):
    """Arguments of `shoestring evaluate`."""

    settings: TaskEvaluation = field(default_factory=TaskEvaluation)
    """Settings of the evaluation."""
    out: Path | None = None
    """File to write the results to, as JSON in the form of lm-evaluation-harness."""

    def __call__(self) -> int:
        from shoestring.verbs.evaluate import evaluate, save, tables

        results = evaluate(self.model, self.settings)
        if self.out is not None:
            save(results, self.out)
        say("\n".join(tables(results)))
        return 0


@dataclass(frozen=True)
class Serve(TrainedModel):
    """Arguments of `shoestring serve`."""

    serving: Serving = field(default_factory=Serving)
    """Settings of the server."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """Settings of sampling for requests that give none."""
    decoding: Decoding = field(default_factory=Decoding)
    """Settings of the model's forward passes and of speculative decoding."""

    def __call__(self) -> int:
        from shoestring.verbs.serve import serve

        serve(self.model, self.serving, self.sampling, self.decoding, ready=say)
        return 0


@dataclass(frozen=True)
class Skip(TrainedModel):
    """Arguments of `shoestring skip`."""

    out: Path = Path("plan.json")
    """File to write the plan to."""
    choice: SkipChoice = field(default_factory=SkipChoice)
    """Settings of the choice of sublayers to skip."""

    def __call__(self) -> int:
        from shoestring.verbs.skip import skip

        say("\n".join(skip(self.model, self.out, self.choice)))
        return 0


@dataclass(frozen=True)
class PruneModel(TrainedModel):
    """Arguments of `shoestring prune`."""

    out: Path
    """Folder to write the pruned model to, which must be new or empty."""
    settings: OneShotPruning = field(default_factory=OneShotPruning)
    """Settings of the pruning."""

    def __call__(self) -> int:
        from shoestring.verbs.prune import prune

        say("\n".join(prune(self.model, self.out, self.settings)))
        return 0


@dataclass(frozen=True)
class QuantizeModel(TrainedModel):
    """Arguments of `shoestring quantize`."""

    out: Path
    """Folder to write the quantised model to, which must be new or empty; with --format gguf, the file."""
    settings: Quantization = field(default_factory=Quantization)
    """Settings of the rounding."""

    def __call__(self) -> int:
        from shoestring.verbs.quantize import quantize

        say("\n".join(quantize(self.model, self.out, self.settings)))
        return 0
