"""Constraints on generated text: a grammar, compiled by llguidance, determines which tokens may follow.

llguidance (https://github.com/guidance-ai/llguidance, MIT) reads the tokenizer once, and computes for each state of a
grammar which tokens can still lead to a text that the grammar accepts.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.decode.settings.generation import FLEXIBLE_SPACE, AnswerFormat

CACHED = 64
"""Maximum number of compiled grammars in the cache."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="shoestring-masks")  # starts its thread at the first mask


class ConstraintError(ShoestringError):
    """The constraint of a text allows no next token, was violated, or cannot be evaluated."""


class Constraint:
    """The state of a grammar after the tokens of one text; it must not be shared by several texts.

    Args:
        matcher: an llguidance matcher that has not consumed any token.
        ends: tokens that end a text.
    """

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._consumed: list[int] = []
        self._begun: tuple[Any, Future[Tensor]] | None = None

    def begin(self, text: Sequence[int], drafted: Sequence[int], width: int) -> None:
        """Start computing the masks for the next call of `allowed` in another thread, in parallel with the model."""
        if self._begun is not None:
            self._begun[1].exception()  # wait for earlier masks that were not used
        asked = list(text), list(drafted), width
        self._begun = asked, _THREAD.submit(self._allowed, *asked)

    def allowed(self, text: Sequence[int], drafted: Sequence[int], width: int) -> Tensor:
        """Compute masks of the allowed tokens, bool (T, `width`): row t is for the token after the text and the first t
        of the T - 1 drafted tokens.

        After a drafted token that ends the text or that is not allowed, all tokens are allowed, because any further
        drafted tokens are discarded.

        Args:
            text: the tokens generated so far; it must begin with the `text` of the previous call.

        Raises:
            ConstraintError: no token is allowed, or the parser exceeds a limit.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            asked, masks = begun
            if asked == (list(text), list(drafted), width):
                return masks.result()
            masks.exception()  # waits
        return self._allowed(text, drafted, width)

    def _allowed(self, text: Sequence[int], drafted: Sequence[int], width: int) -> Tensor:
        # The tokens that were added since the last call are consumed first.
        added = list(text[len(self._consumed) :])
        if added and not self._matcher.consume_tokens(added):
            raise ConstraintError(f"the text does not follow its constraint: {self._matcher.get_error()}")
        self._consumed += added
        masks, tried = [self._mask(width)], 0
        try:
            for token in drafted:
                if token in self._ends or not masks[-1][token : token + 1].any():
                    break
                if self._matcher.try_consume_tokens([token]) != 1:
                    raise ConstraintError(f"the constraint cannot be followed: {self._matcher.get_error()[:200]}")
                tried += 1
                masks.append(self._mask(width))
        finally:
            if tried and not self._matcher.rollback(tried):
                raise ConstraintError(f"the constraint cannot be rolled back: {self._matcher.get_error()}")
        free = [np.ones(width, dtype=bool)] * (len(drafted) + 1 - len(masks))
        return torch.from_numpy(np.stack(masks + free))

    def _mask(self, width: int) -> np.ndarray[Any, Any]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ConstraintError(f"the constraint cannot be followed: {self._matcher.get_error()[:200]}")
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        mask = np.zeros(width, dtype=bool)
        mask[: len(allowed)] = allowed[:width]
        if not mask.any():
            raise ConstraintError("the constraint allows no token that the model has")
        return mask


class Grammar:
    """A compiled answer format; `start` creates a separate constraint for each text."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def start(self) -> Constraint:
        """Make the constraint for a new text."""
        return Constraint(self._matcher.deep_copy(), self._ends)


class Grammars:
    """Compiles answer formats for one tokenizer, and caches the newest grammars; safe to use from several threads.

    Args:
        engine: JSON of the tokenizer, in the format of the library `tokenizers`.
        vocabulary: number of tokens of the tokenizer; a model may have more or fewer.
        ends: tokens that end a text; a constraint allows them where the format is complete.

    Raises:
        ConfigError: llguidance is not installed or cannot read the tokenizer, or no token ends a text.
    """

    def __init__(self, engine: str, vocabulary: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError("answer formats need llguidance", hint="pip install shoestring[serve]") from error
        self._ends = frozenset(token for token in ends if token < vocabulary)
        if not self._ends:
            raise ConfigError("the model has no token that ends a text, so an answer with a format would not end")
        try:
            self._tokenizer = llguidance.LLTokenizer(engine, n_vocab=vocabulary, eos_token=sorted(self._ends))
        except ValueError as error:
            raise ConfigError(
                f"answer formats need a byte-level tokenizer or one with byte fallback: {str(error)[:60]}"
            ) from error
        # llguidance's default limits amount to about 20 ms for a grammar's expressions and 15 ms for each parser step.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[AnswerFormat, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, answer_format: AnswerFormat) -> Grammar:
        """Compile a format.

        Raises:
            ConfigError: the format is not valid or not supported, or compiling it takes too much work.
        """
        import llguidance

        with self._lock:
            if (grammar := self._compiled.get(answer_format)) is not None:
                self._compiled.move_to_end(answer_format)
                return grammar
        try:
            source = grammar_of(answer_format)
        except ValueError as error:
            raise ConfigError(f"the format cannot be compiled: {str(error)[:300]}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            # The message is reduced to one line, without the lines that quote the source.
            lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()] or ["it is not valid"]
            reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
            raise ConfigError(f"the format cannot be compiled: {reason[:300]}")
        grammar = Grammar(matcher, self._ends)
        try:
            grammar.start().allowed([], [], self._tokenizer.vocab_size)
        except ConstraintError as error:  # for example, a schema that refers only to itself
            raise ConfigError("no text has the format") from error
        with self._lock:
            self._compiled[answer_format] = grammar
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return grammar


def grammar_of(answer_format: AnswerFormat) -> str:
    """Convert a format to a grammar in llguidance's serialized representation.

    Raises:
        ValueError: the schema is not an object.
    """
    from llguidance import LLMatcher

    if answer_format.kind == "regex":
        return LLMatcher.grammar_from_regex(answer_format.source)
    if answer_format.kind == "choice":
        texts = json.loads(answer_format.source)  # own file: written by `read_format`
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if answer_format.kind == "grammar":
        return LLMatcher.grammar_from_lark(answer_format.source)
    return LLMatcher.grammar_from_json_schema(answer_format.source, defaults=FLEXIBLE_SPACE)
