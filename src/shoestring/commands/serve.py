"""`shoestring serve`: a model behind OpenAI's HTTP interface; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from shoestring.core.errors import ConfigError
from shoestring.decode.serve.settings import Serving, read_keys
from shoestring.decode.settings import SKIP, Passes, Speculation

if TYPE_CHECKING:
    from shoestring.decode.serve.app import App

CONTEXT = 8192
"""Tokens of each text that there is memory for, unless more are asked for."""


@dataclass(frozen=True)
class Serve:
    """Serve a trained model over HTTP, with the interface of OpenAI's API and a page to try it in a browser."""

    model: Positional[str]
    """Run folder, model folder, or hf:NAME."""
    slots: int = 4
    """Number of texts that are generated at the same time; more take more memory and make each text slower."""
    context: int = 0
    """Largest number of tokens of a prompt and its text together, for which each slot takes memory; defaults to the
    model's own context, at most 8192."""
    draft: str = ""
    """Proposes tokens that the model then verifies several at a time, which is faster: the folder or `hf:NAME` of a
    smaller model with the same vocabulary, `lookup` (continuations of repeated passages) or `skip` (the model itself
    without some sublayers); by default nothing is drafted."""
    draft_dtype: Literal["own", "model"] = "own"
    """Data type of the weights of a smaller model that drafts: that of its files (`own`), or that of the model that
    verifies (`model`); the narrower one is read faster."""
    passes: Literal["auto", "plain", "graphs", "compiled"] = "auto"
    """Way to run passes over few tokens: `plain` launches their kernels one by one, `graphs` replays them as CUDA
    graphs, and `compiled` also compiles them, which takes minutes at first use; `auto` takes graphs on a GPU where the
    model allows it, and plain passes elsewhere."""
    host: str = Serving.host
    """Address to listen on; any but a loopback address needs --api-key-file."""
    port: int = Serving.port
    """Port to listen on; 0 takes a free one."""
    name: str = ""
    """Name by which clients ask for the model; defaults to the name of its folder."""
    api_key_file: Path | None = None
    """File with API keys, one a line, one of which every client must send; by default no key is needed."""
    allow_origin: tuple[str, ...] = ()
    """Origins of web pages, such as https://example.org, whose scripts may use the server; by default none but its
    own page."""
    max_tokens: int = Serving.max_tokens
    """Largest number of tokens that a client may ask for in one text; 0 is what the context has room for."""
    queue: int = Serving.queue
    """Largest number of texts that wait for a slot; further ones are refused with status 429."""
    clients: int = Serving.clients
    """Largest number of open connections; further ones are refused with status 503."""
    timeout: float = Serving.timeout
    """Seconds that one request may take, waiting included."""
    grace: float = Serving.grace
    """Seconds that running texts have left to end once the server is told to stop, by SIGTERM or Ctrl+C."""

    def __call__(self, overrides: Sequence[str]) -> int:
        settings = Serving(
            host=self.host,
            port=self.port,
            api_keys=() if self.api_key_file is None else read_keys(self.api_key_file),
            origins=self.allow_origin,
            max_tokens=self.max_tokens,
            queue=self.queue,
            clients=self.clients,
            timeout=self.timeout,
            grace=self.grace,
        )
        try:
            from shoestring.decode.serve.server import listen, serve, url_of
        except ImportError as error:
            raise ConfigError(f"serving needs {error.name}", hint="pip install shoestring[serve]") from error
        listener = listen(settings)
        speculation = Speculation(drafter=self.draft, drafter_dtype=self.draft_dtype)
        app = build(
            self.model, settings, speculation, self.passes, slots=self.slots, context=self.context, name=self.name
        )
        said = f"{app.served.name} at {url_of(listener)}: {self.slots} slots of {app.served.context} tokens"
        import asyncio  # a tenth of what `shoestring --help` takes

        asyncio.run(serve(app, listener, ready=lambda: print(said, flush=True)))
        return 0


def build(
    source: str,
    settings: Serving,
    speculation: Speculation,
    passes: Passes = "auto",
    *,
    slots: int,
    context: int = 0,
    name: str = "",
) -> App:
    """The application that serves a model, on the GPU where there is one.

    Raises:
        CheckpointError: `source` holds no model. ConfigError: no tokenizer with it, or a number out of range.
    """
    from shoestring.core.world import own_device
    from shoestring.decode.compiled import choose_passes
    from shoestring.decode.drafters import open_drafter
    from shoestring.decode.engine import Engine
    from shoestring.decode.serve.app import App
    from shoestring.decode.serve.engine_thread import EngineThread
    from shoestring.decode.serve.served import describe
    from shoestring.models.loading import load_model
    from shoestring.models.saving import source_folder

    model, tokenizer = load_model(source)
    if tokenizer is None:
        raise ConfigError(f"`{source}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    model = model.to(own_device(0))
    adapter = choose_passes(model, context or None, passes, skips=speculation.drafter == SKIP)
    room = None if context else CONTEXT
    drafter = open_drafter(speculation, model, tokenizer, slots=slots, room=room or context, passes=passes)
    engine = Engine(adapter, slots=slots, room=room, drafter=drafter, speculation=speculation)
    folder = source_folder(source)
    served = describe(
        name or Path(source.removeprefix("hf:")).resolve().name, tokenizer, engine.window, folder, settings.max_tokens
    )
    return App(served, EngineThread(engine), settings)
