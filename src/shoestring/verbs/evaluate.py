"""`shoestring evaluate`: evaluates a trained model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.decode.harness.tasks import Tasks
from shoestring.storage.whole import write_atomic
from shoestring.verbs.generate import open_described
from shoestring.verbs.settings import TaskEvaluation


def evaluate(model: str | Path, settings: TaskEvaluation) -> dict[str, Any]:
    """Evaluate a model, on the GPU if there is one. The results have the form of `lm_eval.simple_evaluate`.

    Args:
        model: run folder, model folder, folder of an adapter, .gguf file, or hf:NAME.

    Raises:
        CheckpointError: the model does not exist.
        ConfigError: lm-evaluation-harness is not installed, a task does not exist, or a setting is out of range.
        DataError: a task cannot be loaded, or its code raises an error.
    """
    for name in ("limit", "context"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"--{name} is {getattr(settings, name)}", hint="give 0 for all, or a positive number")
    tasks = Tasks([name for names in settings.tasks for name in names.split(",")], "--tasks")
    from shoestring.decode.harness.model import HarnessModel

    built, tokenizer, description = open_described(model)
    opened = HarnessModel(
        built, tokenizer, description.ends, batch=settings.batch, context=settings.context or None, progress=True
    )
    with closing(opened):
        return tasks.results(
            opened,
            num_fewshot=settings.fewshot,
            limit=settings.limit or None,
            apply_chat_template=settings.chat,
            system_instruction=settings.system or None,
            gen_kwargs=settings.generation or None,
            log_samples=settings.samples,
        )


def tables(results: dict[str, Any]) -> Iterator[str]:
    """Format the results as the tables that lm-evaluation-harness prints."""
    from lm_eval.utils import make_table

    yield make_table(results).rstrip()
    if results.get("groups"):
        yield make_table(results, "groups").rstrip()


def save(results: dict[str, Any], path: Path) -> None:
    """Write the results as JSON."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomic(path, text.encode(errors="replace"))
