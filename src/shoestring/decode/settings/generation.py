"""Settings of generation: sampling, drafting and verification; does not import torch."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

from shoestring.core.errors import ConfigError

log = logging.getLogger("shoestring")

Verification = Literal["token", "block", "invariant"]
Passes = Literal["auto", "plain", "graphs", "compiled"]

PENALTIES = (2.0**-64, 2.0**64)
"""Bounds of the repetition penalty, within which penalized logits stay finite in float32."""

LOOKUP, SKIP = "lookup", "skip"
"""Drafters that are not named after a model: prompt lookup, and the model itself without some of its sublayers."""


def is_finite(number: float) -> bool:
    """Whether a number is finite in float32."""
    try:
        return math.isfinite(struct.unpack("f", struct.pack("f", float(number)))[0])
    except OverflowError:
        return False


def _refuse(name: str, value: object, hint: str) -> None:
    raise ConfigError(f"{name} is {value}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class SamplingRule:
    """Sampling of the next token from the model's logits.

    The steps are applied in the order repetition penalty, temperature, top-k, top-p, min-p; each filter sees only the
    tokens that earlier filters have kept. Values are used in float32: a value that is infinite in float32 is refused,
    and a value that is too small for float32 acts like the smallest number of float32.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all."""
    min_p: float = 0.0
    """Smallest probability of a token that may be sampled, as a fraction of the likeliest token's probability; 0
    samples from all."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already holds: their logits are divided by it where positive and
    multiplied by it where negative; 1 is no penalty, larger values reduce repetition."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and is_finite(self.temperature)):
            _refuse("temperature", self.temperature, "give 0 for the likeliest token, or a positive number")
        if self.top_k < 0:
            _refuse("top_k", self.top_k, "give 0 for all tokens, or a positive number")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "give a number above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "give a number from 0 to 1")
        if not PENALTIES[0] <= self.repetition_penalty <= PENALTIES[1]:
            _refuse(
                "repetition_penalty", self.repetition_penalty, "give a number from 2**-64 to 2**64; 1 is no penalty"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class _Seeded:
    """Base class of the settings that seed the sampling of one text."""

    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""


@dataclass(frozen=True, kw_only=True)
class Sampling(_Seeded, SamplingRule):
    """Sampling of one text: the sampling rule, and the seed of the text's random numbers.

    Raises:
        ConfigError: a value is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**63:
            _refuse("seed", self.seed, "give an integer from 0, below 2**63")


PENALTY = 2.0
"""Largest size of the penalties for presence and frequency, as in OpenAI's API."""
BIAS = 100.0
"""Largest size of the bias of a token, as in OpenAI's API; a bias of this size nearly always decides the choice."""


@dataclass(frozen=True, kw_only=True)
class LogitChanges:
    """Changes to the model's logits before all steps of `SamplingRule`; reported log-probabilities do not include them.

    Raises:
        ConfigError: a value is out of range.
    """

    presence_penalty: float = 0.0
    """Subtracted from the logits of each token that was generated before; tokens of the prompt do not count."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of a token for each time that it was generated before."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens."""

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -PENALTY <= getattr(self, name) <= PENALTY:
                _refuse(name, getattr(self, name), f"give a number from -{PENALTY:g} to {PENALTY:g}")
        if not all(token >= 0 and -BIAS <= value <= BIAS for token, value in self.bias.items()):
            _refuse("the bias of a token", dict(self.bias), f"give numbers from -{BIAS:g} to {BIAS:g}")


FormatKind = Literal["json_schema", "regex", "choice", "grammar"]
FLEXIBLE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Options of llguidance: between JSON tokens, white space of up to 64 characters is allowed. Without this limit, a
model at a high temperature might write nothing but white space."""


class AnswerFormat(NamedTuple):
    """The format that an answer must have."""

    kind: FormatKind
    """`json_schema`: a JSON document; `regex`: a text that a regular expression matches as a whole; `choice`: one of
    several texts; `grammar`: a text that a grammar accepts."""
    source: str
    """The schema as returned by `schema_forms.written`, the regular expression, a JSON list of texts, or the grammar in
    llguidance's variant of Lark's syntax."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Optional settings of sampling; a setting that is None defaults to the value in the model's
    generation_config.json. If that file names none of temperature, top_k, top_p and min_p, the defaults of the command
    apply; if it names some of them, the others have no effect (a temperature of 1, no filter).

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float | None = None
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token; defaults
    to the model's own, or else to 0.8 in `generate` and 1 in `serve`."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from; 0 samples from all; defaults to the model's own, or else to all."""
    top_p: float | None = None
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all; defaults to the
    model's own, or else to 0.95 in `generate` and 1 in `serve`."""
    min_p: float | None = None
    """Smallest probability of a token that may be sampled, as a fraction of the likeliest token's probability; 0
    samples from all; defaults to the model's own, or else to all."""
    repetition_penalty: float | None = None
    """Penalty on tokens that the prompt or the text already holds: their logits are divided by it where positive and
    multiplied by it where negative; 1 is no penalty, larger values reduce repetition; defaults to the model's own, or
    else to 1."""

    def __post_init__(self) -> None:
        SamplingRule(**self.chosen)

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings that are not None."""
        values = {name: getattr(self, name) for name in _RULE}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, model: Mapping[str, Any], otherwise: SamplingRule) -> SamplingDefaults:
        """Combine these settings, the model's own settings (`model`) and the command's defaults (`otherwise`) into a
        rule.

        Settings of the model that are out of range are ignored, with a warning.
        """
        own: dict[str, Any] = {}
        for name, value in model.items():
            try:
                SamplingRule(**{name: value})
            except ConfigError as error:
                log.warning("a setting in the model's generation_config.json is ignored: %s", error.parts()[1])
            else:
                own[name] = value
        base = SamplingRule() if own.keys() - {"repetition_penalty"} else otherwise
        rule = replace(base, **{**own, **self.chosen})
        return SamplingDefaults(rule, {name: value for name, value in own.items() if name not in self.chosen})


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling rule in force, and which of its settings come from the model."""

    rule: SamplingRule
    from_model: Mapping[str, float]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {value:g}" for name, value in self.from_model.items())
        return f"sampling as the model's generation_config.json says: {named}" if named else ""


_RULE = tuple(rule.name for rule in fields(SamplingRule))


@dataclass(frozen=True, kw_only=True)
class SeededOptions(_Seeded, SamplingOptions):
    """Optional settings of sampling of one text, and the seed of the text's random numbers.

    Raises:
        ConfigError: a value is out of range.
    """

    def __post_init__(self) -> None:
        Sampling(**self.chosen, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: a cheap drafter proposes tokens, and the model verifies several of them in one pass.

    Whatever the drafter proposes, the text follows the model's own distribution.

    Raises:
        ConfigError: a value is out of range.
    """

    draft: str = ""
    """Drafter, which proposes tokens that the model then verifies several at a time to generate faster: the folder or
    `hf:NAME` of a smaller model with the same vocabulary, `lookup` (continuations of repeated passages) or `skip` (the
    model itself without some sublayers, which has been slower than plain decoding wherever it was measured: 0.62 to
    0.79 times its speed for 12 layers of width 128 on a CPU); by default nothing is drafted."""
    draft_dtype: Literal["own", "model"] = "own"
    """Data type of the weights of a smaller model that drafts: `own` keeps the data type of its files, `model` converts
    them to the data type of the model that verifies; weights of a narrower data type are read faster."""
    draft_length: int = 0
    """Number of tokens to draft before each pass of the model; 0 chooses the number from measured acceptance and cost,
    and drafts nothing where plain decoding is faster."""
    max_draft_length: int = 16
    """Largest number of tokens to draft before one pass; bounds the automatic choice and the memory of a pass."""
    verification: Verification = "invariant"
    """Rule that decides which drafted tokens stay. Every rule keeps the model's distribution: `invariant` also gives,
    at the same seed, the text that the model gives without drafts; `token` and `block` may give another text of the
    same distribution and accept somewhat more tokens of a drafter that samples; `block` accepts the most."""

    def __post_init__(self) -> None:
        if self.max_draft_length < 1:
            _refuse("max_draft_length", self.max_draft_length, "give a positive number")
        if not 0 <= self.draft_length <= self.max_draft_length:
            _refuse("draft_length", self.draft_length, f"give 0 to choose it, or up to {self.max_draft_length}")
        if self.verification not in get_args(Verification):
            _refuse("verification", self.verification, "give `token`, `block` or `invariant`")
        if self.draft_dtype not in ("own", "model"):
            _refuse("draft_dtype", self.draft_dtype, "give `own` or `model`")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of the model's forward passes and of its drafter, which `generate` and `serve` share."""

    speculation: Speculation = Speculation()
    """Settings of speculative decoding, by which tokens are drafted and verified."""
    passes: Passes = "auto"
    """Way to run passes over few tokens: `plain` launches their kernels one by one, `graphs` replays them as CUDA
    graphs, and `compiled` also compiles them, which takes minutes at first use; `auto` takes graphs on a GPU where the
    model allows it, and plain passes elsewhere."""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Settings of text generation with a trained model, which `generate` and `chat` share."""

    max_tokens: int = 256
    """Largest number of tokens to generate; an end-of-text token ends the text earlier."""
    sampling: SeededOptions = SeededOptions()
    """Settings of sampling; default to the model's own, or else to a temperature of 0.8 and a top_p of 0.95."""
    decoding: Decoding = Decoding()
    """Settings of the model's forward passes and of speculative decoding."""
    skip_special_tokens: bool = True
    """Hide special tokens in the text that is generated. Added tokens that a tokenizer does not flag as special, such
    as `<think>`, are always shown."""
    skip: str = ""
    """Sublayers to skip, which speeds up generation and costs quality: either the fraction of the bytes moved per token
    that skipping avoids, such as 0.2, for sublayers chosen by the prompt, or the file of a plan that `shoestring skip`
    wrote; by default nothing is skipped."""

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            _refuse("max_tokens", self.max_tokens, "give a positive number")


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Inputs of a model's chat template besides the conversation.

    Raises:
        ConfigError: `template_arguments` is not a JSON object.
    """

    system: str = ""
    """System message, with which the conversation begins; by default there is none."""
    template_arguments: str = ""
    """Further variables of the chat template, as a JSON object: `{"enable_thinking": false}`."""

    def __post_init__(self) -> None:
        self.variables()

    def variables(self) -> dict[str, Any]:
        """Parse `template_arguments`."""
        try:
            variables = json.loads(self.template_arguments or "{}")  # own file: a flag
        except ValueError:
            variables = None
        if not isinstance(variables, dict):
            hint = 'give a JSON object: {"enable_thinking": false}'
            raise ConfigError(f"template_arguments is `{self.template_arguments}`", hint=hint)
        return variables


@dataclass(frozen=True, kw_only=True)
class Generation(TextSettings, TemplateOptions):
    """Generation of one text with a trained model.

    Raises:
        ConfigError: a value is out of range, or has no effect without `chat`.
    """

    chat: bool = False
    """Format the prompt as a question by the model's chat template, and write only the answer."""
    parse_special: bool = True
    """Read text of the prompt that spells a special token, such as `<|im_start|>`, as that token; otherwise as ordinary
    characters. In a chat, such text is always read as ordinary characters."""

    def __post_init__(self) -> None:
        TextSettings.__post_init__(self)
        TemplateOptions.__post_init__(self)
        for name in ("system", "template_arguments"):
            if getattr(self, name) and not self.chat:
                raise ConfigError(f"{name} has no effect on a prompt that is continued as it is", hint="add --chat")


@dataclass(frozen=True, kw_only=True)
class Conversing(TextSettings, TemplateOptions):
    """A conversation with a trained model, formatted by the model's chat template.

    Raises:
        ConfigError: a value is out of range.
    """

    max_tokens: int = 0
    """Largest number of tokens of an answer; 0 allows as many as the context has room for."""
    context: int = 0
    """Largest number of tokens of the conversation that the model sees; 0 is the model's own, at most 8,192. If the
    conversation is longer, the oldest questions are left out with their answers."""

    def __post_init__(self) -> None:
        TextSettings.__post_init__(self)
        TemplateOptions.__post_init__(self)
        if self.context < 0:
            _refuse("context", self.context, "give 0 for the model's own, or a positive number")
