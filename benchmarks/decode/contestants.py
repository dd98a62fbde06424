"""Programs that generate text on a CPU, each in a process of its own: ours, llama.cpp, CTranslate2 and transformers.

python -m benchmarks.decode.contestants NAME FOLDER WIDTH THREADS

A process answers each line of JSON, {"prompts": [[ids]], "tokens": n}, with {"seconds": s, "cpu": s}: the time by the
clock and of its processors to write n greedy tokens behind each prompt, read in one batch. No prompt is cached.

All of them have the same weights. Ours and llama.cpp read the same GGUF file: f32, q8_0 or q4_0 (a scale for each 32
weights). CTranslate2 has float32 or int8 (a scale for each row), converted from the same model of transformers, which
itself runs in float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

Generate = Callable[[list[list[int]], int], None]
KINDS = {32: "f32", 8: "q8_0", 4: "q4_0"}
CONTEXT, VOCABULARY = 640, 16384


def ours(folder: Path, width: int, threads: int) -> Generate:
    """The engine, as `serve` and `chat` use it."""
    import torch

    from shoestring.decode.engine import Engine
    from shoestring.decode.request import Request as Wish
    from shoestring.decode.settings.generation import Sampling
    from shoestring.models import gguf, huge_pages

    torch.set_num_threads(threads)
    model, _ = gguf.load(folder / f"{KINDS[width]}.gguf")
    huge_pages.settle(model)  # as `serve` and `chat` do

    def generate(prompts: list[list[int]], tokens: int) -> None:
        room = max(map(len, prompts)) + tokens
        engine = Engine(model, slots=len(prompts), room=room)
        rows = [engine.submit(Wish(tokens=ids, max_new=tokens, sampling=Sampling(temperature=0))) for ids in prompts]
        while engine.busy:
            engine.step()
        engine.close()
        assert all(len(row.history) == len(ids) + tokens for row, ids in zip(rows, prompts, strict=True))

    return generate


def llama_cpp(folder: Path, width: int, threads: int) -> Generate:
    """llama.cpp's server in this process, with its own defaults for attention and its cache; it listens on loopback."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"{KINDS[width]}.gguf")
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 8 * CONTEXT, 8, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def one(ids: list[int], tokens: int) -> None:
        wish = {"n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        body = json.dumps({"prompt": ids, "samplers": ["top_k"], "top_k": 1, **wish}).encode()
        request = Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            assert json.load(answer)["tokens_predicted"] == tokens

    def generate(prompts: list[list[int]], tokens: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts, [tokens] * len(prompts)))

    return generate


def ctranslate2(folder: Path, width: int, threads: int) -> Generate:
    """CTranslate2's generator, which reads all prompts in one batch."""
    library = import_module("ctranslate2")
    kind = {32: "float32", 8: "int8"}[width]
    generator = library.Generator(str(folder / kind), intra_threads=threads, inter_threads=1, compute_type=kind)
    words = json.loads((folder / kind / "vocabulary.json").read_text())

    def generate(prompts: list[list[int]], tokens: int) -> None:
        answers = generator.generate_batch(
            [[words[token] for token in ids] for ids in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
        )
        assert all(len(answer.sequences_ids[0]) == tokens for answer in answers)

    return generate


def transformers(folder: Path, width: int, threads: int) -> Generate:
    """Transformers' `generate`, in float32."""
    import torch

    assert width == 32
    torch.set_num_threads(threads)
    library = import_module("transformers")
    model = library.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        settings = library.GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        written = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert written.shape[1] == ids.shape[1] + tokens

    return generate


CONTESTANTS = {"ours": ours, "llama.cpp": llama_cpp, "CTranslate2": ctranslate2, "transformers": transformers}


class Contestant:
    """A contestant's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """Have it write so many tokens behind each prompt; returns the seconds by the clock and of its processors."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended with exit code {self._process.wait()}")
        return json.loads(line)


@contextmanager
def started(name: str, folder: Path, width: int, threads: int) -> Iterator[Contestant]:
    """A contestant with a model, ended at the end of the context."""
    command = [sys.executable, "-m", "benchmarks.decode.contestants", name, str(folder), str(width), str(threads)]
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        try:
            yield Contestant(process)
        finally:
            process.stdin and process.stdin.close()
            process.wait(60)


def write_models(folder: Path, layers: int, width: int, hidden: int, heads: int) -> None:
    """Write a Llama of random weights in all forms, unless they are there."""
    import torch

    from shoestring.data.tokenizer import byte_tokenizer
    from shoestring.models import gguf

    if (folder / "done").exists():
        return
    library = import_module("transformers")
    tokenizer = byte_tokenizer()
    config = library.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.end_of_text, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf", CONTEXT)
    for kind in gguf.KINDS.values():
        gguf.save(model, tokenizer, folder / f"{kind}.gguf", kind)
    if importlib.util.find_spec("ctranslate2"):
        converter = import_module("ctranslate2.converters").TransformersConverter(str(folder / "hf"))
        for kind in ("float32", "int8"):
            converter.convert(str(folder / kind), quantization=kind, force=True)
            file = folder / kind / "config.json"  # in which tokens that the tokenizer lacks are null
            config = json.loads(file.read_text())
            config = {name: "<|endoftext|>" if value is None else value for name, value in config.items()}
            file.write_text(json.dumps(config))
    (folder / "done").write_text("")


def main(name: str, folder: str, width: str, threads: str) -> None:
    """Answer the lines on standard input."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    generate: Any = CONTESTANTS[name](Path(folder), int(width), int(threads))
    for line in sys.stdin:
        wish = json.loads(line)
        clock, cpu = time.perf_counter(), time.process_time()
        generate(wish["prompts"], wish["tokens"])
        answer = {"seconds": time.perf_counter() - clock, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
