"""Completes an exported model: copies the source model's other files, and adds the end-of-text tokens learnt in
training.

Training switches off some entries of a model's configuration, such as `use_cache`; the export has their original
values.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.models.generation_config import GENERATION, ends_of, with_ends
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of config.json that cannot be derived from the weights, but that other programs need."""


@dataclass(frozen=True)
class Beside:
    """What an exported folder contains besides the weights."""

    source: Path | None = None
    """Folder of the model that the export was made from; its other files are copied."""
    learnt: Sequence[int] = ()
    """Ids of the end-of-text tokens that the model has learnt in training."""


NOTHING = Beside()


def complete(new: Path, source: Path | None, *, learnt: Sequence[int] = (), end_of_text: int | None = None) -> None:
    """Complete the model or the adapters in the folder `new`.

    Args:
        source: folder of the model that the export was made from; None if there is none.
        learnt: further ids of tokens that end a text; the files in the folder `source` may list others.
        end_of_text: the tokenizer's end-of-text token, which is used if the files in `source` list no tokens that end a
            text.
    """
    original: dict[str, Any] = {}
    if source is not None:
        original = _read(source / _CONFIG)
        if (source / GENERATION).exists():
            (new / GENERATION).unlink(missing_ok=True)  # transformers wrote values that training has changed
        copy_beside_weights(source, new)
    written = _read(new / GENERATION)
    generation, config = dict(written), _read(new / _CONFIG)
    if source is None or not (source / GENERATION).exists():
        generation.pop("use_cache", None)  # from config.json, where training switches it off
    tokens = {name: original[name] for name in _TOKENS if original.get(name) is not None and config.get(name) is None}
    completed = config | tokens if config else original
    if end_of_text is not None and not ends_of(generation, completed):
        learnt = [end_of_text, *learnt]
    if learnt:
        generation, completed = with_ends(generation, completed, learnt)
    if generation != written:
        _write(new / GENERATION, generation)
    if config and completed != config:
        _write(new / _CONFIG, completed)


def copy_beside_weights(source: Path, new: Path) -> None:
    """Copy the tokenizer, the licence and similar files of the model that `new` is made from, as regular files.

    In the cache of Hugging Face these files are symbolic links. Links that lead out of the cache are not followed:
    their targets may be private, and `new` may be published. Weights in other formats belong to the original model and
    are not copied, nor is the configuration of an adapter, because readers would take `new` for an adapter.
    """
    left_out = {_ADAPTER_CONFIG} | ({_CONFIG} if (new / _ADAPTER_CONFIG).exists() else set())
    for path in sorted(source.iterdir()):
        if path.is_dir() or path.name.endswith(_WEIGHTS) or path.name in left_out or (new / path.name).exists():
            continue
        try:
            foreign.copy_file(path, new / path.name, within=source)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            log.warning("not copied: `%s`: %s", path, error.strerror)


def _read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if the file is missing or damaged. A damaged file is only logged, so that the
    export does not fail."""
    if not path.exists():
        return {}
    try:
        return foreign.read_json_object(path, within=path.parent)
    except (OSError, ValueError) as error:
        log.warning("not used: `%s`: %s", path, error)
        return {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())
