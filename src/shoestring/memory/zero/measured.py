"""What a run's report says of ZeRO: bytes of model state that a rank holds, bytes sent, and exposed communication."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.core.job import Job
from shoestring.memory.zero.buckets import Bucket
from shoestring.memory.zero.collectives import Collectives


class StepMetrics:
    """Publishes the metrics of a step, and once the bytes of the model state; work for Phase.CAPTURE."""

    def __init__(self, job: Job, buckets: Iterable[Bucket], collectives: Collectives) -> None:
        self.job, self.collectives = job, collectives
        self.parts = [part for bucket in buckets for part in bucket.parts]
        self.step, self.sent, self.exposed = job.progress.step, collectives.sent, collectives.exposed

    def publish(self) -> None:
        if self.step == self.job.progress.step:  # counted already: `Job.finish` ends at the step that was just done
            return
        facts, collectives = self.job.trace.facts, self.collectives
        self.step = self.job.progress.step
        sent, exposed = collectives.sent - self.sent, collectives.exposed - self.exposed
        self.sent, self.exposed = collectives.sent, collectives.exposed
        self.job.numbers |= {"wire_mb": sent / 1e6, "exposed_seconds": exposed}
        facts["zero_steps"] = facts.get("zero_steps", 0.0) + 1
        facts["zero_exposed"] = facts.get("zero_exposed", 0.0) + exposed
        facts["zero_bytes"] = facts.get("zero_bytes", 0.0) + sent
        if "zero_held" not in facts:
            facts["zero_held"], facts["zero_without"] = self._model_state()
            facts["zero_parameters"] = sum(part.parameter.nbytes for part in self.parts)

    def _model_state(self) -> tuple[float, float]:
        """Bytes of parameters, gradients, master copies and optimizer state: of this rank, and undivided."""
        held = without = 0.0
        trained, state = self.job.trained, self.job.built_optimizer.state
        for part in self.parts:
            parameter, tensor = part.parameter, trained[part.name]
            shard = _local(tensor)
            kept = [_local(value) for value in state.get(tensor, {}).values() if isinstance(value, Tensor)]
            kept += [shard] if shard.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr() else []
            divided = sum(each.nbytes for each in kept) + parameter.element_size() * shard.numel()
            held += parameter.nbytes + divided
            without += parameter.nbytes + divided * parameter.numel() / max(shard.numel(), 1)
        return held, without


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
