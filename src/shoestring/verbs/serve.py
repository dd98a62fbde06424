"""`shoestring serve`: serves a trained model over an HTTP API that is compatible with OpenAI's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.decode.serve.served import describe
from shoestring.decode.settings.generation import Decoding, SamplingOptions, SamplingRule
from shoestring.decode.settings.serving import Serving
from shoestring.models import huge_pages
from shoestring.processors import in_own_thread
from shoestring.verbs.generate import build_engine, open_described

if TYPE_CHECKING:
    from shoestring.decode.serve.app import App

log = logging.getLogger("shoestring")

CONTEXT = 8192
"""Number of tokens per text that the KV cache can hold, unless the settings give a different number."""


def serve(
    model: str,
    serving: Serving | None = None,
    sampling: SamplingOptions | None = None,
    decoding: Decoding | None = None,
    *,
    ready: Callable[[str], object] = lambda _: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT, on the GPU if there is one.

    Args:
        model: run folder, model folder, or hf:NAME.
        sampling: sampling settings for requests that specify none; a setting that is None defaults to the value in the
            model's files.
        ready: function that is called with a line that names the server's address, once requests can be answered.

    Raises:
        CheckpointError: the model does not exist, or an adapter does not fit it.
        ConfigError: the model has no tokenizer, a number is out of range, the address is not available, or the packages
            of the server are not installed.
    """
    try:
        from shoestring.decode.serve import server
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}", hint="pip install shoestring[serve]") from error
    serving = serving or Serving()
    listener = server.listen(serving)
    # Build in another thread: only the engine's thread, not this one, should own a pool of OpenMP threads.
    app = in_own_thread(partial(build_app, model, serving, sampling, decoding))
    line = f"{app.served.name} at {server.url_of(listener)}: {serving.slots} slots of {app.served.context} tokens"
    line += f"; adapters: {', '.join(app.adapters.loaded)}" if app.adapters.loaded else ""
    line += f"; {defaults}" if (defaults := str(app.served.defaults)) else ""
    asyncio.run(server.serve(app, listener, ready=lambda: ready(line)))


def build_app(
    model: str, serving: Serving, sampling: SamplingOptions | None = None, decoding: Decoding | None = None
) -> App:
    """Build the application that serves a model; for the arguments and errors, see `serve`."""
    from shoestring.decode.serve.adapters import AdapterCatalog
    from shoestring.decode.serve.app import App
    from shoestring.decode.serve.engine_thread import EngineThread

    log.info("loading %s", model)
    began = time.perf_counter()
    built, tokenizer, description = open_described(model)
    huge_pages.settle(built)
    count = sum(parameter.numel() for parameter in built.parameters())
    log.info(
        "loaded %s parameters in %s; preparing generation", f"{count:,}", figures.seconds(time.perf_counter() - began)
    )
    defaults = (sampling or SamplingOptions()).over(description.sampling, SamplingRule())
    engine = build_engine(
        built,
        tokenizer,
        decoding or Decoding(),
        slots=serving.slots,
        context=serving.context or None,
        room=None if serving.context else CONTEXT,
        adapters=serving.adaptable,
        pass_seconds=serving.pass_seconds,
    )
    served = describe(
        serving.name or Path(model.removeprefix("hf:")).resolve().name,
        tokenizer,
        engine.window,
        description.ends,
        serving.max_tokens,
        engine.model.vocabulary,
        defaults,
    )
    adapters = AdapterCatalog(engine.model, served, serving, model)
    for name, folder in serving.adapters.items():
        if name == served.name:
            raise ConfigError(f"--adapter {name}: this is the model's own name", hint="give it another name")
        adapters.add(name, folder)
    app = App(served, EngineThread(engine, warm_up=True), serving, adapters)
    if served.chat:
        app.understanding.check()
    return app
