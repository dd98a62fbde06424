"""The generation engine: several requests share each forward pass of a model, and each request has its own row of the
cache (continuous batching; Yu et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.decode.adapter import Adapter, adapt
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.passes import Counts, Finish, Pass, RowPasses
from shoestring.decode.request import Ending, Request, Row, TokenLogprob, logprobs
from shoestring.decode.schedule import LONG, TokenBudget, Unread, plan_pass
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.decode.speculation import NOTHING, Chosen, Speculator, choose
from shoestring.decode.stopwatch import seconds
from shoestring.decode.waiting import WRITTEN, Waiting
from shoestring.decode.window import common, window_start

WORTH_COPYING = 16
"""Smallest number of additional cached prompt tokens for which the cache of another row is copied into the free slot,
instead of reusing the slot's own contents."""


class Engine:
    """Generates several texts at the same time with one model. The model is kept in evaluation mode until `close`.

    The tokens of a text depend on its request alone, never on other texts in the batch. A pass that raises an error is
    repeated text by text, so that only the texts that cause the error fail.
    """

    def __init__(
        self,
        model: nn.Module | Adapter,
        *,
        slots: int = 1,
        context: int | None = None,
        room: int | None = None,
        chunk: int = 512,
        pass_seconds: float | None = None,
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """
        Args:
            model: the model that generates; its weights are not changed.
            slots: number of texts that are generated at the same time.
            context: largest number of tokens that the model sees; defaults to the model's own.
            room: number of tokens per text that the cache can hold, if smaller than the context.
            chunk: largest number of prompt tokens, padding included, in one pass; other texts are decoded between such
                passes. `chunk` has no effect if the model must read its whole prompt in one pass.
            pass_seconds: longest time that a pass over prompts should take; the number of tokens in a pass adapts to
                this limit. By default there is no limit.
            drafter: proposes tokens, which the model verifies; by default none.
            speculation: settings of the length and verification of drafts; their field `draft` is ignored.

        Raises:
            ConfigError: a number is out of range, or the model's context is not known.
        """
        if slots < 1 or chunk < 1:
            raise ConfigError(f"an engine needs at least one slot and chunks of one token, got {slots} and {chunk}")
        self.model = model if isinstance(model, Adapter) else adapt(model, context)
        self.window = min(self.model.context, room or self.model.context)
        self.cache = self.model.new_cache(slots, self.window)
        self.budget = TokenBudget(chunk, pass_seconds) if self.model.pieces else TokenBudget(self.window)
        self.speculation = speculation or Speculation()
        self.speculator = None if drafter is None else Speculator(drafter, self.speculation)
        if drafter is not None:
            drafter.attach(self.model, self.cache)
        self.counts = Counts()
        self.passes = RowPasses(self.model, self.cache, drafter, self.counts)
        self.seated: list[Row | None] = [None] * slots
        self.held: list[list[int]] = [[] for _ in range(slots)]  # for each free slot: tokens that are still cached
        # For each slot: `Request.cached_for` of the requests that may reuse its keys and values.
        self.namespaces: list[tuple[str, int | None]] = [("", None)] * slots
        self.waiting = Waiting()
        self._turn = 0  # number of rows that have received a slot so far
        self._skipped = 0  # see `PassPlan.skipped`
        self._reads_next = True  # whether the next pass reads a prompt, if there are both prompts and texts to decode
        self._training = [module for module in self.model.model.modules() if module.training]
        self.model.model.eval()

    def submit(self, request: Request) -> Row:
        """Add a request to the queue for a free slot, and return its row."""
        row = Row(request, [int(token) for token in request.tokens])
        if request.max_new == 0 and not request.reads_only:
            row.ending = "length"
        else:
            self.waiting.add(row)
        return row

    def cancel(self, row: Row) -> None:
        """End a text early, and free its slot."""
        if row.ending is None:
            if row in self.waiting:
                self.waiting.remove(row)
            self._end(row, "cancelled")

    def close(self) -> None:
        """Restore training mode in the modules that were in training mode when the engine was created."""
        for module in self._training:
            module.training = True

    @property
    def busy(self) -> bool:
        """Whether there are texts that are not finished."""
        return bool(self.waiting) or bool(self._active())

    def step(self) -> list[Row]:
        """Run one forward pass, over chunks of prompts or over all rows that are decoding; the two kinds of pass
        alternate. One pass never does both, because each decoding row would be padded to the length of a chunk.

        Returns:
            The rows that got tokens or ended.
        """
        refused: list[Row] = []  # rows that failed, for example because their prompts do not fit into the context
        while None in self.seated and (row := self.waiting.take(self._suits)) is not None:
            try:
                self._take_slot(row)
            except Exception as error:
                self._fail(row, error)
                refused.append(row)
        unread = sorted((row for row in self._active() if self._unread(row) > 1), key=lambda row: row.turn)
        ready = [row for row in self._active() if self._unread(row) == 1]
        if unread and (self._reads_next or not ready):
            self._reads_next = False
            return refused + self._read(unread)
        self._reads_next = True
        if ready:
            self._run(ready, self._decode)
        return refused + ready

    # -- passes --------------------------------------------------------------------------------------------------------

    def _active(self) -> list[Row]:
        return [row for row in self.seated if row is not None]

    def _unread(self, row: Row) -> int:
        """Number of tokens in the row's context that the cache does not hold; 1 if the row is ready to decode."""
        return len(row.history) - row.begin - self.cache.lengths[row.slot]

    def _run(self, rows: list[Row], compute: Pass) -> None:
        """Run a pass over some rows; a row fails if its own pass raises an error."""
        for row, error in self.passes.run(rows, compute):
            self._fail(row, error)

    def _read(self, unread: list[Row]) -> list[Row]:
        """Read chunks of prompts in one pass; after the last chunk of a prompt, the text gets its first token.

        Args:
            unread: the rows with unread prompts, in the order in which they got their slots.

        Returns:
            The rows that got a token or ended.
        """
        apart = not (self.model.pieces and self.model.shares)
        sizes = [Unread(row.slot, self._unread(row), apart or row.request.prompt_logprobs) for row in unread]
        counts, self._skipped = plan_pass(sizes, self.budget.tokens, self._skipped)
        rows = [row for row in self._active() if row.slot in counts]
        lengths, began = [len(row.history) for row in rows], seconds()
        self._run(rows, lambda rows: self._read_chunks(rows, [counts[row.slot] for row in rows]))
        self.budget.learn((rows[-1].slot + 1 - rows[0].slot) * max(counts.values()), seconds() - began)
        return [
            row
            for row, length in zip(rows, lengths, strict=True)
            if len(row.history) > length or row.ending is not None
        ]

    def _read_chunks(self, rows: list[Row], counts: list[int]) -> Finish:
        """Compute a pass that reads the next tokens of prompts; `counts` holds the number of tokens of each row."""
        starts = [row.begin + self.cache.lengths[row.slot] for row in rows]
        chunks = [row.history[start : start + count] for row, start, count in zip(rows, starts, counts, strict=True)]
        scored = rows[0].request.prompt_logprobs  # a row whose prompt is scored is alone in its pass
        logits = self.passes.forward(rows, chunks, "all" if scored else "last")
        entries: list[TokenLogprob] = []
        if scored:
            following = rows[0].history[starts[0] + 1 : starts[0] + 1 + counts[0]]
            entries = logprobs(logits[0][: len(following)], following, rows[0].request.logprobs or 0)
        read = [index for index, row in enumerate(rows) if not self._unread(row) and not row.request.reads_only]
        ended, drafts = [rows[index] for index in read], [NOTHING] * len(read)
        last = [logits[index][-1:] for index in read]
        chosen = choose(ended, drafts, last, self.speculation.verification) if ended else None
        if self.budget.seconds is not None and chosen is None:
            logits[0][0, 0].item()  # wait for the end of the pass, to measure its time

        def finish() -> None:
            self.counts.chunks += 1
            self.counts.read += sum(counts)
            rows[0].prompt_logprobs += entries
            if rows[0].request.reads_only and self._unread(rows[0]) <= 1:
                self._end(rows[0], "length")
            if chosen is not None:
                self._extend(ended, drafts, chosen)

        return finish

    def _decode(self, rows: list[Row]) -> Finish:
        """Compute a pass that gives each row its next tokens."""
        drafts = [NOTHING] * len(rows)
        if self.speculator is not None:
            drafts = self.speculator.draft(rows, [self._room(row) for row in rows])
        tokens = [[row.history[-1], *draft.tokens] for row, draft in zip(rows, drafts, strict=True)]
        for row, draft in zip(rows, drafts, strict=True):
            if row.request.constraint is not None and self.model.vocabulary is not None:
                # computes the masks in parallel with the pass
                row.request.constraint.begin(row.text, draft.tokens, self.model.vocabulary)
        chosen = choose(rows, drafts, self.passes.forward(rows, tokens, "all"), self.speculation.verification)

        def finish() -> None:
            self.counts.passes += 1
            # A prompt whose other tokens were all cached is not read in chunks: its last token is read here.
            self.counts.read += sum(not len(row) for row in rows)
            self._extend(rows, drafts, chosen)
            if self.speculator is not None:
                self.speculator.learn(drafts, chosen.verified)

        return finish

    def _room(self, row: Row) -> int:
        """Largest number of tokens worth drafting for a row; each pass also adds one token after the accepted drafted
        tokens."""
        if row.begins:
            return 0
        return min(row.request.max_new - len(row), self.window - self.cache.lengths[row.slot]) - 1

    def _extend(self, rows: list[Row], drafts: list[DraftTokens], chosen: Chosen) -> None:
        """Append the chosen tokens to each row."""
        finite = chosen.finite  # one flag for each position, row after row
        for row, draft, own, result in zip(rows, drafts, chosen.logits, chosen.verified, strict=True):
            fine, finite = finite[: len(draft.tokens) + 1], finite[len(draft.tokens) + 1 :]
            row.drafted, row.accepted, row.fresh, row.begins = draft.tokens, result.accepted, [], False
            if not all(fine[: result.accepted + 1]):
                reason = f"the model's logits after {len(row.history)} tokens are not finite"
                self._fail(row, NonFiniteError(reason))
                continue
            self.counts.drafts.add(len(draft.tokens), result.accepted)
            self.cache.lengths[row.slot] -= len(draft.tokens) - result.accepted
            try:
                self._add(row, result.tokens, own)
            except Exception as error:
                self.counts.failed += 1
                self._fail(row, error)

    def _add(self, row: Row, tokens: Sequence[int], logits: Tensor) -> None:
        """Append final tokens to a row, up to the end of the text.

        Args:
            logits: (T, V); the logits that each token was drawn from.
        """
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
            self.waiting.charge(row.request.client, WRITTEN)
            if len(row) == row.request.max_new:
                return self._end(row, "length")
            if len(row.history) - row.begin > self.window:
                if not row.request.rolling:
                    return self._end(row, "length")
                row.begin = window_start(len(row.history), self.window)
                self.cache.lengths[row.slot], row.begins = 0, True
        return None

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _suits(self, row: Row) -> bool:
        """Whether a waiting row may get a slot now. The number of long prompts in slots is limited: reading more of
        them at the same time would finish none of them sooner, but would leave no slot for short prompts."""
        most = LONG * self.budget.tokens
        reading = sum(self._unread(other) > most for other in self._active())
        return len(row.history) <= most or reading < max(1, len(self.seated) // 2)

    def _take_slot(self, row: Row) -> None:
        """Give a row the free slot whose cache has the longest prefix in common with its prompt."""
        window = window_start(len(row.history), self.window)
        if window and not row.request.rolling:
            raise ConfigError(
                f"the prompt has {len(row.history)} tokens, and the context is {self.window}", hint="shorten it"
            )
        row.begin = window
        # The last token is always read, because its logits are needed.
        seen = [] if row.request.prompt_logprobs else row.history[row.begin : -1]
        own = [name == row.request.cached_for and self.model.pieces for name in self.namespaces]
        shared = {slot: common(seen, self._holds(slot)) if own[slot] else 0 for slot in range(len(self.seated))}
        free = [slot for slot, seated in enumerate(self.seated) if seated is None]
        # Among slots with equally long prefixes, take the slot that loses the least cached text.
        slot = max(free, key=lambda slot: (shared[slot], -len(self.held[slot]), -slot))
        best = max(shared, key=lambda slot: shared[slot])
        self.model.assign(self.cache, slot, row.request.adapter)
        self.held[slot], self.namespaces[slot] = [], row.request.cached_for
        if shared[best] >= shared[slot] + WORTH_COPYING:
            self.cache.copy(best, slot, shared[best])
        else:
            self.cache.lengths[slot] = shared[slot]
        row.slot, row.reused = slot, self.cache.lengths[slot]
        self._turn += 1
        row.turn = self._turn
        self.counts.reused += row.reused
        self.seated[slot] = row
        self.waiting.charge(row.request.client, self._unread(row))

    def _holds(self, slot: int) -> Sequence[int]:
        """The tokens whose keys and values are in a slot of the cache."""
        row = self.seated[slot]
        return self.held[slot] if row is None else row.history[row.begin : row.begin + self.cache.lengths[slot]]

    def _fail(self, row: Row, error: Exception) -> None:
        row.error = error
        self._end(row, "failed")

    def _end(self, row: Row, ending: Ending) -> None:
        row.ending = ending
        if row.slot >= 0:
            self.held[row.slot] = list(self._holds(row.slot))
            self.seated[row.slot] = None
            self.model.assign(self.cache, row.slot, None)


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

    When the context is full, the oldest quarter of it is dropped at once. The model is in evaluation mode until the
    iterator ends or is closed.

    Args:
        model: the model that generates, on any device; its weights are not changed.
        tokens: the prompt, at least one token: a sequence of integers or a (T,) tensor.
        max_new: largest number of tokens to yield.
        sampling: sampling settings; by default a temperature of 1 without filters.
        stop: tokens that end the text, and are not yielded.
        context: largest number of tokens that the model sees; defaults to the model's own.
        drafter: proposes tokens, which the model verifies; it must have been created for one slot.
        speculation: settings of the length and verification of drafts.

    Raises:
        ConfigError: an argument is out of range, the prompt is empty, or the model's context is not known.
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
    """Yield the tokens of one request, each as soon as it is final; closes the engine at the end.

    Raises:
        Exception: the request failed, with a `ShoestringError` or any exception raised by a pass of the model.
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
