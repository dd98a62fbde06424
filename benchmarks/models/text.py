"""`python -m benchmarks.models.text`: is the text of tokens the same in `generate`, in `serve` and in transformers?

For each kind of tokenizer, with and without a beginning-of-text token, random texts and random tokens are read by all:

- ids: prompts as they are encoded, special tokens that they spell included.
- generate: the text behind random prompts, streamed token by token.
- whole, streamed: the server's answers to requests for the same tokens, which come in random portions; half of them
  with special tokens shown.
- stops: both kinds of answers with stop strings from anywhere in the text, against a search of all ends.
- alone: texts that transformers decodes otherwise without their prompt.
- DecodeStream: texts that the incremental decoder of `tokenizers` decodes otherwise, or not at all.

All but the last two columns must be zero; then the exit code is 0. A row takes about a minute with the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.request import Request
from shoestring.decode.serve.answering import Answer
from shoestring.decode.serve.asking import Asked, Prompt
from shoestring.decode.serve.engine_thread import Batch, News
from shoestring.decode.serve.forms import CompletionForm
from shoestring.decode.serve.metrics import Metrics
from shoestring.decode.serve.served import Served, describe
from shoestring.decode.settings.generation import Sampling
from tests.rigs import foreign_tokenizers as foreign
from tests.rigs import text_checks as checks

COLUMNS = ("ids", "generate", "whole", "streamed", "stops", "alone", "DecodeStream")
ROUNDS = 20_000
"""Texts and token streams of each tokenizer."""
MUST_BE_ZERO = COLUMNS[:5]


class Script:
    """In place of the engine's thread: the tokens of every text are given."""

    def __init__(self, tokens: Sequence[int], chance: random.Random) -> None:
        self.portions: list[list[int]] = []
        rest = list(tokens)
        while rest:
            count = chance.randint(1, 4)
            self.portions.append(rest[:count])
            rest = rest[count:]

    def submit(self, requests: Sequence[Request]) -> Batch:
        batch = Batch(requests)
        for portion in self.portions:
            batch.news.put_nowait(News(0, portion, []))
        batch.news.put_nowait(News(0, [], [], "length"))
        return batch

    def cancel(self, batch: Batch, index: int | None = None) -> None: ...


class Server:
    """The part of the server that writes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.served: Served = describe("model", tokenizer, 4096)
        self.metrics = Metrics()

    async def answer(self, prompt: Sequence[int], skip: bool, stops: Sequence[str], script: Any, stream: bool) -> str:
        asked = Asked(
            prompts=[Prompt(tokens=prompt or [self.served.vocabulary])],  # an unused id has no text
            count=1,
            max_new=None,
            sampling=Sampling(),
            stops=stops,
            logprobs=None,
            skip_special_tokens=skip,
        )
        answer = Answer(asked, CompletionForm(self.served), self.served, script, self.metrics, time.monotonic())
        answer.start()
        if not stream:
            return (await answer.whole())["choices"][0]["text"]
        events = [event async for event in answer.events()]
        return "".join(json.loads(event[len("data: ") :])["choices"][0]["text"] for event in events[:-1])


def decode_stream(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip: bool) -> str | None:
    """The text by the incremental decoder of `tokenizers`, as vLLM calls it; None if it raises."""
    stream = DecodeStream(ids=list(prompt), skip_special_tokens=skip)
    try:
        return "".join(stream.step(tokenizer.engine, token) or "" for token in tokens)
    except Exception:
        return None


async def compare(kind: str, begins: bool, rounds: int, check: Callable[[], None]) -> tuple[Counter[str], float]:
    """Differences by column, and microseconds that a token takes to be decoded.

    Args:
        check: called now and then; raises if the time is up.
    """
    tokenizer, differences = foreign.tokenizer_of(kind, begins), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        loaded: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    server, seconds, count = Server(tokenizer), 0.0, 0

    def decode(ids: Sequence[int], skip: bool) -> str:
        return loaded.decode(list(ids), skip_special_tokens=skip)

    for number in range(rounds):
        if number % 1000 == 0:
            check()
        chance = random.Random(number)
        text = foreign.random_text(chance)
        ids = loaded(text)["input_ids"]
        differences["ids"] += bool(ids) and tokenizer.encode_prompt(text) != ids
        if number % 2:  # half of the tokens are those of a text, cut anywhere
            cut = chance.randint(0, len(ids))
            prompt, tokens = ids[:cut], ids[cut:]
        else:
            prompt, tokens = (foreign.random_tokens(chance, tokenizer, most) for most in (6, 12))
        skip = chance.random() < 0.5
        wanted = checks.text_behind(tokenizer, decode, prompt, tokens, skip)
        begun = time.perf_counter()
        written = checks.streamed(tokenizer, prompt, tokens, skip)
        seconds, count = seconds + time.perf_counter() - begun, count + len(tokens)
        differences["generate"] += written != wanted
        differences["alone"] += decode(tokens, skip) != wanted
        differences["DecodeStream"] += decode_stream(tokenizer, prompt, tokens, skip) != wanted
        stops = checks.random_stops(chance, wanted)
        for stream, column in ((False, "whole"), (True, "streamed")):
            answer = await server.answer(prompt, skip, (), Script(tokens, chance), stream)
            differences[column] += answer != wanted
            stopped = await server.answer(prompt, skip, stops, Script(tokens, chance), stream)
            differences["stops"] += stopped != checks.cut_at_stop(wanted, stops)
    return differences, 1e6 * seconds / max(count, 1)


def rows() -> list[Bar]:
    """A bar for each kind of tokenizer."""

    def measure_kind(kind: str, deadline: Deadline) -> Measured:
        of = {begins: asyncio.run(compare(kind, begins, ROUNDS, deadline.check))[0] for begins in (False, True)}
        counts = {column: of[False][column] + of[True][column] for column in COLUMNS}
        note = ", ".join(f"{column} {counts[column]}" for column in MUST_BE_ZERO)
        note += f"; `decode` without the prompt {counts['alone']}, `DecodeStream` {counts['DecodeStream']}"
        return Measured(sum(counts[column] for column in MUST_BE_ZERO), note)

    return [
        Bar(
            f"models.text-{kind.lower().replace(',', '').replace(' ', '-')}",
            f"texts that generate, serve or transformers reads or writes otherwise, of {2 * ROUNDS:,} random texts and "
            f"token streams: {kind} tokenizers, half of them with a beginning-of-text token",
            "<=",
            0,
            partial(measure_kind, kind),
            seeds=(0,),
            peers=("transformers", "tokenizers"),
            kind="exact",
        )
        for kind in foreign.KINDS
    ]


def main(write: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="texts and token streams of each tokenizer")
    parser.add_argument("--kind", choices=list(foreign.KINDS), help="only this kind of tokenizer")
    options = parser.parse_args()
    release = importlib.metadata.version("transformers")
    write(f"transformers {release}; {options.rounds} texts and streams a row; differences:\n")
    write(f"| tokenizer | begins | {' | '.join(COLUMNS)} | µs a token |")
    write(f"|---|---|{'---|' * (len(COLUMNS) + 1)}")
    failed = False
    for kind in [options.kind] if options.kind else foreign.KINDS:
        for begins in (False, True):
            differences, microseconds = asyncio.run(compare(kind, begins, options.rounds, lambda: None))
            cells = " | ".join(str(differences[column]) for column in COLUMNS)
            write(f"| {kind} | {'yes' if begins else 'no'} | {cells} | {microseconds:.1f} |")
            failed |= any(differences[column] for column in MUST_BE_ZERO)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
