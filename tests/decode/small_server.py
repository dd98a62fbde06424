"""A server of a small model in double precision, with a chat template, on a free port of this machine."""

import json
import socket
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import tokenizers
import torch

from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.engine import Engine, generate
from shoestring.decode.serve.app import App
from shoestring.decode.serve.engine_thread import EngineThread
from shoestring.decode.serve.served import describe
from shoestring.decode.serve.server import serving
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.decode.settings.serving import Serving
from shoestring.models.gpt import GPT, GPTConfig

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

KEYS = ("a-key-of-16-chars", "another-key-of-some-length")


def tokenizer(template: str | None = CHATML) -> Tokenizer:
    """Bytes, and the special tokens of ChatML."""
    engine = tokenizers.Tokenizer.from_str(byte_tokenizer().engine.to_str())
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    config: dict[str, Any] = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
    return Tokenizer(engine, companions={"tokenizer_config.json": json.dumps(config).encode()})


def model(context: int = 256, vocabulary: int = 259) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=vocabulary, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, context=context, init_std=0.3
    )
    return GPT(config).double().eval()


@dataclass
class Running:
    """A server that runs."""

    app: App
    url: str
    model: Any
    tokenizer: Tokenizer
    http: httpx.Client = field(init=False)

    def __post_init__(self):
        headers = {"Authorization": f"Bearer {self.app.settings.api_keys[0]}"} if self.app.settings.api_keys else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=headers)

    def generated(self, prompt: str, count: int, seed: int = 0, **sampling: Any) -> str:
        """What `generate` writes."""
        start = self.tokenizer.encode(prompt)
        stream = self.tokenizer.stream(start)
        return "".join(map(stream.add, self.drawn(start, count, seed, **sampling))) + stream.rest()

    def drawn(
        self, prompt: Sequence[int], count: int, seed: int = 0, *, ends: bool = True, **sampling: Any
    ) -> list[int]:
        """The tokens that `generate` draws; where the text never `ends`, as many as `count`."""
        settings, stop = Sampling(seed=seed, **sampling), [self.tokenizer.end_of_text] if ends else []
        return list(generate(self.model, prompt, max_new=count, sampling=settings, stop=stop))

    def raw(self, data: bytes, timeout: float = 10.0) -> bytes:
        """What the server answers to these bytes, until it closes the connection."""
        with self.connect(timeout) as channel:
            channel.sendall(data)
            return received(channel)

    def connect(self, timeout: float = 10.0) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout)


def received(channel: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = bytearray()
    while part := channel.recv(65536):
        found += part
    return bytes(found)


def status(answer: bytes) -> int:
    """Of an answer as bytes."""
    return int(answer.split(b" ", 2)[1])


@contextmanager
def running(
    *, slots=4, template=CHATML, context=256, draft_length=0, endless=False, tokens=None, built=None, **settings
):
    """A server in this process; `settings` as of `Serving`. With a draft length it drafts by prompt lookup.

    The tokenizer is one of bytes unless `tokens` is another, and the model a small GPT unless `built` is another.

    A text is sampled, so it may end at any token; an endless one has all the tokens that are asked for.
    """
    tokens = tokens or tokenizer(template)
    built = model(context, tokens.vocab_size) if built is None else built
    chosen = Serving(**{"port": 0, "grace": 5.0} | settings)
    drafter = PromptLookup() if draft_length else None
    engine = Engine(built, slots=slots, drafter=drafter, speculation=Speculation(draft_length=draft_length))
    served = describe("small", tokens, engine.window, max_tokens=chosen.max_tokens)
    served = replace(served, stop=frozenset()) if endless else served
    app = App(served, EngineThread(engine), chosen)
    with serving(app) as url:
        server = Running(app, url, built, tokens)
        with server.http:
            yield server
    assert app.worker.unfinished == 0
    assert engine.seated == [None] * slots
    assert not app.worker.alive
