"""Text from a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.models.gpt import GPT, KVCache


def generate(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    max_new: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
    context: int | None = None,
) -> Iterator[int]:
    """Continue `tokens`, yielding each new token as soon as it is drawn.

    A `GPT` keeps the keys and values of what it has read. Any other module that maps (1, T) tokens to logits (1, T, V),
    or to an object with `.logits`, reads its whole window at each token. Both see the same window: everything until the
    context is full; then the oldest quarter is dropped at once, so that a cache is filled again only rarely.
    The model is in eval mode until the iterator ends or is closed.

    Args:
        model: on any device; its weights are not changed.
        tokens: the prompt, at least one token: a sequence of integers or a (T,) tensor.
        max_new: the most tokens to yield.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens; 0 means all.
        top_p: draw among the fewest likeliest tokens whose probabilities add up to at least this.
        seed: of a generator of its own: the same seed and logits give the same text.
        stop: ends at one of these tokens, which is not yielded.
        context: tokens in the window; default `model.config.context` or `model.config.max_position_embeddings`.

    Raises:
        ConfigError: an argument out of range, an empty prompt, or no known context.
        NonFiniteError: the model's logits are NaN or infinite.
    """
    history = [int(token) for token in tokens]
    _check(len(history), max_new, temperature, top_k, top_p)
    window = _context(model, context)
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(distribution(logits, temperature, top_k, top_p), 1, generator=generator))

    return _stream(model, history, window, max_new, draw, frozenset(stop))


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """What `generate` draws from: probabilities (V,) in float32 after temperature, then top-k, then top-p.

    Of equally likely tokens the first are kept (Holtzman et al. 2020 for top-p). `temperature` is above 0.
    """
    ordered, index = (logits.float() / temperature).sort(descending=True, stable=True)
    if top_k:
        ordered, index = ordered[:top_k], index[:top_k]
    kept = ordered.softmax(-1)
    kept = kept.masked_fill(kept.cumsum(-1) - kept >= top_p, 0.0)
    return torch.zeros(logits.shape, device=logits.device).scatter(-1, index, kept / kept.sum())


def _stream(
    model: nn.Module, history: list[int], window: int, max_new: int, draw: Callable[[Tensor], int], stop: frozenset[int]
) -> Iterator[int]:
    was_training = model.training
    model.eval()
    try:
        read = _cached(model, window) if isinstance(model, GPT) else _uncached(model, window)
        for _ in range(max_new):
            logits = read(history).cpu()
            # The maximum is NaN when any logit is; minus infinity alone is a token ruled out.
            if not logits.max().isfinite():
                raise NonFiniteError(f"the model's logits after {len(history)} tokens are not finite")
            token = draw(logits)
            if token in stop:
                return
            yield token
            history.append(token)
    finally:
        model.train(was_training)


def _cached(model: GPT, window: int) -> Callable[[list[int]], Tensor]:
    weight = model.embed.weight
    cache = KVCache(model.config, 1, device=weight.device, dtype=weight.dtype)
    begun = 0

    @torch.no_grad()
    def read(history: list[int]) -> Tensor:
        nonlocal begun
        start = window_start(len(history), window)
        if start != begun:
            begun, cache.length = start, 0
        fresh = torch.tensor([history[start + cache.length :]], device=weight.device)
        return model(fresh, cache)[0, -1]

    return read


def _uncached(model: nn.Module, window: int) -> Callable[[list[int]], Tensor]:
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")

    @torch.no_grad()
    def read(history: list[int]) -> Tensor:
        output = model(torch.tensor([history[window_start(len(history), window) :]], device=device))
        return getattr(output, "logits", output)[0, -1]

    return read


def window_start(length: int, window: int) -> int:
    """The first token still seen after `length` tokens: 0 until `window` is full, then steps of a quarter of it."""
    stride = max(1, window // 4)
    return max(0, -(-(length - window) // stride) * stride)


def _context(model: nn.Module, context: int | None) -> int:
    config = getattr(model, "config", None)
    known = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    window = context or known
    if not isinstance(window, int) or window < 1 or (known and window > known):
        raise ConfigError(
            f"a context of {window} tokens does not suit {type(model).__name__}",
            hint=f"give `context` from 1 to {known or 'what the model was trained on'}",
        )
    return window


def _check(prompt: int, max_new: int, temperature: float, top_k: int, top_p: float) -> None:
    if prompt == 0:
        raise ConfigError("the prompt has no tokens", hint="begin with the tokenizer's end-of-text token")
    if max_new < 0:
        raise ConfigError(f"max_new is {max_new}", hint="give 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}", hint="give 0 for the likeliest token, or a positive number")
    if top_k < 0:
        raise ConfigError(f"top_k is {top_k}", hint="give 0 for all tokens, or a positive number")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}", hint="give a number above 0, at most 1")
