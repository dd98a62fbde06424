"""Finds out, by running a small random copy of a transformers model, how the model handles caches, other texts in a
batch, and packed samples.

An observation takes seconds, so its result is stored on disk, under a digest of the configuration and of the versions
of torch and transformers.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoestring import native
from shoestring.core.errors import ShoestringError
from shoestring.models import hf
from shoestring.models.hf_cache import OwnCache, cache_argument, carried_by
from shoestring.models.observing import (
    check_native,
    check_ours,
    check_own,
    packing_difference,
    reference_of,
    rows_independent,
    sharing_difference,
    tokens_of,
    trial,
)
from shoestring.models.shrunken import Shrunken, shrink
from shoestring.storage import foreign, records
from shoestring.storage.guarded import private_folder
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

_SHORT = 16
"""Number of tokens in the test texts if the model itself is run rather than a small copy."""
_INDIFFERENT = ("_name_or_path", "dtype", "use_cache", "transformers_version", "architectures", "shoestring")
"""Entries of a model's configuration that do not affect its observed behaviour."""
CacheKind = Literal["ours", "its own", "none"]


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a model handles caches, batches and packed samples."""

    cache: CacheKind
    """The cache that generation uses. "ours": `KVCache`, one for many texts. "its own": the model's own cache object,
    one for each text. "none": no cache, so the whole text is read again for each token."""
    why: str = ""
    """Why `KVCache` is not used; empty if it is used."""
    argument: str = ""
    """Name of the argument of `forward` that takes a cache."""
    made: bool = False
    positions: str = ""
    pieces: bool = True
    crops: bool = True
    carried: list[list[str]]
    """The fields from `made` to `carried` mean the same as the fields of these names in `OwnCache`."""
    windows: list[int]
    """Text lengths, in tokens, at which attention or the position embeddings change, such as the size of a sliding
    window."""
    switches: list[int]
    """Those lengths in `windows` beyond which the cache becomes invalid and the whole text must be read again."""
    rows_independent: bool
    """Whether each text gives the same logits in a batch as it does alone."""
    packing_isolates: bool
    """Whether texts packed into one sample do not attend to each other, if positions restart at each text."""
    packing_why: str = ""
    """Why packed texts attend to each other; empty if they do not."""
    sharing_why: str = ""
    """Why texts in one sample cannot share their beginning; empty if they can."""
    native_layers: bool = False
    """Whether native code that runs all layers in one call gives the model's logits; see `decoder_layers`."""
    copied: bool = True
    """Whether a small copy of the model was run; False if the model itself was run, with short texts."""

    @property
    def own_cache(self) -> OwnCache:
        """How the model reads texts into its own cache, as observed."""
        carried = tuple((kind, name) for kind, name in self.carried)
        return OwnCache(
            self.argument, self.made, self.positions, self.pieces, self.crops, tuple(self.switches), carried
        )


def observe(model: nn.Module) -> Behaviour:
    """The behaviour of a transformers model, from the stored observation or by running a copy of the model."""
    file = _file(model)
    with suppress(OSError, ValueError, TypeError, LookupError):
        if file is not None:
            return records.record(Behaviour, foreign.read_json_object(file, within=file.parent))
    with _undisturbed(model):
        shrunken = shrink(model)
        if shrunken is None:
            name = type(model).__name__
            log.warning("no small copy of %s can be run, so the model itself is run, with short texts", name)
        behaviour = _observe(shrunken or Shrunken(model, _SHORT, {}), copied=shrunken is not None)
    if file is not None:
        with suppress(OSError, ShoestringError):
            write_atomic(file, json.dumps(asdict(behaviour)).encode())
    return behaviour


def packing_fault(model: nn.Module, vocabulary: int, length: int = 40) -> str:
    """The reason why texts that are packed into one sample attend to each other in a model; empty if they do not.

    A transformers model is tested by running a small copy of it, any other model by running the model itself.

    Args:
        vocabulary: number of tokens in the model's vocabulary.
        length: maximum number of tokens that the model may read.
    """
    return _fault(model, packing_difference, "packing_why", vocabulary, length)


def sharing_fault(model: nn.Module, vocabulary: int, length: int = 40) -> str:
    """The reason why a model cannot read several answers in one sample after a shared beginning; empty if it can.

    A mask keeps the answers from attending to each other, as in `PreferenceDataset`. Arguments: see `packing_fault`.
    """
    return _fault(model, sharing_difference, "sharing_why", vocabulary, length)


def _fault(
    model: nn.Module, difference: Callable[[nn.Module, int, int], str], name: str, vocabulary: int, length: int
) -> str:
    """Return why a model computes wrong results in some use, empty if it does not: the result of `difference` for the
    model, or for a small copy of a transformers model. If `use_cache` is off, as it is in observations, the field
    `name` of the model's observation is returned instead."""
    if not hf.is_pretrained(model):
        with _undisturbed(model):
            return difference(model, vocabulary, length)
    config: Any = model.config
    if not getattr(config, "use_cache", None):
        return getattr(observe(model), name)
    with _undisturbed(model):
        shrunken = shrink(model) or Shrunken(model, min(_SHORT, length), {})
        return difference(shrunken.model, int(tokens_of(shrunken.model, 64).max()) + 1, shrunken.length)


# -- stored observations -----------------------------------------------------------------------------------------------


def _file(model: nn.Module) -> Path | None:
    """The file in which a model's observation is stored; None if no private folder can be made for it."""
    config: Any = model.config
    content = {key: value for key, value in config.to_dict().items() if key not in _INDIFFERENT}
    releases = [version(package) for package in ("torch", "transformers")]
    attention = getattr(config, "_attn_implementation", "")
    compiler = native.compiler_of("decoder_layers")
    facts = [_code(), compiler, type(model).__module__, type(model).__qualname__, attention, releases, content]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises if there is none)
    with suppress(OSError, ShoestringError):
        if home.is_absolute():
            return private_folder(home / ".cache", "shoestring", "behaviour") / f"{digest}.json"
        return private_folder(Path(tempfile.gettempdir()), f"shoestring-behaviour-{os.geteuid()}") / f"{digest}.json"
    return None


@cache
def _code() -> str:
    """Digest of the code that makes observations, so that results of another version of the code are not used."""
    own = ("behaviour", "observing", "hf_cache", "shrunken", "cache", "decoder_parts", "decoder_layers")
    files = [*(Path(__file__).with_name(f"{name}.py") for name in own), native.source_of("decoder_layers")]
    return hashlib.sha256(b"".join(map(foreign.read_bytes, files))).hexdigest()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode and gradients are off; afterwards the modes and the state of the
    random number generators are restored."""
    training = [module for module in model.modules() if module.training]
    devices = [] if torch.get_default_device().type == "cpu" else None
    with torch.random.fork_rng(devices=[] if devices is None else devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


# -- observations ------------------------------------------------------------------------------------------------------


def _observe(shrunken: Shrunken, *, copied: bool) -> Behaviour:
    model, length = shrunken.model, shrunken.length
    tokens = tokens_of(model, length)
    outputs: list[Any] = []
    carried = carried_by(model, lambda: outputs.append(model(input_ids=tokens[None], use_cache=True)))
    texts = reference_of(model, tokens, carried)
    argument, windows = cache_argument(model, outputs[0]), sorted(set(shrunken.scaled.values()))
    config: Any = model.config
    caching, config.use_cache = getattr(config, "use_cache", None), False  # off, as in training
    try:
        fault = packing_difference(model, int(tokens.max()) + 1, length)
        sharing = sharing_difference(model, int(tokens.max()) + 1, length)
    finally:
        config.use_cache = caching
    facts: dict[str, Any] = {
        "argument": argument,
        "windows": windows,
        "rows_independent": rows_independent(model, texts, carried),
        "packing_isolates": not fault,
        "packing_why": fault,
        "sharing_why": sharing,
        "copied": copied,
    }
    if not argument:
        return Behaviour(cache="none", why="it takes no cache", carried=[], switches=[], **facts)
    why = trial(partial(check_ours, model, argument, texts))
    if not why and not carried:
        fast = copied and not trial(partial(check_native, model, texts))
        return Behaviour(cache="ours", carried=[], switches=[], native_layers=fast, **facts)
    older = ["cache_position"] if "cache_position" in inspect.signature(model.forward).parameters else []
    limits = [(), *((limit,) for limit in sorted(shrunken.scaled))]
    # The cheapest ways to use a cache are tried first.
    ways = list(product((False, True), ("", "position_ids", *older), (True, False), (True, False), limits))
    reason = ""
    for by_prefix in (False, True):
        if by_prefix:  # in some releases, `generate` continues a text wrongly where its positions are rescaled
            texts = reference_of(model, tokens, carried, by_prefix=True)
        for made, positions, pieces, crops, switches in ways:
            own = OwnCache(argument, made, positions, pieces, crops, switches, carried)
            if not (reason := trial(partial(check_own, model, own, texts))):
                return Behaviour(
                    cache="its own",
                    why=why,
                    made=own.made,
                    positions=own.positions,
                    pieces=own.pieces,
                    crops=own.crops,
                    carried=[list(names) for names in carried],
                    switches=[shrunken.scaled[length] for length in own.switches],
                    **facts,
                )
    return Behaviour(cache="none", why=reason, carried=[], switches=[], **facts)
