"""Drafters, which propose tokens for a model to verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoestring.core.errors import ConfigError
from shoestring.decode.settings.generation import LOOKUP, SKIP, Passes, Speculation

if TYPE_CHECKING:
    from torch import nn

    from shoestring.data.tokenizer import Tokenizer
    from shoestring.decode.drafters.base import Drafter


def open_drafter(
    speculation: Speculation,
    model: nn.Module,
    tokenizer: Tokenizer | None,
    *,
    slots: int = 1,
    room: int | None = None,
    passes: Passes = "auto",
) -> Drafter | None:
    """Create the drafter that the settings name, on the device of `model`; None if the settings name no drafter.

    Args:
        model: the model that verifies the drafts.
        tokenizer: tokenizer of `model`, to compare with the drafter's; None to compare only vocabulary sizes.
        slots: number of texts that are generated at the same time.
        room: number of tokens per text that the drafter's cache can hold, if smaller than the drafter's context.
        passes: how to run the forward passes if the drafter is a smaller model; see `Decoding.passes`.

    Raises:
        ConfigError: the drafter is a model with another vocabulary.
        CheckpointError: the model that the settings name as the drafter does not exist.
    """
    from shoestring.decode.drafters.lookup import PromptLookup

    if not speculation.draft:
        return None
    if speculation.draft == LOOKUP:
        return PromptLookup()
    if speculation.draft == SKIP:
        from shoestring.decode.drafters.skipping import SkippingDrafter

        return SkippingDrafter(speculation)
    from shoestring.decode.compiled import choose_passes
    from shoestring.decode.drafters.model import ModelDrafter
    from shoestring.models.loading import load_model

    smaller, own = load_model(speculation.draft)
    ours, theirs = _vocabulary(model), _vocabulary(smaller)
    hint = "give a drafter that was trained with the model's tokenizer"
    if ours != theirs:
        raise ConfigError(
            f"the drafter `{speculation.draft}` has a vocabulary of {theirs} tokens, but the model has {ours}",
            hint=hint,
        )
    if tokenizer is not None and own is not None and tokenizer.engine.get_vocab() != own.engine.get_vocab():
        raise ConfigError(f"the tokenizer of the drafter `{speculation.draft}` differs from the model's", hint=hint)
    alike = next((weight for weight in model.parameters() if weight.is_floating_point()), None)
    if alike is not None:
        smaller = smaller.to(alike.device, alike.dtype if speculation.draft_dtype == "model" else None)
    return ModelDrafter(choose_passes(smaller, None, passes), slots, speculation, room)


def _vocabulary(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)
