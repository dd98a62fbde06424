"""What generation asks of a model: to read tokens into a cache, a row of a batch at a position of its own."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.models import hf, skinny
from shoestring.models.cache import CachePlace, KVCache
from shoestring.models.gpt import GPT

log = logging.getLogger("shoestring")

Wanted = Literal["all", "last"]

CHECKED = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3", "gemma2")
"""Types of transformers' models whose reading into this cache the tests compare with reading them whole."""


class Adapter(ABC):
    """A model that generates. B rows of a cache, T tokens for each, V words in the vocabulary."""

    captured = False
    """Passes are fixed when they are first made, so that nothing of the model can be skipped later."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model, self.context = model, context
        self.products = skinny.Products(model)
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device

    @abstractmethod
    def new_cache(self, rows: int, length: int) -> KVCache:
        """A cache for `rows` sequences of at most `length` tokens."""

    @abstractmethod
    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        """Logits (B, T, V), or of `last` tokens only, of tokens that go into the cache at `place`."""

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
        """Read tokens and lengthen the cache by them.

        Args:
            tokens: (B, T), int64.
            rows: of the cache that they continue; default all.
            counts: how many of the tokens of each row are real, those behind being padding; default all.
            wanted: the logits of all tokens, or of the last position only.

        Returns:
            Logits (B, T, V), or (B, 1, V), in the type of the model.

        Raises:
            ConfigError: the cache has no room.
        """
        place = cache.place(tokens.shape[1], self.device, rows=rows, counts=counts)
        with self.products:
            logits = self.logits(tokens.to(self.device), cache, place, 1 if wanted == "last" else None)
        cache.lengthen(tokens.shape[1], place, counts)
        return logits


def adapt(model: nn.Module, context: int | None = None) -> Adapter:
    """The adapter of a model: ours, one of transformers, or any that maps tokens (B, T) to logits (B, T, V).

    The last kind has no use for a cache: it reads all its text again for each token, which is slow and the same text.

    Args:
        context: the most tokens that are seen; default the model's own.

    Raises:
        ConfigError: the context is not known, or larger than the model's.
    """
    context = _context(model, context)
    if isinstance(model, GPT):
        return OwnModel(model, context)
    if hf.is_pretrained(model):
        if (unfit := _unfit(model)) is None:
            return Pretrained(model, context)
        log.warning("%s is read whole for each token, which is slow: %s", type(model).__name__, unfit)
    return Whole(model, context)


class OwnModel(Adapter):
    """Our `GPT`."""

    def new_cache(self, rows: int, length: int) -> KVCache:
        return KVCache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        return self.model(tokens, cache, place, last=last)


class Pretrained(Adapter):
    """A causal language model of transformers, with a cache and masks of ours in place of its own."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__(model, context)
        config: Any = model.config
        self.config = config.get_text_config()
        accepted = inspect.signature(model.forward).parameters
        self.shortens = "logits_to_keep" in accepted
        self.kinds: list[str] = getattr(self.config, "layer_types", None) or []
        self.window: int | None = getattr(self.config, "sliding_window", None)
        if self.window and not getattr(self.config, "use_sliding_window", True):
            self.window = None
        self.additive = getattr(self.config, "_attn_implementation", "sdpa") not in ("sdpa", "flex_attention")

    def new_cache(self, rows: int, length: int) -> KVCache:
        return KVCache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        positions = place.positions.clamp(max=self.context - 1)  # padding behind a full row
        given: dict[str, Any] = {"logits_to_keep": last} if last and self.shortens else {}
        logits = self.model(
            input_ids=tokens,
            position_ids=positions.expand(len(tokens), -1),
            attention_mask=self._masks(place),
            past_key_values=_Written(cache, place),
            use_cache=True,
            **given,
        ).logits
        return logits if last is None else logits[:, -last:]

    def _masks(self, place: CachePlace) -> Tensor | Mapping[str, Tensor]:
        """As the model takes them: one, or one for each kind of its layers."""
        windows = {"full_attention": None, "sliding_attention": self.window}
        if len(set(self.kinds)) > 1:
            return {kind: self._mask(place, windows[kind]) for kind in set(self.kinds)}
        sliding = self.kinds[0] == "sliding_attention" if self.kinds else True
        return self._mask(place, self.window if sliding else None)

    def _mask(self, place: CachePlace, window: int | None) -> Tensor:
        mask = place.mask(window)
        if not self.additive:
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class _Written:
    """What a layer of transformers asks of a cache, in one pass."""

    def __init__(self, cache: KVCache, place: CachePlace) -> None:
        self.cache, self.place = cache, place

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.append(layer_idx, keys, values, self.place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.place.end - self.place.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.place.end, 0

    is_compileable = False


class Remembered(KVCache):
    """A cache of the tokens themselves, for models that read them all again."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(rows, length)
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.int64)

    def copy(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]
        self.lengths[target] = length


class Whole(Adapter):
    """Any module from tokens (B, T) to logits (B, T, V), or to an object with `.logits`."""

    def new_cache(self, rows: int, length: int) -> KVCache:
        return Remembered(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        assert isinstance(cache, Remembered)
        positions = place.positions.cpu().expand(len(tokens), -1)
        held = cache.tokens[place.rows]
        held[torch.arange(len(held))[:, None], positions] = tokens.cpu()
        output = self.model(held[:, : place.end].to(self.device))
        logits = getattr(output, "logits", output)
        at = positions[:, -(last or positions.shape[1]) :].to(logits.device).clamp(max=logits.shape[1] - 1)
        return logits.take_along_dim(at[..., None], dim=1)


def _context(model: nn.Module, context: int | None) -> int:
    config: Any = getattr(model, "config", None)
    known = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    window = context or known
    if not isinstance(window, int) or window < 1 or (known and window > known):
        raise ConfigError(
            f"a context of {window} tokens does not suit {type(model).__name__}",
            hint=f"give `context` from 1 to {known or 'what the model was trained on'}",
        )
    return window


def _unfit(model: nn.Module) -> str | None:
    """Why a model of transformers cannot read into our cache; None where it can."""
    config: Any = model.config
    text = config.get_text_config()
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "it takes no cache"
    others = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if others:
        return f"its layers are of the kind {', '.join(sorted(others))}"
    if text.model_type in CHECKED:
        return None
    try:
        apart = difference(model)
    except Exception as error:  # whatever a model does that expects another cache
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if apart < 0.02 else f"with a cache its logits are off by {apart:.2g}"


@torch.inference_mode()
def difference(model: nn.Module) -> float:
    """How far logits from the cache, of rows unlike in length, are from those of reading whole; in their spread."""
    adapter, whole = Pretrained(model, 16), Whole(model, 16)
    config: Any = model.config
    tokens = torch.arange(14).view(2, 7) % config.get_text_config().vocab_size
    cache = adapter.new_cache(2, 16)
    adapter.read(tokens[:1, :3], cache, rows=slice(0, 1))
    adapter.read(tokens[1:, :1], cache, rows=slice(1, 2))
    padded = torch.stack([tokens[0, 3:7], tokens[1, 1:5]])
    got = adapter.read(padded, cache, counts=[4, 2])
    wanted = whole.read(tokens, whole.new_cache(2, 16))
    pairs = [(got[0, i], wanted[0, 3 + i]) for i in range(4)] + [(got[1, i], wanted[1, 1 + i]) for i in range(2)]
    worst = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    return worst / max(float(wanted.float().std()), 1e-12)
