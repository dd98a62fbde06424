"""Formats of answers: which schemas of JSON-Schema-Test-Suite are taken, and that nothing else is written.

The suite is in the sdist of the library jsonschema, which pip downloads. Answers are drawn at temperature 1 from a
model of random weights, whose texts go wherever a format lets them. A document is reachable if the masks allow each
of its tokens and then the end.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import torch

from benchmarks.decode.weights import PROMPT, model
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.serving.json_texts import texts_of
from benchmarks.timing import paired
from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from shoestring.decode.adapter import adapt
from shoestring.decode.constraint import Grammars
from shoestring.decode.engine import Engine, Request
from shoestring.decode.schema_forms import written
from shoestring.decode.settings.generation import AnswerFormat, Sampling
from shoestring.models.gpt import GPT, GPTConfig

SUITE = "jsonschema==4.26.0"
DRAFTS = {
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
}
NONE = AnswerFormat("json_schema", "{}")
TEXTS, LENGTH = 5_000, 1600
ROUNDS, TOKENS = 12, 24
SEED = 80317
"""Of the answers; drawn after everything else was settled."""


@dataclass
class Group:
    """A schema of the suite, with documents."""

    draft: str
    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]
    answer_format: AnswerFormat = NONE
    """The compiled format."""
    refused: str = ""
    """Why the schema is refused; empty if it is not."""


@dataclass
class Suite:
    """All schemas, compiled for a tokenizer of bytes."""

    grammars: Grammars
    tokenizer: Tokenizer
    groups: list[Group] = field(default_factory=list)

    @property
    def accepted(self) -> list[Group]:
        return [group for group in self.groups if not group.refused]

    def reaches(self, answer_format: AnswerFormat, document: Any) -> bool:
        """Whether a text of the document can be written."""
        return any(self._can_be_written(answer_format, text) for text in texts_of(document))

    def _can_be_written(self, answer_format: AnswerFormat, text: str) -> bool:
        tokens = self.tokenizer.encode(text)
        allowed = self.grammars.compile(answer_format).start().allowed([], tokens, self.tokenizer.vocab_size)
        return all(allowed[place, token] for place, token in enumerate([*tokens, self.tokenizer.end_of_text]))


@cache
def suite() -> Suite:
    """Download and compile the schemas."""
    tokenizer = byte_tokenizer()
    built = Suite(Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, tokenizer.ends), tokenizer)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
        subprocess.run([*command, SUITE], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in sorted(files.getmembers(), key=lambda member: member.name):
                parts = Path(member.name).parts
                if parts[1:3] == ("json", "tests") and len(parts) == 5 and parts[3] in DRAFTS:
                    content = files.extractfile(member)
                    assert content is not None
                    built.groups += [_group(parts[3], parts[4], group) for group in json.load(content)]
    for group in built.groups:
        try:
            if not isinstance(group.schema, dict):
                raise ConfigError("the schema is true or false, and no object")
            schema = {"$schema": DRAFTS[group.draft][0]} | group.schema
            answer_format = AnswerFormat("json_schema", written(schema))
            built.grammars.compile(answer_format)
            group.answer_format = answer_format
        except ConfigError as error:
            group.refused = str(error)
    return built


def _group(draft: str, file: str, content: dict[str, Any]) -> Group:
    documents: dict[bool, list[Any]] = {True: [], False: []}
    for test in content["tests"]:
        documents[test["valid"]].append(test["data"])
    return Group(draft, f"{file}: {content['description']}", content["schema"], documents[True], documents[False])


def accepted(draft: str, _: Deadline) -> Measured:
    """Share of the schemas that are compiled."""
    groups = [group for group in suite().groups if draft in ("", group.draft)]
    found = [group for group in groups if not group.refused]
    away = sum("leads to nothing" in group.refused for group in groups)
    empty = sum("no text" in group.refused or "Unsatisfiable" in group.refused for group in groups)
    note = f"{len(found)} of {len(groups)}; of the others, {away} refer to other places, and nothing fits {empty}"
    return Measured(len(found) / len(groups), note)


def wrong(_: Deadline) -> Measured:
    """Invalid documents of the suite that could be written."""
    built = suite()
    cases = [(group, document) for group in built.accepted for document in group.invalid]
    reached = [group.name for group, document in cases if built.reaches(group.answer_format, document)]
    return Measured(len(reached), f"of {len(cases)} documents; {', '.join(reached[:3])}")


@cache
def _unreachable() -> tuple[list[str], list[str], int]:
    """Schemas with a valid document that cannot be written, once for each, and those of them whose `format` alone keeps
    it from that; and the number of all valid documents."""
    built = suite()
    cases = [(group, document) for group in built.accepted for document in group.valid]
    out = [(group, document) for group, document in cases if not built.reaches(group.answer_format, document)]
    formats = [
        group.name
        for group, document in out
        if "format" in group.schema
        and built.reaches(AnswerFormat("json_schema", written(group.schema | {"format": "none"})), document)
    ]
    return [group.name for group, _ in out], formats, len(cases)


def unreachable(formats: bool, _: Deadline) -> Measured:
    """Valid documents of the suite that could not be written; with or without those of formats."""
    out, by_format, count = _unreachable()
    kinds = Counter(name.partition(":")[0] for name in out)
    listed = ", ".join(f"{number} of {name}" for name, number in kinds.most_common())
    note = f"of {count} documents: {listed}; `format` alone keeps out {len(by_format)}"
    return Measured(len(out) - (0 if formats else len(by_format)), note)


# -- beside xgrammar ---------------------------------------------------------------------------------------------------


@dataclass
class Judged:
    """How a library judged the suite's documents."""

    taken: int = 0
    """Schemas that it compiled."""
    right: int = 0
    """Schemas that it compiled and whose documents it all judged right."""
    let_through: int = 0
    """Invalid documents that could be written."""
    kept_out: int = 0
    """Valid documents that could not be written."""
    microseconds: list[float] = field(default_factory=list)
    """Times of masks."""

    def add(self, group: Group, reaches: Callable[[Any], bool]) -> None:
        through = sum(reaches(document) for document in group.invalid)
        out = sum(not reaches(document) for document in group.valid)
        self.taken, self.right = self.taken + 1, self.right + (through == out == 0)
        self.let_through, self.kept_out = self.let_through + through, self.kept_out + out

    def __str__(self) -> str:
        return (
            f"{self.taken} schemas taken, {self.right} of them judged right, {self.let_through} invalid documents let "
            f"through, {self.kept_out} valid ones kept out, {statistics.median(self.microseconds):.0f} us a mask"
        )


def _ours() -> Judged:
    built, judged = suite(), Judged()
    for group in built.accepted:
        judged.add(group, lambda document, group=group: built.reaches(group.answer_format, document))
        constraint, text = built.grammars.compile(group.answer_format).start(), list[int]()
        for token in built.tokenizer.encode(json.dumps(group.valid[0]) if group.valid else ""):
            began = time.perf_counter()
            allowed = constraint.allowed(text, [], built.tokenizer.vocab_size)
            judged.microseconds.append(1e6 * (time.perf_counter() - began))
            if not allowed[0, token]:
                break
            text.append(token)
    return judged


def _theirs() -> Judged:
    """xgrammar on the schemas as they are in the suite; any white space, and additional properties as in the schema."""
    xgrammar, built, judged = importlib.import_module("xgrammar"), suite(), Judged()
    count, (end,) = built.tokenizer.vocab_size, sorted(built.tokenizer.ends)[:1]
    vocabulary = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in range(count)]
    tokens = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=count, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(tokens)
    mask = xgrammar.allocate_token_bitmask(1, count)
    for group in built.groups:
        try:
            grammar = compiler.compile_json_schema(json.dumps(group.schema), any_whitespace=True, strict_mode=False)
        except Exception:  # whatever its parser raises
            continue

        def reaches(document: Any, grammar: Any = grammar) -> bool:
            def written(text: str) -> bool:
                matcher = xgrammar.GrammarMatcher(grammar)
                return all(matcher.accept_token(token) for token in [*built.tokenizer.encode(text), end])

            return any(map(written, texts_of(document)))

        judged.add(group, reaches)
        matcher = xgrammar.GrammarMatcher(grammar)
        for token in built.tokenizer.encode(json.dumps(group.valid[0]) if group.valid else ""):
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            judged.microseconds.append(1e6 * (time.perf_counter() - began))
            if not matcher.accept_token(token):
                break
    return judged


def beside(_: Deadline) -> Measured | NotRun:
    """Share of the schemas that are judged right, with llguidance and the rewriting, less that with xgrammar."""
    if find_spec("xgrammar") is None:
        return NotRun("xgrammar is not installed: pip install --target FOLDER xgrammar, and FOLDER in PYTHONPATH")
    ours, theirs, count = _ours(), _theirs(), len(suite().groups)
    return Measured((ours.right - theirs.right) / count, f"of {count}: ours {ours}; xgrammar {theirs}")


def _number(text: str) -> Decimal | float:
    """A number without rounding, unless its exponent is beyond all bounds."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def drawn(texts: int = TEXTS, seed: int = SEED) -> tuple[int, int, int, list[str]]:
    """Texts drawn, those that were cut off, and those that ended and are invalid, with the names of their schemas."""
    built, draw = suite(), random.Random(seed)
    torch.manual_seed(seed)
    size = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 48, "context": LENGTH + 2, "init_std": 0.3}
    small = adapt(GPT(GPTConfig(vocab_size=built.tokenizer.vocab_size, **size)).eval())
    groups = [draw.choice(built.accepted) for _ in range(texts)]
    engine, cut, invalid = Engine(small, slots=32), 0, list[str]()
    rows = [
        engine.submit(
            Request(
                tokens=[65],
                max_new=LENGTH,
                sampling=Sampling(seed=number),
                constraint=built.grammars.compile(group.answer_format).start(),
                stop=frozenset(built.tokenizer.ends),
            )
        )
        for number, group in enumerate(groups)
    ]
    while engine.busy:
        engine.step()
    engine.close()
    for row, group in zip(rows, groups, strict=True):
        if row.ending != "stop":
            cut += 1
            continue
        uri, validator = DRAFTS[group.draft]
        try:
            # With decimals, for the remainder of two floats is not exact.
            document = json.loads(built.tokenizer.decode(row.text), parse_float=_number)
            schema = json.loads(json.dumps({"$schema": uri} | group.schema), parse_float=_number)
            with localcontext(prec=4 * LENGTH):
                fine = validator(schema).is_valid(document)
        except ValueError:
            fine = False
        invalid += [] if fine else [group.name]
    return texts, cut, len(invalid), invalid


@cache
def _drawn() -> tuple[int, int, int, list[str]]:
    return drawn()


def invalid(_: Deadline) -> Measured:
    count, cut, bad, names = _drawn()
    return Measured(bad, f"of {count - cut} that ended; {', '.join(sorted(set(names))[:3])}")


def truncated(_: Deadline) -> Measured:
    count, cut, _bad, _names = _drawn()
    return Measured(cut / count, f"{cut} of {count} after {LENGTH} bytes")


# -- cost --------------------------------------------------------------------------------------------------------------

OBJECT = {
    "type": "object",
    "properties": {name: {"type": "array", "items": {"type": "string"}} for name in ("names", "places", "things")},
    "required": ["names", "places", "things"],
}


def cost(batch: int, _: Deadline) -> Measured:
    """Time of a batch under a schema over that without it, less one, for 188 M weights and their vocabulary."""
    built = adapt(model(None))
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, tokenizer.ends)
    answer_format = AnswerFormat("json_schema", written(OBJECT))

    def writer(constrained: bool) -> Any:
        engine = Engine(built, slots=batch)

        def work() -> None:
            for seed in range(batch):
                prompt = [(index + seed) % 256 for index in range(PROMPT)]
                constraint = grammars.compile(answer_format).start() if constrained else None
                engine.submit(Request(tokens=prompt, max_new=TOKENS, sampling=Sampling(), constraint=constraint))
            while engine.busy:
                engine.step()

        return work

    ratio = paired(writer(True), writer(False), rounds=ROUNDS)
    return ratio.measured(str(ratio))


def rows() -> Iterator[Bar]:
    """Every bar of formats."""
    peers = ("llguidance", "jsonschema")

    def bar(name: str, what: str, op: Any, limit: float, measure: Any, **more: Any) -> Bar:
        return Bar(f"serving.structured-{name}", what, op, limit, measure=measure, peers=peers, **more)

    for draft, name in (("", "both drafts"), ("draft7", "draft 7"), ("draft2020-12", "draft 2020-12")):
        identity = f"accepted-{draft}".rstrip("-").replace(".", "-")
        what = f"share of the schemas of JSON-Schema-Test-Suite that are accepted, {name}"
        yield bar(identity, what, ">=", 0.8, partial(accepted, draft), kind="exact")
    yield bar("wrong", "invalid documents of the suite that accepted schemas let through", "<=", 0, wrong, kind="exact")
    what = "valid documents of the suite that accepted schemas do not let through, in any form of whole numbers"
    yield bar("unreachable", what, "<=", 0, partial(unreachable, True), kind="exact")
    what += "; those aside that only `format` keeps out, an assertion here, as the specification permits"
    yield bar("unreachable-but-formats", what, "<=", 0, partial(unreachable, False), kind="exact")
    what = f"of {TEXTS} answers drawn at temperature 1, those that ended and are invalid"
    yield bar("invalid", what, "<=", 0, invalid, kind="drawn", seeds=(SEED,))
    what = f"share of {TEXTS} answers drawn at temperature 1 that were cut off"
    yield bar("truncated", what, "<=", 0.01, truncated, kind="drawn", seeds=(SEED,))
    what = "share of the suite's schemas whose documents are all judged right, less that with xgrammar"
    yield bar("xgrammar", what, ">=", 0, beside, kind="exact", baseline="xgrammar")
    for batch, limit in ((8, 1.05), (1, 1.10)):
        what = f"time of a token under a schema over that without, batch of {batch}, 188 M weights"
        yield bar(f"cost-{batch}", what, "<=", limit, partial(cost, batch))
