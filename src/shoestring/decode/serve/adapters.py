"""Manages the adapters that a server offers beside its model: loading from folders, choice by name, and removal.

A text keeps the adapter that it began with: removing or replacing an adapter affects only later requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.data.chat_template import template_source
from shoestring.data.tokenizer import load_tokenizer
from shoestring.decode.adapted import AdaptedRows
from shoestring.decode.adapter import Adapter
from shoestring.decode.serve.errors import RequestError, invalid
from shoestring.decode.serve.fields import RequestFields
from shoestring.decode.serve.served import Served
from shoestring.decode.settings.serving import Serving, is_adapter_name
from shoestring.figures import size
from shoestring.models import adapter_folder, hf
from shoestring.models.adapters_by_row import LoadedAdapter
from shoestring.models.loading import opening
from shoestring.processors import in_own_thread

log = logging.getLogger("shoestring.serve")

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter, and the name by which clients choose it in the field `model`."""

    name: str
    adapter: LoadedAdapter
    created: int = field(default_factory=lambda: int(time.time()))
    """Time at which the adapter was loaded, in seconds since 1970."""


class AdapterCatalog:
    """The adapters of a server, by name.

    Args:
        model: the engine's model; only an `AdaptedRows` supports adapters.
        base: source of the model, for a warning if an adapter was trained on another model.
    """

    def __init__(self, model: Adapter, served: Served, settings: Serving, base: str = "") -> None:
        self.model, self.served, self.settings, self.base = model, served, settings, base
        self.loaded: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()

    def find(self, name: str | None) -> LoadedAdapter | None:
        """Find an adapter by name; returns None if the name is missing or names the model, which is then used alone.

        Raises:
            RequestError: there is no model or adapter of this name.
        """
        if name is None or name == self.served.name:
            return None
        if name not in self.loaded:
            names = ", ".join(f"`{known}`" for known in [self.served.name, *sorted(self.loaded)[:20]])
            raise RequestError(
                404,
                f"there is no model `{name[:100]}`; this server has {names}",
                param="model",
                code="model_not_found",
            )
        return self.loaded[name].adapter

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder, and offer it under a name. Call this only before the server starts.

        Raises:
            CheckpointError: the folder holds no adapter, or an adapter that does not fit the model.
        """
        self.loaded[name] = self._open(name, folder)

    def cards(self) -> list[dict[str, Any]]:
        """The adapters in the format of OpenAI's list of models; `parent` is the served model."""
        return [
            {
                "id": served.name,
                "object": "model",
                "created": served.created,
                "owned_by": "shoestring",
                "parent": self.served.name,
            }
            for served in self.loaded.values()
        ]

    # -- while the server runs -----------------------------------------------------------------------------------------

    async def load(self, content: Any) -> str:
        """Carry out an administrator's request to load an adapter; returns a confirmation.

        Raises:
            RequestError: a field is wrong, the folder is not permitted, or its adapter does not fit the model.
        """
        fields = RequestFields(content)
        name, path = fields.text("lora_name"), fields.text("lora_path")
        replaces = fields.flag("load_inplace")
        fields.ignore("lora_int_id")
        fields.finish()
        if name is None or not is_adapter_name(name) or name == self.served.name:
            raise fields.wrong("lora_name", "is not the name of an adapter: up to 128 letters, digits and ._:/@+-")
        if path is None or "\0" in path:
            raise fields.wrong("lora_path", "is not the path of a folder")
        async with self._changing:
            if name in self.loaded and not replaces:
                raise fields.wrong("lora_name", f"is taken: `{name}` is loaded; send `load_inplace` to replace it")
            if name not in self.loaded and len(self.loaded) >= self.settings.max_adapters:
                raise invalid(f"{len(self.loaded)} adapters are loaded, which is the limit; remove one first")
            folder = self._permitted(path)
            try:
                served = await asyncio.to_thread(in_own_thread, partial(self._open, name, folder))
            except ShoestringError as error:
                raise invalid(str(error), "lora_path", "adapter_refused") from error
            self._forget(name)
            self.loaded[name] = served
        log.info("loaded the adapter %s, %s", name, size(served.adapter.nbytes))
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, content: Any) -> str:
        """Carry out an administrator's request to remove an adapter; returns a confirmation.

        Raises:
            RequestError: a field is wrong, or there is no such adapter.
        """
        fields = RequestFields(content)
        name = fields.text("lora_name")
        fields.ignore("lora_int_id")
        fields.finish()
        async with self._changing:
            if name is None or name not in self.loaded:
                raise RequestError(404, "there is no such adapter", param="lora_name", code="model_not_found")
            self._forget(name)
        log.info("removed the adapter %s", name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _forget(self, name: str) -> None:
        if self.loaded.pop(name, None) is not None and isinstance(self.model, AdaptedRows):
            self.model.forget()

    def _permitted(self, text: str) -> Path:
        """Resolve the path of an adapter's folder from a request; a relative path starts at the permitted folder.

        Raises:
            RequestError: no adapters may be loaded, or the folder or a file in it is outside of the permitted folder.
        """
        if self.settings.adapters_folder is None:
            raise RequestError(
                403,
                "this server has no folder to load adapters from; start it with --adapters-folder",
                param="lora_path",
            )
        home = self.settings.adapters_folder.resolve()
        path = Path(os.path.realpath(home / text))
        if not path.is_relative_to(home):
            raise RequestError(403, "`lora_path` lies outside of the folder of adapters", param="lora_path")
        folder = adapter_folder.find(path)
        if folder is None:
            raise invalid(f"`{text[:200]}` holds no adapter", "lora_path", "adapter_refused")
        for file in (adapter_folder.CONFIG, adapter_folder.WEIGHTS, _TOKENIZER):
            if not Path(os.path.realpath(folder / file)).is_relative_to(home):
                raise RequestError(
                    403, f"`{file}` is a link that leads out of the folder of adapters", param="lora_path"
                )
        return folder

    # -- in any thread -------------------------------------------------------------------------------------------------

    def _open(self, name: str, folder: Path) -> ServedAdapter:
        if not isinstance(self.model, AdaptedRows):
            raise CheckpointError("the server was started without adapters", hint="give --adapter or --adapters-folder")
        inner = adapter_folder.find(folder)
        if inner is None:
            raise CheckpointError(f"`{folder}` holds no adapter", hint="name a folder with an adapter_config.json")
        path, own = inner / _TOKENIZER, self.served.tokenizer
        if path.exists():
            tokenizer = load_tokenizer(path)
            if tokenizer.vocab_size != own.vocab_size:
                raise CheckpointError(
                    f"the adapter in `{inner}` is for a vocabulary of {tokenizer.vocab_size} tokens, "
                    f"and the model has {own.vocab_size}",
                    hint="the adapter belongs to another model",
                )
            if (template := template_source(tokenizer)) is not None and template != template_source(own):
                log.warning("the chat template in `%s` is not used: chats are rendered with the model's", inner)
        base, served = adapter_folder.base_of(inner), self.base.removeprefix(hf.PREFIX)
        same_folder = Path(base).is_dir() and Path(served).is_dir() and Path(base).samefile(served)
        if base and not (same_folder or Path(base).name == Path(served).name):
            log.warning("the adapter %s was trained on `%s`; this server has `%s`", name, base, self.base)
        with opening(inner, "the adapter in"):
            return ServedAdapter(name, self.model.load(inner))
