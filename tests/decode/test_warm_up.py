"""The text that a server generates before the first request."""

import asyncio

import pytest
import small_server

from shoestring.decode.engine import Engine, generate
from shoestring.decode.passes import Counts
from shoestring.decode.request import Request
from shoestring.decode.serve.engine_thread import EngineThread
from shoestring.decode.settings.generation import Sampling

PLAIN = Sampling(temperature=0)


async def answered(worker, request):
    """The tokens of a text, and how it ended."""
    batch, tokens = worker.submit([request]), []
    while True:
        news = await batch.take()
        tokens += news.tokens
        if news.ending is not None:
            return tokens, news.ending


@pytest.mark.parametrize("context", [2, 8, 64])
def test_it_is_not_counted_and_changes_no_text(context):
    model = small_server.model(context=context)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    request = Request(tokens=[0], max_new=context - 1, sampling=PLAIN)  # begins as the text before it did
    wanted = list(generate(model, [0], max_new=context - 1, sampling=PLAIN))

    async def served():
        worker = EngineThread(Engine(model, slots=2), warm_up=True)
        passes.clear()
        worker.start()
        await worker.warm()
        assert passes and worker.engine.counts == Counts() and not worker.engine.busy
        result = await answered(worker, request)
        await worker.close()
        return result

    assert asyncio.run(served()) == (wanted, "length")


def test_a_model_that_fails_is_served_all_the_same(caplog):
    model = small_server.model()

    def fail(*_):
        raise RuntimeError("no memory")

    hook = model.register_forward_pre_hook(fail)

    async def served():
        worker = EngineThread(Engine(model, slots=2), warm_up=True)
        worker.start()
        await worker.warm()
        first = await answered(worker, Request(tokens=[1, 2], max_new=3, sampling=PLAIN))
        hook.remove()
        second = await answered(worker, Request(tokens=[1, 2], max_new=3, sampling=PLAIN))
        await worker.close()
        return first, second

    (_, failed), (tokens, ending) = asyncio.run(served())
    assert (failed, len(tokens), ending) == ("failed", 3, "length")
