"""Settings of the verbs, for the command line and for Python programs; importing them does not import torch.

The settings of `generate` and `serve` are in `decode.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from shoestring.core.errors import ConfigError

ExportFormat = Literal["safetensors", "dcp", "hf"]
ImportFormat = Literal["safetensors", "dcp"]


@dataclass(frozen=True, kw_only=True)
class SampleText:
    """Text on which a verb measures a model."""

    data: str = ""
    """Text to measure on, in the form of run.data; defaults to the data of the run that trained the model."""
    samples: int = 128
    """Number of samples of text to measure on; more make the result more exact and take longer."""
    sequence: int = 512
    """Number of tokens in each sample; lowered to the context of the model if that is smaller."""


@dataclass(frozen=True, kw_only=True)
class OneShotPruning:
    """Pruning of a trained model to 2:4 sparsity, without further training."""

    method: Literal["magnitude", "wanda"] = "magnitude"
    """Score by which two of every four weights are kept: the magnitude of a weight, or its magnitude times the norm of
    its inputs (wanda). The norms are measured on text; wanda changes the outputs of the model less."""
    format: Literal["dense", "packed"] = "dense"
    """Format of the weights: dense with zeros, which any program can read, or packed, which takes a little over half
    the bytes but can be read by shoestring only."""
    layers: tuple[str, ...] = ()
    """Patterns of the names of the linear layers to prune; by default all linear layers of the blocks, but not the
    output layer."""
    text: SampleText = SampleText()
    """Text on which wanda measures the inputs of layers."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Rounding of the weights of a trained model, without further training."""

    bits: Literal[8, 4, 16, 32] = 8
    """Number of bits per weight; 8 and 4 add a 16-bit scale for every 32 weights. 8 hardly changes the loss; 4 halves
    the bytes again and raises the loss somewhat. At 8 and at 4 bits, embeddings and the output layer get 8 bits, and
    layers that choose experts are not rounded. 16 and 32 are floating point, and only serve to write a GGUF file or to
    convert one into a folder."""
    format: Literal["safetensors", "gguf"] = "safetensors"
    """Format to write: a folder with safetensors, which shoestring reads, or a GGUF file, which llama.cpp and related
    programs can read as well (the architectures in docs/guides/quantized-models.md)."""


@dataclass(frozen=True, kw_only=True)
class SkipChoice:
    """Choice of the sublayers of a model to skip."""

    share: float = 0.2
    """Fraction of the bytes moved per token that skipping avoids; larger is faster but lowers quality more."""
    context: int = 0
    """Context length, in tokens, at which bytes are counted; attention moves more bytes at a longer context. Defaults
    to the length of a sample."""
    text: SampleText = SampleText(samples=32)
    """Text on which the cost of skipping is measured."""


@dataclass(frozen=True, kw_only=True)
class FilePrediction:
    """Settings of the predictions for one's own files."""

    pattern: str = "*"
    """Names of the files to read, with the wildcards `*` and `?`, in the folder and in its subfolders."""
    batch: int = 32
    """Number of files in a forward pass; more are faster on a GPU and take more memory."""
    best: bool = False
    """Use the model in the folder `best` of the run instead of the model of the last step."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"--batch is {self.batch}", hint="give at least 1")


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Evaluation of a trained model on tasks of lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """Tasks to run: names of tasks, groups or tags of lm-evaluation-harness, or YAML files of tasks."""
    fewshot: int | None = None
    """Number of solved examples in each prompt; defaults to the number that the task sets, or to 0 if it sets none."""
    limit: int = 0
    """Number of documents of each task to run, starting with the first; 0 runs all."""
    batch: int = 8
    """Number of texts in a forward pass; more are faster on a GPU and take more memory. Results do not depend on it."""
    context: int = 0
    """Maximum number of tokens that the model sees; in longer texts the oldest tokens are left out. Defaults to the
    context of the model."""
    chat: bool = False
    """Write prompts as chats, with the model's chat template; for models that were tuned on chats."""
    system: str = ""
    """System message; without --chat, text at the start of each prompt."""
    generation: str = ""
    """Generation settings that replace the settings of the tasks, such as `max_gen_toks=64,temperature=0.8`; by default
    each task decides, and texts are generated without sampling unless the task samples."""
    samples: bool = False
    """Include each document, prompt and answer of the model in the results file."""


@dataclass(frozen=True, kw_only=True)
class DataView:
    """Settings for reading and showing training data. A run file determines all of these settings except `first` and
    `most`."""

    model: str = ""
    """Model whose tokenizer and chat template are used: a run folder, a model folder, or hf:NAME. Plain text can be
    shown without a model."""
    form: Literal["auto", "text", "chat"] = "auto"
    """Form of the records: text, chat, or auto, which looks at the first record."""
    field: str = ""
    """Name of the field that holds the text or the messages, or a mapping such as `prompt=question, completion=answer`,
    as in data.field."""
    template: str = ""
    """Path of a chat template (a Jinja file), for a model that has no template."""
    sequence: int = 0
    """Number of tokens in a sample; longer chats are cut off. 0 uses the model's context, but at most 1,024 tokens."""
    first: int = 3
    """Number of records to show in full; all other records are only counted."""
    most: int = 1000
    """Maximum number of records to read; 0 reads all of them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointImport:
    """Settings for importing a checkpoint or a model that another program wrote."""

    format: Annotated[ImportFormat, arg(name="as")] = "safetensors"
    """Format of the files to import; a Hugging Face model counts as safetensors."""
    step: int | None = None
    """Number of training steps that count as done; defaults to the number in the imported files, or to 0."""
    model: str = "model"
    """Name of the model's state in a dcp checkpoint; empty if the checkpoint holds nothing but a model's state."""
    optimizer: str = "optimizer"
    """Name of the optimizer's state in a dcp checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ProgramProfiling:
    """Profiling of a Python program, with times for each of its lines."""

    out: Path | None = None
    """File to save the profile to; defaults to profile.npz, and under torchrun to profile-RANK.npz for each rank."""
    share: float = 1.0
    """Fraction of the time in which operators are recorded, above 0 and at most 1. Below 1, counts and times are
    estimates that are scaled up; a smaller fraction slows the program less and gives less certain estimates."""
    budget: float | None = None
    """Processor time that profiling may add, as a fraction of the program's own time: 0.03 is 3%. The fraction of
    time in which operators are recorded is then chosen to fit."""
    native_frames: bool = False
    """Sample the native functions that operators spend their time in, such as those of MKL. Linux only."""
    inside: str = ""
    """Names of installed packages, separated by commas, whose lines count as the program's own, such as
    `transformers`."""
