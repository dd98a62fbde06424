"""TRL: whether it is there, and its trainers on a CPU, without trackers, files and a network."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.harness import NotRun

PEERS = ("trl", "peft", "transformers", "accelerate", "datasets")


def missing() -> NotRun | None:
    """Why TRL cannot be measured here, and how it is installed; None if it can."""
    if absent := [name for name in PEERS if find_spec(name) is None]:
        how = "pip install --no-deps --target FOLDER 'trl==1.16.*', and FOLDER in PYTHONPATH"
        return NotRun(f"{', '.join(absent)} not installed: {how}")
    return None


def offline() -> None:
    """Keep Hugging Face's libraries from a network, and their caches in a folder that no other run reads."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp(), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def trainer(
    kind: str,
    model: Any,
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]],
    folder: str,
    *,
    reference: Any = None,
    adapters: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of TRL, such as "DPO"; those that are experimental are found too."""
    datasets = importlib.import_module("datasets")
    module = importlib.import_module("trl" if kind in ("DPO", "KTO", "SFT") else f"trl.experimental.{kind.lower()}")
    plain = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    plain |= {"dataloader_pin_memory": False, "disable_tqdm": True, "gradient_checkpointing": False}
    more = {} if reference is None else {"ref_model": reference}
    return getattr(module, f"{kind}Trainer")(
        model=model,
        args=getattr(module, f"{kind}Config")(**plain | settings),
        train_dataset=datasets.Dataset.from_list([dict(record) for record in records]),
        processing_class=tokenizer,
        peft_config=adapters,
        **more,
    )


def fast_tokenizer(file: str, template: str) -> Any:
    """transformers' tokenizer of a tokenizer.json whose texts end as ChatML's do."""
    kind = importlib.import_module("transformers").PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_file=file, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer
