"""Text from a model: requests share its passes, each in a row of one cache (continuous batching; Yu et al., 2022)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError, NonFiniteError, ShoestringError
from shoestring.decode.adapter import Adapter, Wanted, adapt
from shoestring.decode.settings import Sampling

Ending = Literal["stop", "length", "cancelled", "failed"]

WORTH_COPYING = 16
"""The fewest tokens in common with another row's text for which its keys and values are copied."""


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability by the model alone: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens of the position with theirs, likeliest first; as many as the request wants."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to continue.

    Raises:
        ConfigError: no prompt, a negative number of tokens, or values that exclude each other.
    """

    tokens: Sequence[int]
    """The prompt, at least one token."""
    max_new: int
    """The most tokens to generate."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    """The text ends at one of these tokens, which is not part of it."""
    rolling: bool = False
    """Text goes on when the context is full: the oldest quarter of what is seen is then dropped at once, so that the
    rest is read again only rarely. Otherwise it ends there."""
    logprobs: int | None = None
    """Also wanted: log-probabilities of the tokens, and of so many of the likeliest at each position."""
    prompt_logprobs: bool = False
    """They are wanted of the prompt, too, which is then read whole."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt has no tokens", hint="begin with the tokenizer's end-of-text token")
        if self.max_new < 0:
            raise ConfigError(f"max_new is {self.max_new}", hint="give 0 or more")
        if self.rolling and self.prompt_logprobs:
            raise ConfigError("log-probabilities of a prompt that is cut to the context", hint="turn `rolling` off")

    @property
    def reads_only(self) -> bool:
        """Whether nothing is generated: the prompt's log-probabilities are all that is wanted."""
        return self.max_new == 0 and self.prompt_logprobs and len(self.tokens) > 1


@dataclass(eq=False)
class Row:
    """A text that is being generated."""

    request: Request
    history: list[int]
    """The prompt and what follows it so far; all of it is final."""
    slot: int = -1
    """Its row of the cache; -1 while it waits for one."""
    begin: int = 0
    """The first token of `history` that is still seen."""
    fresh: list[int] = field(default_factory=list)
    """The tokens that the newest pass has added."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of `fresh`, where they are wanted; one more where a stop token was next."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt from its second token on, where they are wanted."""
    ending: Ending | None = None
    error: ShoestringError | None = None
    """Why it failed."""
    reused: int = 0
    """Tokens of the prompt that did not have to be read, for they were in the cache."""

    @property
    def text(self) -> list[int]:
        """The tokens generated so far."""
        return self.history[len(self.request.tokens) :]

    def __len__(self) -> int:
        """How many those are."""
        return len(self.history) - len(self.request.tokens)


@dataclass
class Counts:
    """What an engine has done."""

    passes: int = 0
    """Passes that decoded, over all active rows at once."""
    chunks: int = 0
    """Passes that read a piece of a prompt."""
    generated: int = 0
    """Tokens."""
    read: int = 0
    """Tokens of prompts that passed through the model."""
    reused: int = 0
    """Tokens of prompts that were in the cache."""


class Engine:
    """A model that several texts share. The model is in evaluation mode until `close`.

    What is sampled depends on the request and its own text alone, never on what else is in the batch.
    """

    def __init__(
        self,
        model: nn.Module | Adapter,
        *,
        slots: int = 1,
        context: int | None = None,
        room: int | None = None,
        chunk: int = 512,
    ) -> None:
        """
        Args:
            model: its weights are not changed.
            slots: texts that are generated at the same time.
            context: tokens that are seen; default the model's own.
            room: tokens of each text that are kept in memory, if fewer.
            chunk: tokens of a prompt that are read in one pass, between which other texts go on.

        Raises:
            ConfigError: a number out of range, or no known context.
        """
        if slots < 1 or chunk < 1:
            raise ConfigError(f"an engine needs at least one slot and one token at a time, got {slots} and {chunk}")
        self.model = model if isinstance(model, Adapter) else adapt(model, context)
        self.window = min(self.model.context, room or self.model.context)
        self.cache = self.model.new_cache(slots, self.window)
        self.chunk = chunk
        self.counts = Counts()
        self.seated: list[Row | None] = [None] * slots
        self.held: list[list[int]] = [[] for _ in range(slots)]  # tokens that the cache holds of texts that have ended
        self.waiting: deque[Row] = deque()
        self._reads_next = True
        self._was_training = self.model.model.training
        self.model.model.eval()

    def submit(self, request: Request) -> Row:
        """Take a request; it waits until a slot is free."""
        row = Row(request, [int(token) for token in request.tokens])
        if request.max_new == 0 and not request.reads_only:
            row.ending = "length"
        else:
            self.waiting.append(row)
        return row

    def cancel(self, row: Row) -> None:
        """End a text early, which frees its slot."""
        if row.ending is None:
            if row in self.waiting:
                self.waiting.remove(row)
            self._end(row, "cancelled")

    def close(self) -> None:
        """Put the model back into the mode that it was in."""
        self.model.model.train(self._was_training)

    @property
    def busy(self) -> bool:
        """Whether there is a text to go on with."""
        return bool(self.waiting) or bool(self._active())

    def step(self) -> list[Row]:
        """One pass of the model: over a piece of one prompt, or over all rows that generate; they take turns.

        Returns:
            The rows that got tokens or ended.
        """
        self._seat()
        unread = [row for row in self._active() if self._unread(row) > 1]
        ready = [row for row in self._active() if self._unread(row) == 1]
        if unread and (self._reads_next or not ready):
            self._reads_next = False
            return self._read(unread[0])
        self._reads_next = True
        return self._decode(ready) if ready else []

    # -- passes --------------------------------------------------------------------------------------------------------

    def _active(self) -> list[Row]:
        return [row for row in self.seated if row is not None]

    def _unread(self, row: Row) -> int:
        """Tokens of its history that the cache does not hold: 1 once the prompt is read."""
        return len(row.history) - row.begin - self.cache.lengths[row.slot]

    def _read(self, row: Row) -> list[Row]:
        start = row.begin + self.cache.lengths[row.slot]
        piece = row.history[start : start + self.chunk]
        wanted: Wanted = "all" if row.request.prompt_logprobs else "last"
        logits = self.model.read(torch.tensor([piece]), self.cache, rows=slice(row.slot, row.slot + 1), wanted=wanted)
        self.counts.chunks += 1
        self.counts.read += len(piece)
        if row.request.prompt_logprobs:
            following = row.history[start + 1 : start + 1 + len(piece)]
            row.prompt_logprobs += logprobs(logits[0, : len(following)], following, row.request.logprobs or 0)
            logits = logits[:, -1:]
        if row.request.reads_only and self._unread(row) <= 1:
            self._end(row, "length")
            return [row]
        if self._unread(row):
            return []
        return self._extend([row], logits)

    def _decode(self, rows: list[Row]) -> list[Row]:
        first, end = rows[0].slot, rows[-1].slot + 1
        tokens, counts = torch.zeros(end - first, 1, dtype=torch.int64), [0] * (end - first)
        for row in rows:
            tokens[row.slot - first, 0] = row.history[-1]
            counts[row.slot - first] = 1
        logits = self.model.read(tokens, self.cache, rows=slice(first, end), counts=counts)
        self.counts.passes += 1
        return self._extend(rows, logits[[row.slot - first for row in rows]])

    def _extend(self, rows: list[Row], logits: Tensor) -> list[Row]:
        """Give each row its next token, of logits (B, 1, V)."""
        # The maximum is NaN when any logit is; minus infinity alone is a token ruled out.
        finite = logits.amax(-1).isfinite().all(-1).tolist()
        for row, fine, own in zip(rows, finite, logits, strict=True):
            if not fine:
                row.fresh = []
                row.error = NonFiniteError(f"the model's logits after {len(row.history)} tokens are not finite")
                self._end(row, "failed")
                continue
            self._add(row, [sample(own[0], row)], own)
        return rows

    def _add(self, row: Row, tokens: Sequence[int], logits: Tensor) -> None:
        """Append tokens that are final, as far as the request wants them; `logits` (T, V) are the model's at each."""
        row.fresh = []
        if row.request.logprobs is not None:
            row.logprobs = logprobs(logits[: len(tokens)], tokens, row.request.logprobs)
        for token in tokens:
            if token in row.request.stop:
                return self._end(row, "stop")
            row.fresh.append(token)
            row.history.append(token)
            self.counts.generated += 1
            if len(row) == row.request.max_new:
                return self._end(row, "length")
            if len(row.history) - row.begin > self.window:
                if not row.request.rolling:
                    return self._end(row, "length")
                row.begin = window_start(len(row.history), self.window)
                self.cache.lengths[row.slot] = 0
        return None

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _seat(self) -> None:
        """Give free slots to those that wait, each one whose cache already begins with its prompt if there is one."""
        while self.waiting and None in self.seated:
            row = self.waiting.popleft()
            window = window_start(len(row.history), self.window)
            if window and not row.request.rolling:
                row.error = ConfigError(
                    f"the prompt has {len(row.history)} tokens, and the context is {self.window}", hint="shorten it"
                )
                self._end(row, "failed")
                continue
            row.begin = window
            # At least the last token is read: its logits are wanted.
            seen = [] if row.request.prompt_logprobs else row.history[row.begin : -1]
            common = {slot: _common(seen, self._holds(slot)) for slot in range(len(self.seated))}
            free = [slot for slot, seated in enumerate(self.seated) if seated is None]
            slot = max(free, key=lambda slot: (common[slot], -len(self.held[slot]), -slot))
            best = max(common, key=lambda slot: common[slot])
            if common[best] >= common[slot] + WORTH_COPYING:
                self.cache.copy(best, slot, common[best])
            else:
                self.cache.lengths[slot] = common[slot]
            row.slot, row.reused = slot, self.cache.lengths[slot]
            self.counts.reused += row.reused
            self.held[slot] = []
            self.seated[slot] = row

    def _holds(self, slot: int) -> Sequence[int]:
        row = self.seated[slot]
        return self.held[slot] if row is None else row.history[row.begin : row.begin + self.cache.lengths[slot]]

    def _end(self, row: Row, ending: Ending) -> None:
        row.ending = ending
        if row.slot >= 0:
            self.held[row.slot] = list(self._holds(row.slot))
            self.seated[row.slot] = None


def sample(logits: Tensor, row: Row) -> int:
    """The next token of a row, of its logits (V,)."""
    from shoestring.models.sampling import distribution

    sampling = row.request.sampling
    if sampling.greedy:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed((sampling.seed * 0x9E3779B97F4A7C15 + len(row.history)) % 2**63)
    p = distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p).cpu()
    return int((p / torch.empty_like(p).exponential_(generator=generator)).argmax())


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` (T), each by its logits (T, V), and of the `top` likeliest at each position."""
    if not tokens:
        return []
    precise = logits if logits.dtype == torch.float64 else logits.float()
    total = precise.logsumexp(-1, keepdim=True)
    chosen = precise.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    best = precise.topk(min(top, precise.shape[-1]))
    likeliest = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(*pair, strict=True)))
        for token, logprob, pair in zip(tokens, chosen.flatten().tolist(), likeliest, strict=True)
    ]


def window_start(length: int, window: int) -> int:
    """The first token still seen after `length` tokens: 0 until `window` is full, then steps of a quarter of it."""
    stride = max(1, window // 4)
    return max(0, -(-(length - window) // stride) * stride)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def generate(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    max_new: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    context: int | None = None,
) -> Iterator[int]:
    """Continue `tokens`, yielding each new token as soon as it is final.

    When the context is full, the oldest quarter of what is seen is dropped at once. The model is in evaluation mode
    until the iterator ends or is closed.

    Args:
        model: on any device; its weights are not changed.
        tokens: the prompt, at least one token: a sequence of integers or a (T,) tensor.
        max_new: the most tokens to yield.
        sampling: default a temperature of 1.
        stop: ends at one of these tokens, which is not yielded.
        context: tokens that are seen; default the model's own.

    Raises:
        ConfigError: an argument out of range, an empty prompt, or no known context.
        NonFiniteError: the model's logits are NaN or infinite.
    """
    request = Request(
        tokens=[int(token) for token in tokens],
        max_new=max_new,
        sampling=sampling or Sampling(),
        stop=frozenset(stop),
        rolling=True,
    )
    return _stream(adapt(model, context), request)


def _stream(model: Adapter, request: Request) -> Iterator[int]:
    engine = Engine(model, room=min(model.context, len(request.tokens) + request.max_new))
    try:
        row = engine.submit(request)
        while engine.busy:
            for changed in engine.step():
                yield from changed.fresh
        if row.error is not None:
            raise row.error
    finally:
        engine.close()
