"""Text from a model: requests share its passes, each in a row of one cache (continuous batching; Yu et al., 2022)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.decode.adapter import Adapter, Wanted, adapt
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.request import Ending, Request, Row, logprobs
from shoestring.decode.settings import Sampling, Speculation
from shoestring.decode.speculation import NOTHING, DraftCounts, Speculator, Verified, verify
from shoestring.decode.window import common, window_start

WORTH_COPYING = 16
"""The fewest tokens in common with another row's text for which its keys and values are copied."""


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
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Of speculation."""


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
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """
        Args:
            model: its weights are not changed.
            slots: texts that are generated at the same time.
            context: tokens that are seen; default the model's own.
            room: tokens of each text that are kept in memory, if fewer.
            chunk: tokens of a prompt that are read in one pass, between which other texts go on.
            drafter: proposes tokens, which the model verifies; by default none.
            speculation: how long drafts are and how they are verified; its `drafter` is not looked at.

        Raises:
            ConfigError: a number out of range, or no known context.
        """
        if slots < 1 or chunk < 1:
            raise ConfigError(f"an engine needs at least one slot and one token at a time, got {slots} and {chunk}")
        self.model = model if isinstance(model, Adapter) else adapt(model, context)
        self.window = min(self.model.context, room or self.model.context)
        self.cache = self.model.new_cache(slots, self.window)
        self.chunk = chunk
        self.speculation = speculation or Speculation()
        self.speculator = None if drafter is None else Speculator(drafter, self.speculation)
        if drafter is not None:
            drafter.attach(self.model, self.cache)
        self.counts = Counts()
        self.seated: list[Row | None] = [None] * slots
        self.held: list[list[int]] = [[] for _ in range(slots)]  # tokens that the cache holds of texts that have ended
        self.waiting: deque[Row] = deque()
        self._reads_next = True
        self._training = [module for module in self.model.model.modules() if module.training]
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
        """Put each module of the model back into the mode that it was in."""
        for module in self._training:
            module.training = True

    @property
    def busy(self) -> bool:
        """Whether there is a text to go on with."""
        return bool(self.waiting) or bool(self._active())

    def step(self) -> list[Row]:
        """One pass of the model: over a piece of one prompt, or over all rows that generate; they take turns.

        Returns:
            The rows that got tokens or ended.
        """
        refused = self._seat()
        unread = [row for row in self._active() if self._unread(row) > 1]
        ready = [row for row in self._active() if self._unread(row) == 1]
        if unread and (self._reads_next or not ready):
            self._reads_next = False
            return refused + self._read(unread[0])
        self._reads_next = True
        return refused + (self._decode(ready) if ready else [])

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
        self._extend([row], [NOTHING], [logits[0]])
        return [row]

    def _decode(self, rows: list[Row]) -> list[Row]:
        drafts = [NOTHING] * len(rows)
        if self.speculator is not None:
            drafts = self.speculator.draft(rows, [self._room(row) for row in rows])
        first, end = rows[0].slot, rows[-1].slot + 1
        counts, longest = [0] * (end - first), max(len(draft.tokens) for draft in drafts)
        tokens = [[0] * (longest + 1)] * (end - first)
        for row, draft in zip(rows, drafts, strict=True):
            own = [row.history[-1], *draft.tokens]
            counts[row.slot - first] = len(own)
            tokens[row.slot - first] = [*own, *[0] * (longest + 1 - len(own))]
        logits = self.model.read(torch.tensor(tokens), self.cache, rows=slice(first, end), counts=counts)
        self.counts.passes += 1
        self.counts.read += sum(not len(row) for row in rows)  # prompts cached but for their last token
        own = [logits[row.slot - first, : len(draft.tokens) + 1] for row, draft in zip(rows, drafts, strict=True)]
        verified = self._extend(rows, drafts, own)
        if self.speculator is not None:
            self.speculator.learn(drafts, verified)
        return rows

    def _room(self, row: Row) -> int:
        """The most tokens that are worth drafting: one more than stays is always added."""
        return min(row.request.max_new - len(row), self.window - self.cache.lengths[row.slot]) - 1

    def _extend(self, rows: list[Row], drafts: list[DraftTokens], logits: list[Tensor]) -> list[Verified]:
        """Give each row its next tokens, of logits (γ + 1, V) that follow its history and each drafted token."""
        # The maximum is NaN when any logit is; minus infinity alone is a token ruled out.
        finite = torch.cat([own.amax(-1).isfinite() for own in logits]).tolist()
        verified = verify(rows, drafts, logits, self.speculation.verification)
        for row, draft, own, result in zip(rows, drafts, logits, verified, strict=True):
            fine, finite = finite[: len(draft.tokens) + 1], finite[len(draft.tokens) + 1 :]
            row.drafted, row.accepted, row.fresh = draft.tokens, result.accepted, []
            if not all(fine[: result.accepted + 1]):
                row.error = NonFiniteError(f"the model's logits after {len(row.history)} tokens are not finite")
                self._end(row, "failed")
                continue
            self.counts.drafts.add(len(draft.tokens), result.accepted)
            self.cache.lengths[row.slot] -= len(draft.tokens) - result.accepted
            self._add(row, result.tokens, own)
        return verified

    def _add(self, row: Row, tokens: Sequence[int], logits: Tensor) -> None:
        """Append tokens that are final, as far as the request wants them; `logits` (T, V) are the model's at each."""
        ends = next((index for index, token in enumerate(tokens, start=1) if token in row.request.stop), len(tokens))
        tokens = tokens[:ends]
        if row.request.logprobs is not None:
            row.logprobs = logprobs(logits[:ends], tokens, row.request.logprobs)
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

    def _seat(self) -> list[Row]:
        """Give free slots to those that wait, each one whose cache already begins with its prompt if there is one.

        Returns:
            Rows that ended, for their prompt leaves no room.
        """
        refused: list[Row] = []
        while self.waiting and None in self.seated:
            row = self.waiting.popleft()
            window = window_start(len(row.history), self.window)
            if window and not row.request.rolling:
                row.error = ConfigError(
                    f"the prompt has {len(row.history)} tokens, and the context is {self.window}", hint="shorten it"
                )
                self._end(row, "failed")
                refused.append(row)
                continue
            row.begin = window
            # At least the last token is read: its logits are wanted.
            seen = [] if row.request.prompt_logprobs else row.history[row.begin : -1]
            shared = {slot: common(seen, self._holds(slot)) for slot in range(len(self.seated))}
            free = [slot for slot, seated in enumerate(self.seated) if seated is None]
            slot = max(free, key=lambda slot: (shared[slot], -len(self.held[slot]), -slot))
            best = max(shared, key=lambda slot: shared[slot])
            if shared[best] >= shared[slot] + WORTH_COPYING:
                self.cache.copy(best, slot, shared[best])
            else:
                self.cache.lengths[slot] = shared[slot]
            row.slot, row.reused = slot, self.cache.lengths[slot]
            self.counts.reused += row.reused
            self.held[slot] = []
            self.seated[slot] = row
        return refused

    def _holds(self, slot: int) -> Sequence[int]:
        row = self.seated[slot]
        return self.held[slot] if row is None else row.history[row.begin : row.begin + self.cache.lengths[slot]]

    def _end(self, row: Row, ending: Ending) -> None:
        row.ending = ending
        if row.slot >= 0:
            self.held[row.slot] = list(self._holds(row.slot))
            self.seated[row.slot] = None


def generate(
    model: nn.Module | Adapter,
    tokens: Sequence[int] | Tensor,
    *,
    max_new: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    context: int | None = None,
    drafter: Drafter | None = None,
    speculation: Speculation | None = None,
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
        drafter: of one row; proposes tokens, which the model verifies.
        speculation: how long drafts are and how they are verified.

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
    adapter = model if isinstance(model, Adapter) else adapt(model, context)
    room = min(adapter.context, len(request.tokens) + request.max_new)
    return stream(Engine(adapter, room=room, drafter=drafter, speculation=speculation), request)


def stream(engine: Engine, request: Request) -> Iterator[int]:
    """The tokens of one request, each as soon as it is final; closes the engine.

    Raises:
        ShoestringError: the request failed.
    """
    try:
        row = engine.submit(request)
        while engine.busy:
            for changed in engine.step():
                yield from changed.fresh
        if row.error is not None:
            raise row.error
    finally:
        engine.close()
