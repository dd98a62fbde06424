"""The interface through which the engine runs any causal language model (`Adapter`), and its implementations: they read
tokens into a cache whose rows may differ in length."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.models import decoder_layers, hf, skinny
from shoestring.models.adapters_by_row import LoadedAdapter
from shoestring.models.behaviour import Behaviour, observe
from shoestring.models.cache import CachePlace, KVCache
from shoestring.models.decoder_layers import DecoderLayers
from shoestring.models.gpt import GPT
from shoestring.models.hf_cache import OwnCache, RaggedPasses, TextCache, TextPasses

log = logging.getLogger("shoestring")

Wanted = Literal["all", "last"]


UNLIMITED = 1 << 15
"""Context length, in tokens, if neither the caller nor the model's configuration states one."""


class Adapter(ABC):
    """A model wrapped for generation. Shapes: B is the number of cache rows in a pass, T the number of tokens read for
    each row, V the vocabulary size."""

    captured = False
    """Whether forward passes are captured or compiled at first use, so that sublayers cannot be skipped later."""
    skips = True
    """Whether forward passes may skip sublayers; a skipped sublayer stores nothing in the cache."""
    pieces = True
    """Whether a text may be read in several passes of any length. If false, a prompt is read in one pass, and no
    prefix that was cached for another text is reused."""
    shares = True
    """Whether a pass over several texts takes less time than a separate pass over each text."""
    native_layers: DecoderLayers | None = None
    """Native code that runs the layers in passes over few tokens; None if it does not support the model's layers."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model, self.context = model, context
        self.products = skinny.Products(model)
        if hf.is_pretrained(model):
            words = getattr(cast(Any, model).get_input_embeddings(), "num_embeddings", None)
        else:
            words = getattr(getattr(model, "config", None), "vocab_size", None)
        self.vocabulary = words if isinstance(words, int) else None
        """Number of token ids that the model has embeddings for; None if it is not known."""
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device

    @abstractmethod
    def new_cache(self, rows: int, length: int) -> KVCache:
        """Create a cache for `rows` sequences of at most `length` tokens."""

    def assign(self, cache: KVCache, row: int, adapter: LoadedAdapter | None) -> None:
        """Assign a low-rank adapter to a row of a cache, for all later passes; None removes the row's adapter.

        Raises:
            ConfigError: the adapter belongs to another model, or this model cannot use adapters.
        """
        if adapter is not None:
            raise ConfigError("this model was not prepared for adapters", hint="wrap it in `AdaptedRows`")

    @abstractmethod
    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        """Read tokens (B, T) into the cache at `place`; returns logits (B, T, V), or only the logits of the final
        `last` positions of each row."""

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        rows: slice | None = None,
        counts: Sequence[int] | None = None,
        wanted: Wanted = "all",
    ) -> Tensor:
        """Read tokens, and append them to the rows of the cache.

        Args:
            tokens: (B, T), int64.
            rows: rows of the cache to continue; defaults to all rows.
            counts: number of real tokens of each row, which are followed by padding; by default there is no padding.
            wanted: `all` returns the logits of every position, `last` only the logits of each row's last real token.

        Returns:
            Logits (B, T, V), or (B, 1, V), in the data type of the model.

        Raises:
            ConfigError: the cache has no room for the tokens.
        """
        length = tokens.shape[1]
        place = cache.place(length, self.device, rows=rows, counts=counts)
        # The last real tokens of all rows are among the final `last` positions.
        last = None if wanted == "all" else length + 1 - min(count for count in counts or [length] if count)
        if self.native_layers is not None and self.native_layers.fits(tokens, cache):
            stream = self.native_layers.run(tokens, cache, place)
            with self.products:
                logits = self.native_layers.decoder.head(stream if last is None else stream[:, -last:])
        else:
            with self.products:
                logits = self.logits(tokens.to(self.device), cache, place, last)
        cache.lengthen(length, place, counts)
        if counts is None or last is None or last == 1:
            return logits
        ends = torch.tensor([max(count - 1 - (length - last), 0) for count in counts], device=logits.device)
        return logits[torch.arange(len(counts), device=logits.device), ends][:, None]


def adapt(model: nn.Module, context: int | None = None) -> Adapter:
    """Create the `Adapter` through which the engine runs a model: it maps tokens to logits, with or without a cache.

    The model may be the package's own `GPT`, a model of transformers, or any other module that maps tokens (B, T) to
    logits (B, T, V). A module that is neither a `GPT` nor a model of transformers cannot use a cache: it reads its
    whole text again for each token, which is slow. For a model of transformers, test passes determine how it uses a
    cache; see `shoestring.models.behaviour`.

    Args:
        context: largest number of tokens that the model sees; defaults to the model's own.

    Raises:
        ConfigError: the context length is not known, or larger than the model supports.
    """
    context = _context(model, context)
    if isinstance(model, GPT):
        return OwnModel(model, context)
    if not hf.is_pretrained(model):
        return Whole(model, context)
    behaviour = observe(model)
    if behaviour.cache == "ours":
        return Pretrained(model, context, behaviour)
    if behaviour.cache == "its own":
        return OwnCached(model, context, behaviour.own_cache)
    log.warning("%s reads its whole text again for each token, which is slow: %s", type(model).__name__, behaviour.why)
    return Whole(model, context, apart=not behaviour.rows_independent)


class OwnModel(Adapter):
    """Runs the package's own `GPT` with a key/value cache."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__(model, context)
        self.native_layers = decoder_layers.of(model)

    def new_cache(self, rows: int, length: int) -> KVCache:
        return KVCache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        return self.model(tokens, cache, place, last=last)


class Pretrained(Adapter):
    """Runs a causal language model of transformers with this package's cache and attention masks instead of the
    model's own."""

    def __init__(self, model: nn.Module, context: int, behaviour: Behaviour) -> None:
        super().__init__(model, context)
        self.passes = RaggedPasses(model, behaviour.argument, context)
        self.native_layers = decoder_layers.of(model) if behaviour.native_layers else None

    def new_cache(self, rows: int, length: int) -> KVCache:
        return KVCache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        return self.passes.logits(tokens, cache, place, last)


class Remembered(KVCache):
    """A cache that stores tokens but no keys and values, for models that read the whole text in each pass."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(rows, length)
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.int64)

    def copy(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]
        self.lengths[target] = length


class OwnCaches(Remembered):
    """A cache that stores the tokens of each row and one cache object of transformers per row."""

    def __init__(self, rows: int, length: int, passes: TextPasses) -> None:
        super().__init__(rows, length)
        self.passes = passes
        self.texts = [TextCache() for _ in range(rows)]

    def copy(self, source: int, target: int, length: int) -> None:
        copied = self.texts[source].copied()
        self.passes.shorten(copied, length)
        self.texts[target] = copied
        super().copy(source, target, length)


class OwnCached(Adapter):
    """Runs a model of transformers that needs a separate cache object, and so a separate pass, for each text."""

    skips = False
    shares = False

    def __init__(self, model: nn.Module, context: int, own: OwnCache) -> None:
        super().__init__(model, context)
        self.passes = TextPasses(model, own)
        self.pieces = own.pieces

    def new_cache(self, rows: int, length: int) -> KVCache:
        return OwnCaches(rows, length, self.passes)

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        rows: slice | None = None,
        counts: Sequence[int] | None = None,
        wanted: Wanted = "all",
    ) -> Tensor:
        assert isinstance(cache, OwnCaches)
        count = tokens.shape[1]
        place = cache.place(count, torch.device("cpu"), rows=rows, counts=counts)
        last = 1 if wanted == "last" else None
        results: list[Tensor | None] = []
        for index, row in enumerate(range(cache.rows)[place.rows]):
            start, own = cache.lengths[row], count if counts is None else counts[index]
            cache.tokens[row, start : start + own] = tokens[index, :own]
            text = cache.tokens[row, : start + own]
            with self.products:
                results.append(self.passes.extend(cache.texts[row], text, own, last) if own else None)
        cache.lengthen(count, place, counts)
        if len(results) == 1 and results[0] is not None:
            return results[0]
        return side_by_side(results, last or count)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        raise NotImplementedError("this adapter runs a separate pass for each row, in `read`")


def side_by_side(results: Sequence[Tensor | None], count: int) -> Tensor:
    """Combine the logits of several rows into one tensor (B, T, V), padded on the right.

    Args:
        results: logits (1, t, V) of each row, t at most T; None for a row that read no tokens.
        count: T.
    """
    first = next(result for result in results if result is not None)
    logits = first.new_zeros(len(results), count, first.shape[2])
    for row, result in enumerate(results):
        if result is not None:
            logits[row, : result.shape[1]] = result[0]
    return logits


class Whole(Adapter):
    """Runs any module that maps tokens (B, T) to logits (B, T, V), or to an object with `.logits`; reads the whole text
    in each pass.

    Args:
        apart: whether each row is read in a separate pass, because rows in the same pass would influence each other.
    """

    pieces = False  # a pass over a later part would read all earlier parts again

    def __init__(self, model: nn.Module, context: int, *, apart: bool = False) -> None:
        super().__init__(model, context)
        self.apart = apart

    def new_cache(self, rows: int, length: int) -> KVCache:
        return Remembered(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        assert isinstance(cache, Remembered)
        positions = place.positions.cpu().expand(len(tokens), -1)
        held = cache.tokens[place.rows]
        held[torch.arange(len(held))[:, None], positions] = tokens.cpu()
        texts = held[:, : place.end].to(self.device)
        at = positions[:, -(last or positions.shape[1]) :].to(self.device)
        if not self.apart:
            return self._select(texts, at)
        ends = (positions[:, -1] + 1).clamp(max=place.end).tolist()
        return torch.cat([self._select(texts[row : row + 1, :end], at[row : row + 1]) for row, end in enumerate(ends)])

    def _select(self, texts: Tensor, at: Tensor) -> Tensor:
        """Run the model over whole texts, and return the logits at the positions `at`, (B, T)."""
        output = self.model(texts)
        logits = getattr(output, "logits", output)
        return logits.take_along_dim(at.to(logits.device).clamp(max=logits.shape[1] - 1)[..., None], dim=1)


def _context(model: nn.Module, context: int | None) -> int:
    """The context length to use: `context`, or by default the model's own; raises a ConfigError if the model does not
    support the length."""
    config: Any = getattr(model, "config", None)
    if hf.is_pretrained(model):
        known = hf.context_of(config)
        window = context or known or UNLIMITED
    else:
        known = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
        window = context or known
    if not isinstance(window, int) or window < 1 or (known and window > known):
        raise ConfigError(
            f"a context of {window} tokens does not suit {type(model).__name__}",
            hint=f"give `context` from 1 to {known or 'what the model was trained on'}",
        )
    return window
