"""The columns of the matrix: what is promised for any causal model, each tried on a model of the zoo as users have it.

A cell is yes, refused with the reason that the user reads, or no with what went wrong. A refusal counts only where the
program makes it by itself, before it has done anything.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from benchmarks.models import zoo
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.decode.adapter import Whole, adapt
from shoestring.decode.engine import Engine, generate
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling
from shoestring.models.loading import load_model
from shoestring.verbs.prune import prune
from shoestring.verbs.quantize import quantize
from shoestring.verbs.settings import OneShotPruning, Quantization

PROMPT, TOKENS = 40, 16
"""Tokens of a prompt, which crosses every window and switch, and tokens that are generated."""
TIE = 1e-5
"""Difference of the two best logits below which either token is right."""
BESIDE = {
    "generation_config.json": {
        "bos_token_id": zoo.END,
        "eos_token_id": [zoo.END, 7],
        "pad_token_id": zoo.END,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
    },
    "chat_template.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}",
    "LICENSE": "Whoever publishes weights chooses a licence.",
}
"""Files beside the weights of every model of the matrix."""

State = Literal["yes", "refused", "no"]


class Cell(NamedTuple):
    """What became of one promise for one model."""

    state: State
    reason: str = ""


YES = Cell("yes")


@dataclass
class Case:
    """A model of the zoo in folders as others have it; what several columns need is made once."""

    name: str
    folder: Path

    @cached_property
    def exact(self) -> Path:
        """Its folder in float64, in which rounding decides between hardly any two tokens."""
        return self._saved("exact", torch.float64)

    @cached_property
    def plain(self) -> Path:
        """Its folder in float32, as it is trained and converted."""
        return self._saved("plain", torch.float32)

    def _saved(self, name: str, dtype: torch.dtype) -> Path:
        folder = self.folder / name
        zoo.build(self.name, dtype=dtype).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder, zoo.CONTEXT)
        for file, content in BESIDE.items():
            (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    @cached_property
    def theirs(self) -> nn.Module:
        return opened_by_transformers(self.exact)

    @cached_property
    def ours(self) -> nn.Module:
        return load_model(f"hf:{self.exact}")[0]

    def prompts(self, lengths: Sequence[int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(self.name))
        return [torch.randint(32, 127, (length,), generator=generator) for length in lengths]

    def trained(self, name: str, lines: str = "") -> Path:
        """The folder of a run of three steps from the float32 model; `lines` are added to its run file.

        It is stopped, which exports the model too: a finished run predicts its memory again for the report.
        """
        words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat"], k=1500)
        (self.folder / "text.txt").write_text("\n".join(map(" ".join, zip(*[iter(words)] * 10, strict=False))))
        run = self.folder / f"{name}.toml"
        run.write_text(
            f'[run]\nmodel = "hf:{self.plain}"\ndata = "{self.folder / "text.txt"}"\nsteps = 9\nbatch = 2\n'
            f'folder = "{self.folder / name}"\n'
            f'[data]\ntokenizer = "model"\nsequence = 48\n[optim.adamw]\nlr = 1e-2\n{lines}'
        )
        from shoestring import run as runs
        from shoestring.core.world import World
        from shoestring.report.recorder import Recorder
        from shoestring.training.loop import train

        calls = count(1)
        with Recorder() as record:
            return train(runs.load(str(run)), World(), record, stop=lambda: next(calls) >= 3).folder

    @cached_property
    def tuned(self) -> Path:
        """The folder of a run that trained all weights."""
        return self.trained("tuned")

    @cached_property
    def adapted(self) -> Path:
        """The folder of a run that trained adapters."""
        return self.trained("adapted", "[memory.lora]\nrank = 4\n")


def opened_by_transformers(folder: Path) -> nn.Module:
    """A model as transformers opens it, in evaluation mode."""
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if next(model.parameters()).dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others multiply no float64
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, T, V) of whole texts (B, T)."""
    output = model(tokens, use_cache=False) if hasattr(model, "generate") else model(tokens)
    return getattr(output, "logits", output)


def difference(first: nn.Module, second: nn.Module, tokens: Tensor, *, median: bool = False) -> float:
    """Largest difference of the logits of two models, as a multiple of the standard deviation of the second's.

    Args:
        median: of the largest differences after each token, since a mixture that chooses other experts jumps.
    """
    one, other = logits_of(first, tokens).double(), logits_of(second, tokens).double()
    largest = (one - other).abs().amax(-1)
    return float((largest.median() if median else largest.max()) / other.std().clamp_min(1e-12))


def near(what: str, distance: float, most: float) -> Cell:
    """Yes if a distance is small enough, else no with the distance."""
    return YES if distance <= most else Cell("no", f"{what} by {distance:.2g} standard deviations")


# -- generation --------------------------------------------------------------------------------------------------------


def tokens(case: Case) -> Cell:
    """Greedy tokens are those of transformers, or differ first where its two best logits are as good as equal."""
    (prompt,) = case.prompts([PROMPT])
    settings = importlib.import_module("transformers").GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=zoo.END
    )
    theirs: Any = case.theirs
    theirs.generation_config = settings
    ours = _greedy(case.ours, prompt)
    wanted = theirs.generate(prompt[None], generation_config=settings)[0, PROMPT:].tolist()
    if (cell := same_tokens(case, prompt, ours, wanted)).state == "yes":
        return cell
    without = theirs.generate(prompt[None], generation_config=settings, use_cache=False)[0, PROMPT:].tolist()
    if same_tokens(case, prompt, ours, without).state == "yes":
        return Cell("yes", "those without a cache: transformers' own cache gives it other tokens")
    return cell


def _greedy(model: nn.Module, prompt: Tensor) -> list[int]:
    return list(generate(model, prompt, max_new=TOKENS, sampling=Sampling(temperature=0)))


def same_tokens(case: Case, prompt: Tensor, ours: Sequence[int], wanted: Sequence[int]) -> Cell:
    """Yes if two texts are equal, or unequal first where the two best tokens are as good as equal."""
    if list(ours) == list(wanted):
        return YES
    place = next((at for at, (one, other) in enumerate(zip(ours, wanted, strict=False)) if one != other), None)
    if place is None:
        return Cell("no", f"{len(ours)} tokens and not {len(wanted)}")
    text = torch.cat([prompt, torch.tensor(wanted[:place], dtype=torch.int64)])
    last = logits_of(case.theirs, text[None])[0, -1].double()
    apart = float(last[wanted[place]] - last[ours[place]])
    return YES if abs(apart) < TIE else Cell("no", f"token {place + 1} is another, whose logit is less by {apart:.2g}")


def batches(case: Case) -> Cell:
    """Each of several texts of unlike lengths is what it is alone."""
    prompts = case.prompts([PROMPT, 3, 21, 1])
    engine = Engine(case.ours, slots=len(prompts), room=PROMPT + TOKENS + 1)
    rows = [
        engine.submit(Request(tokens=prompt.tolist(), max_new=TOKENS, sampling=Sampling(temperature=0)))
        for prompt in prompts
    ]
    while engine.busy:
        engine.step()
    engine.close()
    for row, prompt in zip(rows, prompts, strict=True):
        if row.error is not None:
            raise row.error
        cell = same_tokens(case, prompt, row.history[len(prompt) :], _greedy(case.ours, prompt))
        if cell.state != "yes":
            return Cell("no", f"the text of {len(prompt)} tokens: {cell.reason}")
    return YES


def cache(case: Case) -> Cell:
    """A cache is used where transformers has one."""
    (prompt,) = case.prompts([PROMPT])
    with torch.no_grad():
        output = case.theirs(prompt[None], use_cache=True)
    theirs = next((key for key in ("past_key_values", "cache", "cache_params", "state") if output.get(key)), "")
    if not theirs:
        return Cell("refused", "transformers has none")
    if isinstance(adapt(case.ours), Whole):
        return Cell("no", f"the whole text is read for each token, and transformers has `{theirs}`")
    return YES


# -- weights -----------------------------------------------------------------------------------------------------------


def _quantized(case: Case, bits: Literal[8, 4], most: float) -> Cell:
    out = case.folder / f"bits{bits}"
    try:
        quantize(str(case.plain), out, Quantization(bits=bits))
    except ConfigError as error:
        return Cell("refused", error.parts()[1])
    opened, (prompt,) = load_model(out)[0], case.prompts([PROMPT])
    if (size := len(_greedy(opened, prompt))) != TOKENS:
        return Cell("no", f"{size} tokens generated and not {TOKENS}")
    apart = difference(opened, load_model(f"hf:{case.plain}")[0], prompt[None], median=True)
    return near("logits are off", apart, most)


def eight_bits(case: Case) -> Cell:
    """Rounded to 8 bits, saved and opened, the logits are near, and it generates."""
    return _quantized(case, 8, 0.3)


def four_bits(case: Case) -> Cell:
    """Rounded to 4 bits, saved and opened, the logits are not far, and it generates."""
    return _quantized(case, 4, 5.0)


def packed(case: Case) -> Cell:
    """Pruned and packed 2:4, it opens with the logits of the same weights with zeros."""
    try:
        prune(str(case.plain), case.folder / "packed", OneShotPruning(format="packed"))
    except ConfigError as error:
        return Cell("refused", error.parts()[1])
    prune(str(case.plain), case.folder / "zeros", OneShotPruning())
    dense, (prompt,) = opened_by_transformers(case.folder / "zeros"), case.prompts([PROMPT])
    return near("logits differ", difference(load_model(case.folder / "packed")[0], dense, prompt[None]), 1e-3)


# -- training ----------------------------------------------------------------------------------------------------------


def saved(case: Case) -> Cell:
    """All weights are trained; we and transformers open what is exported, with equal logits."""
    model = case.tuned / "model"
    (prompt,) = case.prompts([PROMPT])
    ours, theirs = load_model(model)[0], opened_by_transformers(model)
    if difference(ours, opened_by_transformers(case.plain), prompt[None]) < 1e-3:
        return Cell("no", "training changed nothing")
    return near("logits differ from transformers'", difference(ours, theirs, prompt[None]), 1e-5)


def lora(case: Case) -> Cell:
    """Adapters are trained; merged and in PEFT they compute the same."""
    model = case.adapted / "model"
    (prompt,) = case.prompts([PROMPT])
    ours, base = load_model(model)[0], opened_by_transformers(case.plain)
    if difference(ours, base, prompt[None]) < 1e-3:
        return Cell("no", "training changed nothing")
    apart = difference(opened_by_transformers(model), ours, prompt[None])
    if apart > 1e-5:
        return near("merged, logits differ from transformers'", apart, 1e-5)
    theirs = importlib.import_module("peft").PeftModel.from_pretrained(base, model / "adapter").eval()
    if (apart := difference(theirs.base_model.model, ours, prompt[None])) > 1e-3:
        return near("PEFT's logits differ", apart, 1e-3)
    return near(
        "opened as adapters, logits differ", difference(load_model(model / "adapter")[0], ours, prompt[None]), 1e-3
    )


def chats(case: Case) -> Cell:
    """Packed chats do not see each other, or are read one by one."""
    try:
        behaviour = importlib.import_module("shoestring.models.behaviour")
    except ImportError:
        return Cell("no", "nothing tries it before training")
    model = load_model(f"hf:{case.plain}")[0]
    cast(Any, model).config.use_cache = False  # as in training
    fault = behaviour.packing_fault(model, zoo.VOCABULARY)
    return Cell("refused", f"one chat a sample: {fault}") if fault else YES


def beside(case: Case) -> Cell:
    """What lay beside the weights lies beside those of both runs, and what training switched is switched back."""
    config = _comparable(case.plain)
    # What transformers itself changes when it opens and saves a model is not ours.
    cast(Any, opened_by_transformers(case.plain)).save_pretrained(case.folder / "again")
    again = _comparable(case.folder / "again")
    for run in (case.tuned, case.adapted):
        for name, content in BESIDE.items():
            file = run / "model" / name
            if not file.is_file():
                return Cell("no", f"{name} is gone")
            if isinstance(content, str):
                if file.read_text() != content:
                    return Cell("no", f"{name} is another text")
                continue
            entries = json.loads(file.read_text())
            if lost := [key for key, value in content.items() if entries.get(key) != value]:
                return Cell("no", f"{name}: {', '.join(lost)}")
        exported = _comparable(run / "model")
        differs = [key for key, value in config.items() if exported.get(key) != value]
        if changed := [key for key in differs if key not in again or exported.get(key) != again[key]]:
            return Cell("no", f"config.json: {', '.join(changed)}")
    return YES


def _comparable(folder: Path) -> dict[str, Any]:
    """A model's configuration, without what says who wrote it and in which precision."""

    def without(entry: Any) -> Any:
        ours = {"transformers_version", "architectures", "dtype"}
        return (
            {key: without(value) for key, value in entry.items() if key not in ours}
            if isinstance(entry, dict)
            else entry
        )

    return without(json.loads((folder / "config.json").read_text()))


COLUMNS: dict[str, Callable[[Case], Cell]] = {
    "tokens": tokens,
    "batches": batches,
    "cache": cache,
    "8 bits": eight_bits,
    "4 bits": four_bits,
    "2:4": packed,
    "saved": saved,
    "LoRA": lora,
    "chats": chats,
    "beside": beside,
}
"""The function of each column; called with a case."""


def measure(case: Case, columns: Sequence[str]) -> dict[str, Cell]:
    """The cells of a case; whatever a column raises is a no with the error."""
    logging.getLogger("shoestring").setLevel(logging.ERROR)
    try:
        # Not `theirs`: some models keep the state of a text in themselves.
        opened_by_transformers(case.exact)(case.prompts([PROMPT])[0][None])
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        return dict.fromkeys(columns, Cell("refused", f"transformers cannot run it: {line}"[:300]))
    cells = {}
    for column in columns:
        try:
            cells[column] = COLUMNS[column](case)
        except Exception as error:
            line = error.parts()[1] if isinstance(error, ShoestringError) else str(error).strip().partition("\n")[0]
            cells[column] = Cell("no", f"{type(error).__name__}: {line}"[:300])
    return cells
