"""A model with the interface of lm-evaluation-harness: scores continuations and whole texts, and generates text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from torch import nn
from tqdm import tqdm

from shoestring.core.errors import ConfigError
from shoestring.data.chat_template import template_source
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.tokenizer import Tokenizer, companion_config, special_token
from shoestring.decode.adapter import adapt
from shoestring.decode.engine import Engine
from shoestring.decode.harness.scoring import Score, score
from shoestring.decode.request import Request
from shoestring.decode.serve.writing import Writing
from shoestring.decode.settings.generation import Sampling

log = logging.getLogger("shoestring")

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of a task's setting for the largest number of tokens to generate; the first name that is present counts."""
LONGEST = 256
"""Largest number of tokens to generate if a task does not set one, as in the harness's own models."""
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(LM):
    """Any model that shoestring can open, with the interface that `lm_eval.simple_evaluate(model=...)` expects.

    Texts are tokenised like in the harness's `hf` model: with the special tokens that the tokenizer puts before a text,
    unless the text begins with them. A text that is scored without a context is preceded by the beginning-of-text token
    or, if there is none, by the end-of-text token; unlike in `hf`, the beginning-of-text token itself is not scored.

    Args:
        model: the model, on its device; it must be in evaluation mode.
        ends: ids of tokens that end a generated text.
        batch: number of texts in a forward pass; it does not change the results.
        context: largest number of tokens that the model sees; defaults to the model's own. Longer texts lose their
            oldest tokens.
        progress: show progress bars on a terminal.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        ends: Iterable[int],
        *,
        batch: int = 8,
        context: int | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__()
        if batch < 1:
            raise ConfigError(f"a batch of {batch} texts", hint="give 1 or more")
        self.adapter = adapt(model, context)
        self.texts, self.ends, self.batch, self.progress = tokenizer, frozenset(ends), batch, progress
        self._device = self.adapter.device
        self._template: ConfinedTemplate | None = None
        self._warned: set[str] = set()

    def close(self) -> None:
        """End the process that renders the chat template."""
        if self._template is not None:
            self._template.close()

    # -- what the harness calls ----------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding would generate it."""
        pairs: list[tuple[list[int], list[int]]] = []
        for context, continuation in (request.args for request in requests):
            # White space at the end of the context is moved to the beginning of the continuation, because tokens begin
            # with white space rather than end with it.
            stripped = context.rstrip()
            continuation = context[len(stripped) :] + continuation
            if stripped:
                before, whole = self._encode(stripped), self._encode(stripped + continuation)
                # If tokens merge across the border of the two texts, none may remain for the continuation, which is
                # then encoded alone.
                after = whole[len(before) :] or self._encode(continuation, prefix=False)
            else:
                after = self._encode(continuation, prefix=False)
                before = self._begin
                after = after[1:] if after[:1] == before else after
            pairs.append((before, after))
        results = [(logprob, greedy) for logprob, greedy in self._scores("continuations", pairs)]
        self._remember("loglikelihood", requests, results)
        return results

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each whole text; a text that is longer than the context is scored in windows."""
        pairs = [(self._begin, self._encode(request.args[0], prefix=False)) for request in requests]
        results = [logprob for logprob, _ in self._scores("texts", pairs)]
        self._remember("loglikelihood_rolling", requests, results)
        return results

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The continuation of each context, up to but not including the first stop string."""
        asked = [self._request(index, *request.args) for index, request in enumerate(requests)]
        room = min(max((len(ask.tokens) + ask.max_new for ask, _ in asked), default=1), self.adapter.context)
        engine = Engine(self.adapter, slots=min(self.batch, max(len(asked), 1)), room=room)
        results = [""] * len(asked)
        try:
            places = {engine.submit(ask): place for place, (ask, _) in enumerate(asked)}
            with self._bar("generated texts", len(asked)) as bar:
                while engine.busy:
                    for row in engine.step():
                        writing = asked[places[row]][1]
                        if row.error is not None:
                            raise row.error
                        pieces = []
                        for token in row.fresh:
                            if not writing.stopped:
                                pieces.append(writing.add(token).text)
                        if row.ending is not None:
                            pieces.append(writing.end().text)
                        results[places[row]] += "".join(pieces)
                        if row.ending is None and asked[places[row]][1].stopped:
                            engine.cancel(row)
                        bar.update(int(row.ending is not None))
        finally:
            engine.close()
        self._remember("generate_until", requests, results)
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text, up to the start of the model's answer, or to the end of the last message."""
        if self._template is None:
            if template_source(self.texts) is None:
                raise ConfigError("the model has no chat template", hint="leave out --chat")
            self._template = ConfinedTemplate(self.texts)
        text = self._template.render(chat_history, ask=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    @property
    def tokenizer_name(self) -> str:
        return self.texts.hash

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return template_source(self.texts) if chat_template else None

    def _scores(self, what: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        with self._bar(what, len(pairs)) as bar:
            return score(self.adapter, pairs, self.batch, bar.update)

    def _bar(self, what: str, total: int) -> tqdm[Any]:
        return tqdm(total=total, desc=what, disable=None if self.progress else True)  # None: bar on terminals only

    def _remember(self, name: str, requests: Sequence[Instance], results: Sequence[Any]) -> None:
        """Store results in the harness's cache, if it has one."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(name, request.args, result)

    # -- tokens --------------------------------------------------------------------------------------------------------

    @cached_property
    def _begin(self) -> list[int]:
        """The token that is put before a text without context."""
        named = special_token(companion_config(self.texts.companions, self.texts.origin), "bos_token")
        token = None if named is None else self.texts.engine.token_to_id(named)
        begin = [token] if token is not None else self.texts.prefix[:1] or list(self.texts.ends)
        if not begin:
            raise ConfigError(
                f"{self.texts.origin} has neither a beginning-of-text nor an end-of-text token, one of which a text "
                "without context has to follow"
            )
        return begin

    @cached_property
    def _prefix(self) -> str:
        """The special tokens that the tokenizer puts before a text, spelled as text."""
        return "".join(self.texts.engine.id_to_token(token) or "" for token in self.texts.prefix)

    def _encode(self, text: str, *, prefix: bool = True) -> list[int]:
        """Tokens of a text; `prefix` adds the special tokens before it, unless the text begins with them."""
        added = self.texts.prefix if prefix and not (self._prefix and text.startswith(self._prefix)) else []
        return [*added, *self.texts.encode_with_special(text)]

    # -- generation ----------------------------------------------------------------------------------------------------

    def _request(self, index: int, context: str, settings: Mapping[str, Any]) -> tuple[Request, Writing]:
        """Make the engine's request for a text, and the decoder of its tokens."""
        left = dict(settings)
        until = left.pop("until", None) or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        lengths = [int(value) for name in LENGTHS if (value := left.pop(name, None)) is not None]
        most = lengths[0] if lengths else LONGEST
        # Texts are greedy unless the task samples.
        samples, temperature = left.pop("do_sample", None), left.pop("temperature", None)
        chosen = {name: left.pop(name) for name in _SAMPLING if name in left}
        if samples is False or (samples is None and not temperature):
            temperature = 0.0
        sampling = Sampling(
            temperature=1.0 if temperature is None else float(temperature),
            seed=index,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        if left:
            self._warn(f"settings of the task's generation that have no effect here: {', '.join(sorted(left))}")
        if most >= self.adapter.context:
            self._warn(
                f"a task generates up to {most} tokens, and the model sees {self.adapter.context}: half of them are "
                "kept for the prompt"
            )
            most = self.adapter.context // 2
        tokens = self._encode(context)[-(self.adapter.context - most) :] or self._begin
        # Stop strings are searched for in the decoded text, which has no special tokens. So a stop string that is a
        # special token must be a stop token.
        special = {token for stop in stops if (token := self.texts.engine.token_to_id(stop)) in self.texts.special}
        request = Request(tokens=tokens, max_new=most, sampling=sampling, stop=self.ends | special)
        return request, Writing(self.texts.stream(tokens), stops)

    def _warn(self, message: str) -> None:
        """Log a warning, but only the first time."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)
