"""GGUF files of a small model, with counts, sizes and types that are not what follows them."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from tests.hostile import hostile
from tests.hostile.frame import Act, command

COUNTS = (2**31, 2**32 - 1, 2**63, 2**64 - 1, 0, 1)
NAMES = (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count", b"llama.context_length",
         b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type", b"token_embd.weight",
         b"blk.0.ffn_up.weight", b"tokenizer.ggml.eos_token_id")  # fmt: skip


def write(draw: Random, path: Path) -> None:
    import torch

    from shoestring.data.tokenizer import byte_tokenizer
    from shoestring.models import gguf
    from shoestring.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=257, dim=32, layers=2, heads=2, kv_heads=1, hidden=64, context=64)
    gguf.save(GPT(shape), byte_tokenizer(), path, draw.choice(("f32", "f16", "q8_0", "q4_0")))


def generate(draw: Random, folder: Path) -> Act:
    path = folder / "model.gguf"
    write(draw, path)
    act = draw.random()
    data = bytearray(path.read_bytes())
    if act < 0.15:
        hostile.put_odd(draw, path)
    elif act < 0.3:
        hostile.tamper_bytes(draw, path)
    elif act < 0.45:  # the numbers of tensors and of values
        struct.pack_into("<Q", data, draw.choice((8, 16)), draw.choice(COUNTS))
        path.write_bytes(data)
    else:  # what follows the name of a value or tensor: its type, its count, its sizes
        for _ in range(draw.choice((1, 2))):
            name = draw.choice(NAMES)
            at = data.index(name) + len(name) + draw.choice((0, 4, 8, 12, 16, 20, 24))
            struct.pack_into(draw.choice(("<Q", "<I")), data, at, draw.choice(COUNTS) % 2**32)
            if draw.random() < 0.5:
                struct.pack_into("<Q", data, at, draw.choice(COUNTS))
        path.write_bytes(data)
    if draw.random() < 0.7:
        return command("generate", "model.gguf", "--tokens", "2", "--prompt", "a")
    return command("serve", "model.gguf", "--context", "-1")  # is refused once the model is open, at the latest
