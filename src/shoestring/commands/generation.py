"""The verbs that generate text and choose what to skip of a model; importing this module imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained model, token by token."""

    run: Positional[Path]
    """Run folder, or folder with a model in Hugging Face's Llama layout."""
    prompt: str = "def "
    """Text that the model continues."""
    tokens: int = 256
    """Largest number of tokens to generate; an end-of-text token ends the text earlier."""
    temperature: float = 0.8
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = 0.95
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all."""
    min_p: float = 0.0
    """Least probability of a token that may be sampled, as a fraction of the likeliest token's; 0 samples from all."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already holds; 1 is no penalty, larger values repeat less."""
    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""
    draft: str = ""
    """Proposes tokens that the model then verifies several at a time, which is faster: the folder or `hf:NAME` of a
    smaller model with the same vocabulary, `lookup` (continuations of repeated passages) or `skip` (the model itself
    without some sublayers); by default nothing is drafted."""
    draft_dtype: Literal["own", "model"] = "own"
    """Data type of the weights of a smaller model that drafts: that of its files (`own`), or that of the model that
    verifies (`model`); the narrower one is read faster."""
    draft_length: int = 0
    """Number of tokens to draft before each pass of the model; 0 chooses it from measured acceptance and cost."""
    verification: Literal["token", "block", "invariant"] = "invariant"
    """Rule that decides which drafted tokens stay; each keeps the model's distribution, and `invariant` also the text
    that the seed gives without drafts, while `block` accepts somewhat more."""
    skip: str = ""
    """Sublayers to skip, which is faster and costs quality: the share of the bytes moved for a token that is saved,
    such as 0.2, by a choice learnt from the prompt, or the file of a plan by `shoestring skip`; by default none."""
    passes: Literal["auto", "plain", "graphs", "compiled"] = "auto"
    """Way to run passes over few tokens: `plain` launches their kernels one by one, `graphs` replays them as CUDA
    graphs, and `compiled` also compiles them, which takes minutes at first use; `auto` takes graphs on a GPU where the
    model allows it, and plain passes elsewhere."""
    report: bool = False
    """Print, after the text, the tokens per pass, the acceptance of drafts and what passes cost."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.generate import stream
        from shoestring.decode.settings import Sampling, Speculation

        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )
        speculation = Speculation(
            drafter=self.draft,
            drafter_dtype=self.draft_dtype,
            draft_length=self.draft_length,
            verification=self.verification,
        )
        lines: list[str] = []
        report = lines.append if self.report else None
        pieces = stream(self.run, self.prompt, self.tokens, sampling, speculation, report, self.skip, self.passes)
        sys.stdout.write(self.prompt + next(pieces, ""))  # errors are raised before anything is printed
        for piece in pieces:
            sys.stdout.flush()
            sys.stdout.write(piece)
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in lines:
            print(line, file=sys.stderr)
        return 0


@dataclass(frozen=True)
class Skip:
    """Choose the attention and feed-forward sublayers whose skipping costs least, from sample text, for `generate`."""

    model: Positional[str]
    """Run folder, model folder, or hf:NAME."""
    out: Path = Path("plan.json")
    """File to write the plan to."""
    share: float = 0.2
    """Share of the bytes moved for a token that is saved; larger is faster and costs more quality."""
    context: int = 0
    """Tokens of context to count bytes at, which make attention dearer; defaults to the length of a sample."""
    data: str = ""
    """Text to measure on, as run.data names it; defaults to the data of the run that the model is from."""
    samples: int = 32
    """Number of samples of text to measure on; more are slower and more exact."""
    sequence: int = 512
    """Tokens in each of these samples, at most the context of the model."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.skip import skip

        for line in skip(self.model, self.out, self.share, self.context, self.data, self.samples, self.sequence):
            print(line, flush=True)
        return 0
