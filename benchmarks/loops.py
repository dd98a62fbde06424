"""The same training in the loops of other tools, a few steps at a time, so that they can take turns with ours.

Lightning and transformers' Trainer own the loop and only end when training does. They run in a thread whose data wait
at the end of each turn until the next one is asked for, and ours beside them does, too: the C library's allocator
serves a thread from a heap of its own, which is worth some percent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

Batch = tuple[Tensor, Tensor]
Turn = Callable[[], object]


class Turns(IterableDataset[Any]):
    """Batches for a loop in another thread, which waits between turns.

    Args:
        data: batches, which are taken over and over.
        at_once: steps of a turn.
        steps: steps of the whole training.
    """

    def __init__(self, data: Sequence[Any], at_once: int, steps: int) -> None:
        super().__init__()
        self.data, self.at_once, self.steps = data, at_once, steps
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.steps):
            if step % self.at_once == 0:
                self._waits.release()
                self._may_go.acquire()
            yield self.data[step % len(self.data)]
        while True:  # an end would end the training, and with it the turns
            self._waits.release()
            self._may_go.acquire()
            yield self.data[0]

    def start(self, fit: Callable[[], object]) -> Turn:
        """Run `fit`, which trains on these batches, in a thread; return what trains one turn."""
        threading.Thread(target=fit, daemon=True).start()
        self._waits.acquire()

        def turn() -> None:
            self._may_go.release()
            self._waits.acquire()

        return turn


def accelerate(model: nn.Module, data: Sequence[Batch], at_once: int, recipe: Mapping[str, Any]) -> Turn:
    """accelerate's loop, as its guide writes it.

    Args:
        recipe: `optimizer`, which makes one from a model; `scale`, the factor of the rate by step; `clip`, the largest
            norm; `steps`.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = recipe["optimizer"](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe["scale"])
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    batches = _endless(data)

    def turn() -> list[float]:
        losses = []
        for inputs, targets in (next(batches) for _ in range(at_once)):
            with accelerator.accumulate(model):
                loss = _loss(model, inputs, targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), recipe["clip"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return turn


def lightning(model: nn.Module, data: Sequence[Batch], at_once: int, recipe: Mapping[str, Any]) -> Turn:
    """Lightning's Trainer without logger, checkpoints and progress bar; arguments as of `accelerate`."""
    import lightning as L  # pyrefly: ignore[missing-import]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return _loss(self.model, *batch)

        def configure_optimizers(self) -> Any:
            optimizer = recipe["optimizer"](self.model)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe["scale"])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logging.getLogger("lightning").setLevel(logging.ERROR)
    turns = Turns(data, at_once, recipe["steps"])
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=-1, max_epochs=1, gradient_clip_val=recipe["clip"], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(turns, batch_size=None)
    return turns.start(partial(trainer.fit, Module(), loader))


def trainer(model: nn.Module, data: Sequence[Batch], at_once: int, recipe: Mapping[str, Any]) -> Turn:
    """transformers' Trainer without logs and checkpoints; arguments as of `accelerate`."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": _loss(self.model, inputs, targets)}

    class Whole(Trainer):
        def get_train_dataloader(self) -> Any:
            """Batches as they are: all loops get them ready-made."""
            return self.train_dataset

    named = [{"inputs": inputs, "targets": targets} for inputs, targets in data]
    turns = Turns(named, at_once, recipe["steps"])
    whole = WithLoss()
    optimizer = recipe["optimizer"](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe["scale"])
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1_000_000, max_grad_norm=recipe["clip"], use_cpu=True, report_to=[],
        logging_strategy="no", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    loop = Whole(whole, settings, train_dataset=turns, optimizers=(optimizer, schedule))
    return turns.start(loop.train)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _endless(data: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from data
