"""Settings of generation, of the server and of distillation; importing this package does not import torch."""

from __future__ import annotations

from shoestring.decode.settings.generation import (
    BIAS,
    FLEXIBLE_SPACE,
    LOOKUP,
    PENALTY,
    SKIP,
    AnswerFormat,
    Conversing,
    Decoding,
    Generation,
    LogitChanges,
    Passes,
    Sampling,
    SamplingDefaults,
    SamplingOptions,
    SamplingRule,
    SeededOptions,
    Speculation,
    TemplateOptions,
    Verification,
)

__all__ = [
    "BIAS",
    "FLEXIBLE_SPACE",
    "LOOKUP",
    "PENALTY",
    "SKIP",
    "AnswerFormat",
    "Conversing",
    "Decoding",
    "Generation",
    "LogitChanges",
    "Passes",
    "Sampling",
    "SamplingDefaults",
    "SamplingOptions",
    "SamplingRule",
    "SeededOptions",
    "Speculation",
    "TemplateOptions",
    "Verification",
]
