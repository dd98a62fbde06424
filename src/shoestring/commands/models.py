"""Arguments of the verbs for trained models."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from shoestring.commands.printing import say, write_text
from shoestring.commands.shared import TrainedRun
from shoestring.core.errors import ConfigError
from shoestring.decode.settings.generation import Conversing, Decoding, Generation, SamplingOptions
from shoestring.decode.settings.serving import Serving
from shoestring.verbs.settings import FilePrediction, OneShotPruning, Quantization, SkipChoice, TaskEvaluation


@dataclass(frozen=True)
class TrainedModel:
    """Arguments that name a trained model."""

    model: Positional[str]
    """Trained model: a run folder, a model folder, a .gguf file, or hf:NAME."""


@dataclass(frozen=True)
class Generate(TrainedModel):
    """Arguments of `shoestring generate`."""

    prompt: str | None = None
    """Text that the model continues, or with --chat the question that it answers. `-` reads the text from standard
    input. Without --prompt, --chat reads the question from standard input; without --chat, the text is `def `."""
    settings: Generation = field(default_factory=Generation)
    """Settings of the generation."""
    report: bool = False
    """Print, after the text, the tokens per pass, the acceptance of drafts and the cost of passes."""

    def __call__(self) -> int:
        from shoestring.verbs.generate import generate

        lines: list[str] = []
        chat, prompt = self.settings.chat, self.prompt
        if prompt == "-" or (prompt is None and chat):
            if sys.stdin.isatty():
                say("the question, ended by Ctrl-D:" if chat else "the text, ended by Ctrl-D:", sys.stderr)
            prompt = sys.stdin.read()
            prompt = prompt.strip() if chat else prompt
        prompt = "def " if prompt is None else prompt
        pieces = generate(self.model, prompt, self.settings, report=lines.append if self.report else None)
        first = next(pieces, "")  # an error comes before anything is printed
        write_text(first if chat else prompt + first)
        for piece in pieces:
            sys.stdout.flush()
            write_text(piece)
        write_text("\n")
        sys.stdout.flush()
        for line in lines:
            say(line, sys.stderr)
        return 0


@dataclass(frozen=True)
class Talk(TrainedModel):
    """Arguments of `shoestring chat`."""

    settings: Conversing = field(default_factory=Conversing)
    """Settings of the conversation."""
    load: Path | None = None
    """Conversation to continue: a file that `/save` wrote."""

    def __call__(self) -> int:
        from shoestring.commands.terminal import talk
        from shoestring.verbs.chat import converse

        with closing(converse(self.model, self.settings, say=partial(say, stream=sys.stderr))) as conversation:
            if self.load is not None:
                conversation.load(self.load)
            return talk(conversation)


@dataclass(frozen=True)
class Predict(TrainedRun):
    """Arguments of `shoestring predict`; the run file names the functions that read files and describe outputs."""

    folder: Positional[Path]
    """Folder with the files; its subfolders are searched as well."""
    out: Path = Path("predictions.csv")
    """File to write the rows to, .csv or .jsonl; a page of the same name with the suffix .html is written beside it."""
    pictures: Path | None = None
    """Folder to write predicted pictures to, as PNG files; the rows then hold the files' names. By default pictures are
    only on the page."""
    settings: FilePrediction = field(default_factory=FilePrediction)
    """Settings of the predictions."""

    def __call__(self) -> int:
        from shoestring.verbs.predict import FORMATS, predict, save_page, save_pictures, save_table

        if self.out.suffix not in FORMATS:
            raise ConfigError(f"`{self.out}` is neither .csv nor .jsonl", hint="choose another --out")
        rows = predict(str(self.run), self.folder, self.settings)
        save_table(save_pictures(rows, self.pictures) if self.pictures else rows, self.out)
        page = self.out.with_suffix(".html")
        save_page(rows, f"{self.run.resolve().name} on {self.folder.resolve().name}", self.folder, page)
        failed = [row for row in rows if "error" in row]
        for row in failed[:5]:
            say(f"left out: {row['file']}: {row['error']}", sys.stderr)
        more = f", {len(failed)} left out" if failed else ""
        say(f"{len(rows) - len(failed)} rows{more}: {self.out}, {page}")
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
    """Sampling settings for requests that specify none."""
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
    """Settings for choosing the sublayers to skip."""

    def __call__(self) -> int:
        from shoestring.verbs.skip import skip

        say("\n".join(skip(self.model, self.out, self.choice)))
        return 0


@dataclass(frozen=True)
class PruneModel(TrainedModel):
    """Arguments of `shoestring prune`."""

    out: Path
    """New or empty folder to write the pruned model to."""
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
    """New or empty folder to write the quantised model to; with --format gguf, the GGUF file to write."""
    settings: Quantization = field(default_factory=Quantization)
    """Settings of the rounding."""

    def __call__(self) -> int:
        from shoestring.verbs.quantize import quantize

        say("\n".join(quantize(self.model, self.out, self.settings)))
        return 0
