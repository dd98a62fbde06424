"""Metrics of ZeRO for a run's report: bytes of model state on a rank, bytes sent, exposed communication time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shoestring.core.attachments import Attachments
from shoestring.memory.zero.buckets import Bucket
from shoestring.memory.zero.collectives import Collectives
from shoestring.sharded import local_part


class StepMetrics:
    """Publishes the metrics of each step in Phase.CAPTURE, and the bytes of the model state in the first step."""

    def __init__(self, attachments: Attachments, buckets: Iterable[Bucket], collectives: Collectives) -> None:
        self.attachments, self.collectives = attachments, collectives
        self.parts = [part for bucket in buckets for part in bucket.parts]
        self.step, self.sent, self.exposed = attachments.progress.step, collectives.sent, collectives.exposed

    def publish(self) -> None:
        if self.step == self.attachments.progress.step:  # `Job.finish` runs Phase.CAPTURE again after the last step
            return
        facts, collectives = self.attachments.trace.facts, self.collectives
        self.step = self.attachments.progress.step
        sent, exposed = collectives.sent - self.sent, collectives.exposed - self.exposed
        self.sent, self.exposed = collectives.sent, collectives.exposed
        self.attachments.numbers |= {"wire_mb": sent / 1e6, "exposed_seconds": exposed}
        facts["zero_steps"] = facts.get("zero_steps", 0.0) + 1
        facts["zero_exposed"] = facts.get("zero_exposed", 0.0) + exposed
        facts["zero_bytes"] = facts.get("zero_bytes", 0.0) + sent
        if "zero_held" not in facts:
            # Bytes of parameters, gradients, master copies and optimizer state: divided among ranks, and without
            # division.
            held = without = 0.0
            trained, state = self.attachments.trained, self.attachments.optimizer.state
            for part in self.parts:
                parameter, tensor = part.parameter, trained[part.name]
                shard = local_part(tensor)
                own = [local_part(value) for value in state.get(tensor, {}).values() if isinstance(value, Tensor)]
                if shard.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():  # a master copy
                    own.append(shard)
                gradient = parameter.element_size() * shard.numel()
                divided = sum(value.nbytes for value in own) + gradient
                held += parameter.nbytes + divided
                without += parameter.nbytes + divided * parameter.numel() / max(shard.numel(), 1)
            facts["zero_held"], facts["zero_without"] = held, without
            facts["zero_parameters"] = sum(part.parameter.nbytes for part in self.parts)
