"""llama.cpp reads the GGUF files that we write, and we read those that it writes: a table of architectures and types.

python -m benchmarks.models.gguf [NAME ...]

Needs the wheel xllamacpp (llama.cpp with its server, MIT, 34 MB). Greedy texts of f32 files must be equal, token by
token; rounded files are compared with our own reading of the same file, by the logarithms of probabilities.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

import torch

from shoestring.models import gguf, gguf_tokenizer
from tests.rigs import gguf_models as rig

PROMPTS = ("the lazy dog, and the fox", "isn't it 7 o'clock? <think>", "a")
TOKENS = 40
TEXTS = 300
NEAR = {"f32": 5e-3, "f16": 1e-2, "q8_0": 0.15, "q4_0": 0.3}
"""Largest difference of the logarithm of a probability. llama.cpp rounds the inputs of rounded weights to 8 bits, and
those of GELU to 16."""


def text_column(name: str, path: Path) -> str:
    """Whether llama.cpp writes the greedy texts of transformers from an f32 file."""
    tokenizer = rig.byte_level()
    model = rig.build(name, tokenizer.vocab_size + 5)
    gguf.save(model, tokenizer, path, "f32")
    with rig.llama_cpp(path) as server:
        for prompt in PROMPTS:
            ids = rig.read_special(tokenizer, prompt)
            if server.tokenize(prompt, special=True) != ids:
                return f"no: tokens of {prompt!r}"
            ours, theirs = rig.greedy(model, tokenizer, ids, TOKENS), server.greedy(ids, TOKENS)
            if ours != theirs:
                same = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) == 2)
                return f"no: {same} of {TOKENS} tokens"
    return "yes"


def near_column(name: str, path: Path, kind: gguf.Kind) -> str:
    """How far llama.cpp is from our reading of the same file."""
    tokenizer = rig.byte_level()
    gguf.save(rig.build(name, tokenizer.vocab_size + 5), tokenizer, path, kind)
    model, _ = gguf.load(path)
    worst, measured = 0.0, 0
    with rig.llama_cpp(path) as server:
        for length in range(1, 40, 3):
            ids = tokenizer.encode(rig.TEXT[:length])
            ours = rig.logits(model, ids)[-1].log_softmax(-1)
            theirs = server.logarithms(ids, len(ours))
            measured += len(theirs)
            worst = max([worst, *(abs(float(ours[i]) - value) for i, value in theirs.items())])
    if measured < 3 * tokenizer.vocab_size:
        return f"no: {measured} probabilities alone"
    return f"{'yes' if worst <= NEAR[kind] else 'no'}: {worst:.0e}"


def saved_column(path: Path, again: Path) -> str:
    """Whether we read what llama.cpp has saved, with the same logits."""
    rig.save_again(path, again)
    (ours, mine), (theirs, other) = gguf.load(path), gguf.load(again)
    assert mine is not None and other is not None
    ids = mine.encode(rig.TEXT)[:48]
    if other.encode(rig.TEXT)[:48] != ids:
        return "no: tokens"
    if lost := rig.lost_keys(path, again):
        return f"no: {lost}"
    return "yes" if torch.equal(rig.logits(ours, ids), rig.logits(theirs, ids)) else "no: logits"


def token_rows(path: Path) -> list[tuple[str, str]]:
    """For each rule of splitting, whether llama.cpp makes the tokens of transformers, and we after reading."""
    rows = []
    tokenizers = {name: rig.split_as(rule) for name, rule in gguf_tokenizer.RULES.items()}
    draw = Random(0)
    texts = ["", "a", " ", *(rig.random_text(draw) for _ in range(TEXTS))]
    for name, tokenizer in {**tokenizers, "byte fallback": rig.byte_fallback()}.items():
        gguf.save(rig.build("llama", tokenizer.vocab_size), tokenizer, path, "f32")
        _, back = gguf.load(path)
        assert back is not None
        wrong = 0
        with rig.llama_cpp(path) as server:
            for text in texts:
                plain, special = tokenizer.encode(text), rig.read_special(tokenizer, text)
                wrong += server.tokenize(text) != plain or back.encode(text) != plain
                wrong += server.tokenize(text, special=True) != special or rig.read_special(back, text) != special
        rows.append((name, "yes" if not wrong else f"no: {wrong} of {2 * len(texts)}"))
    return rows


def main(names: list[str]) -> int:
    if not rig.has_llama_cpp():
        print("this needs llama.cpp: pip install xllamacpp", file=sys.stderr)
        return 2
    table: list[tuple[str, ...]] = [("model", "f32, same text", "f32", "f16", "q8_0", "q4_0", "saved by llama.cpp")]
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / "model.gguf", Path(folder) / "again.gguf"
        for name in names or rig.MODELS:
            near = [near_column(name, path, kind) for kind in gguf.KINDS.values()]
            text = text_column(name, path)
            table.append((name, text, *near, saved_column(path, again)))
        for row in table:
            print(" | ".join(f"{cell:16}" for cell in row))
        rows = token_rows(path)
    for rule, answer in rows:
        print(f"tokens of {2 * TEXTS + 6} texts, {rule:14} | {answer}")
    return int(any(cell.startswith("no") for row in (*table, *rows) for cell in row))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
