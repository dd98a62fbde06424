"""One training by one of the two libraries, in a process of its own: `python -m benchmarks.preference.contestant FILE`.

FILE is JSON with the fields of `Task`. What came of it is printed as JSON, on the last line of standard output: among
others `seconds` from the start of the process until the adapter is written, `began` after imports, and `ended`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import ROOT
from benchmarks.preference import peer
from benchmarks.timing import run_command

ALPHA, CLIP = 2.0, 1.0
"""Scale of adapters over their rank; bound of the gradient's norm."""


@dataclass(frozen=True)
class Task:
    """A training by adapters in float32: DPO with the reference computed once, or of chats on their answers."""

    library: Literal["shoestring", "trl"]
    base: str
    """Folder of the model."""
    data: str
    """File of the pairs or chats to train on, one more for ours: the one that it holds out."""
    folder: str
    """Folder to write to."""
    batch: int
    """Pairs of a step, on average where pairs are packed."""
    micro: int
    """Pairs of a micro-batch, on average where pairs are packed."""
    sequence: int
    """Tokens of a sample of ours; TRL pads to the longest answer of a micro-batch."""
    packed: bool
    """Whether a sample of ours holds several pairs."""
    epochs: int = 1
    rank: int = 16
    rate: float = 1e-3
    beta: float = 0.1
    """DPO's β."""
    seed: int = 0
    threads: int = 2
    held_out: float = 1e-9
    """Share of the prompts that ours holds out: one of them at least."""
    evaluate_every: int = 0
    recompute: bool = True
    """Whether blocks run forward again in the backward pass, as is TRL's default."""
    objective: Literal["dpo", "chat"] = "dpo"


def run(task: Task) -> dict[str, Any]:
    """Train in a process of its own; what it prints."""
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    file = Path(task.folder) / "task.json"
    file.write_text(json.dumps(asdict(task)))
    env = os.environ | {"OMP_NUM_THREADS": str(task.threads), "PYTHONPATH": path()}
    out = run_command([sys.executable, "-m", "benchmarks.preference.contestant", str(file)], cwd=ROOT, env=env)
    return json.loads(out.splitlines()[-1])


def path() -> str:
    """PYTHONPATH of the processes that are started."""
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def samples(task: Task) -> tuple[int, int]:
    """Samples of a step of ours, and micro-batches in it."""
    if not task.packed:
        return task.batch, task.batch // task.micro
    return task.batch // task.micro, task.batch // task.micro  # a sample holds about a micro-batch of TRL's


def document(task: Task) -> dict[str, Any]:
    """The run file of ours."""
    batch, accumulate = samples(task)
    chat = task.objective == "chat"
    return {
        "run": {
            "model": f"hf:{task.base}", "data": task.data, "epochs": task.epochs, "batch": batch,
            "accumulate": accumulate, "seed": task.seed, "folder": task.folder,
            "evaluate_every": task.evaluate_every,
        },
        "data": {
            "form": "chat" if chat else "preference", "tokenizer": "model", "sequence": task.sequence,
            "held_out": task.held_out,
        },
        **({} if chat else {"preference": {"dpo": {"beta": task.beta}}}),
        "memory": {
            "lora": {"rank": task.rank, "alpha": ALPHA * task.rank},
            **({"recompute": {}} if task.recompute else {}),
        },
        "optim": {
            "adamw": {"lr": task.rate, "betas": [0.9, 0.99], "weight_decay": 0.0},
            "clip": {"max_norm": CLIP},
            "schedule": {"shape": "cosine", "warmup": 0, "final": 0.0},
        },
    }  # fmt: skip


def _ours(task: Task) -> dict[str, Any]:
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.loop import train

    logging.getLogger("shoestring").setLevel(logging.WARNING)
    imported, began = _peak(), _since_start()
    result = train(parse(document(task), name="preference"), World())
    assert result.status == "finished", result.status
    adapter = Path(task.folder) / "model" / "adapter"
    written = _since_start() - (time.time() - max(file.stat().st_mtime for file in adapter.iterdir()))
    metrics = [json.loads(line) for line in (Path(task.folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": written, "began": began, "imported": imported, "adapter": str(adapter),
        "steps": max(row["step"] for row in metrics), "evaluations": [row for row in metrics if "held_out_loss" in row],
    }  # fmt: skip


def _trl(task: Task) -> dict[str, Any]:
    peer.offline()
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    import torch

    kind = "SFT" if task.objective == "chat" else "DPO"
    getattr(importlib.import_module("trl"), f"{kind}Trainer")  # imports what it needs
    torch.set_num_threads(task.threads)
    imported, began = _peak(), _since_start()
    model = transformers.AutoModelForCausalLM.from_pretrained(task.base, dtype=torch.float32)
    config = json.loads((Path(task.base) / "tokenizer_config.json").read_text())
    tokenizer = peer.fast_tokenizer(str(Path(task.base) / "tokenizer.json"), config["chat_template"])
    lora = peft.LoraConfig(
        r=task.rank, lora_alpha=ALPHA * task.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    own: dict[str, Any] = {"beta": task.beta, "precompute_ref_log_probs": True}
    records = answered(task) if kind == "SFT" else without_held_out(task)
    trainer = peer.trainer(
        kind, model, tokenizer, records, task.folder, adapters=lora, max_length=None, **({} if kind == "SFT" else own),
        gradient_checkpointing=task.recompute, num_train_epochs=task.epochs, seed=task.seed,
        per_device_train_batch_size=task.micro, gradient_accumulation_steps=task.batch // task.micro,
        learning_rate=task.rate, lr_scheduler_type="cosine", warmup_steps=0, max_grad_norm=CLIP, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.99, logging_steps=10,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(task.folder)
    answer = {"seconds": _since_start(), "began": began, "imported": imported, "adapter": task.folder}
    return answer | {"steps": trainer.state.global_step}


def without_held_out(task: Task) -> Sequence[Mapping[str, Any]]:
    """The pairs that ours trains on: all but those whose prompts have the lowest hashes."""
    from shoestring.data.chat_formats import PreferencePair, parse_record
    from shoestring.data.preferences import key_of_prompt

    records = [json.loads(line) for line in Path(task.data).read_text().splitlines()]

    def key(record: Mapping[str, Any]) -> int:
        parsed = parse_record(record, "", "benchmark")
        assert isinstance(parsed, PreferencePair)
        return key_of_prompt(parsed)

    ordered = sorted(records, key=key)
    return ordered[max(1, round(task.held_out * len(records))) :]


def answered(task: Task) -> Sequence[Mapping[str, Any]]:
    """Chats as TRL wants them, so that only answers are learnt, as with ours: all but one, as ours."""
    chats = [json.loads(line)["messages"] for line in Path(task.data).read_text().splitlines()]
    return [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in chats[1:]]


def _since_start() -> float:
    """Seconds since this process was started."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _peak() -> int:
    """Bytes of memory that this process had resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def killed_run(file: str, step: int) -> None:
    """Run `shoestring train` on a run file, and kill it with SIGKILL as soon as it has logged a step."""
    import tomllib

    metrics = Path(tomllib.loads(Path(file).read_text())["run"]["folder"]) / "metrics.jsonl"
    with subprocess.Popen(command(file), env=os.environ | {"PYTHONPATH": path()}, cwd=ROOT) as process:
        while process.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if sum(line.endswith("}") for line in lines) >= step:
                process.kill()
            time.sleep(0.01)


def command(file: str) -> list[str]:
    """The command that trains a run file."""
    return [sys.executable, "-m", "shoestring", "train", file]


if __name__ == "__main__":
    given = Task(**json.loads(Path(sys.argv[1]).read_text()))
    answer = (_ours if given.library == "shoestring" else _trl)(given)
    print(json.dumps({**answer, "peak": _peak(), "ended": _since_start()}))
