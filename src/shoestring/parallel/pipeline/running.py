"""Runs the micro-batches of a step through the stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from shoestring._torch import timeout_of
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.step import MicroBatches
from shoestring.core.trace import span
from shoestring.parallel.pipeline.messages import Inbox, Outbox, TensorForm
from shoestring.parallel.pipeline.names import MESSAGES_FACT, STAGE, WAITED_FACT, WHOLE_FACT
from shoestring.parallel.pipeline.orders import Pass, orders
from shoestring.parallel.pipeline.stage import Layout, Stage, first_part, own_parts
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.parallel.settings import Pipeline


def attach(attachments: Attachments, settings: Pipeline) -> None:
    """Let each rank hold and run only its parts of the model. A collective; does nothing if there is only one stage."""
    stages = attachments.world.ranks_over([STAGE])
    if stages == 1:
        return
    attachments.claim([STAGE])
    layout, facts = Layout(attachments.module), attachments.trace.facts
    facts |= {MESSAGES_FACT: 0.0, WAITED_FACT: 0.0}
    facts[WHOLE_FACT] = float(sum(tensor.numel() * tensor.element_size() for tensor in attachments.parameters))
    running = attachments.carry(settings, lambda: Running(attachments, layout, settings, stages))
    running.stage.attach()
    attachments.shard(over=(), run=running.run, elsewhere=running.stage.elsewhere)


def sum_tied(attachments: Attachments, settings: Pipeline) -> None:
    """Let the first and the last stage add up their gradients of tied weights, after these were averaged."""
    if attachments.world.ranks_over([STAGE]) > 1:
        running = attachments.carry(settings, lambda: cast(Running, None))  # `attach` has already built it
        if running.tied:
            attachments.at(Phase.CLIP, running.sum_tied)


class Running:
    """Runs a rank's stage, and exchanges messages with the neighbouring stages."""

    def __init__(self, attachments: Attachments, layout: Layout, settings: Pipeline, stages: int) -> None:
        world = attachments.world
        self.attachments, self.settings, self.stages = attachments, settings, stages
        self.index, self.device = world.index_over([STAGE]), world.device
        parts = settings.parts(layout, stages)
        self.first = first_part(layout, settings, attachments.features)
        self.stage = Stage(attachments, layout, parts, own_parts(parts, self.first, self.index, stages), self.first)
        self.tied = layout.tied if self.first == 0 else []
        # Each direction has a process group of its own, because an NCCL communicator runs one operation after another,
        # so that in a single group one direction would wait for the other.
        mine = world.group([STAGE])
        assert mine is not None
        gathered = world.gather(json.dumps(dist.get_process_group_ranks(mine)).encode())
        members = [json.loads(data) for data in gathered]  # own file: what the ranks of this job send
        replicas = [ranks for number, ranks in enumerate(members) if ranks not in members[:number]]
        limit = timeout_of(mine)
        forth, back = (dist.new_subgroups_by_enumeration(replicas, timeout=limit)[0] for _ in range(2))
        self.forth, self.back = cast(dist.ProcessGroup, forth), cast(dist.ProcessGroup, back)
        for group in (self.forth, self.back):
            attachments.exits.callback(dist.destroy_process_group, group)
        self._forms: dict[
            tuple[int, Hashable], TensorForm
        ] = {}  # (part that receives the activations, shapes of the batch) -> form of the activations

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, micro: MicroBatches) -> None:
        """Run the passes of this stage; see `Attachments.shard`."""
        settings, index, training = self.settings, self.index, micro.training
        # The shapes and data types of a batch's tensors determine the form of activations.
        leaves = [pytree.tree_leaves(batch) for batch in micro.batches]
        forms: list[Hashable] = [
            tuple((tuple(leaf.shape), leaf.dtype) for leaf in of_batch if isinstance(leaf, Tensor))
            for of_batch in leaves
        ]
        planned = settings.planned_passes(self.stages, self.first, len(forms)) if training else None
        every = planned or orders(
            self.stages, settings.chunks, len(forms), settings.schedule, settings.ahead, training, self.first
        )
        before, behind = (index - 1) % self.stages, (index + 1) % self.stages
        arriving = [
            (one.part + 1, one.micro) for one in every[before] if not one.backward and one.part < self.stage.last
        ]
        returning = [(one.part, one.micro) for one in every[behind] if one.backward and one.part > self.first]

        def known(key: tuple[int, int]) -> TensorForm | None:
            return self._forms.get((key[0], forms[key[1]]))

        def asked(key: tuple[int, int]) -> TensorForm:
            form = TensorForm.received(self.forth, before, self.device)
            return self._forms.setdefault((key[0], forms[key[1]]), form)

        early = settings.ahead + 1
        activations = Inbox(self.forth, before, arriving, known, asked, self.device, early)
        gradients = Inbox(self.back, behind, returning, known, asked, self.device, early)
        forth, back = Outbox(self.forth, behind), Outbox(self.back, before)
        held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        left = sum(one.backward for one in every[index])
        for one in every[index]:
            part, number = one.part, one.micro
            if not one.backward:
                received = activations.take((part, number)) if part > self.first else None
                output = self._forward(micro, one, received)
                if part < self.stage.last:
                    told = self._told((part + 1, forms[number]), output)
                    forth.send((part + 1, number), *told, output.detach().contiguous())
                if training:
                    held[part, number] = received, output
                continue
            received, output = held.pop((part, number))
            gradient = None
            if part < self.stage.last:
                gradient = gradients.take((part + 1, number))
                forth.settle((part + 1, number))
            left -= 1
            if received is not None:
                # Send from within the backward pass: DDP waits for its own messages at the end of the pass, and the
                # previous stage would have to wait too.
                received.register_post_accumulate_grad_hook(partial(_send, back, (part, number)))
            with micro.sync(left == 0), span("backward", "compute"):
                if output.requires_grad:  # false if nothing below is trained, such as with frozen embeddings
                    output.backward(gradient)
        for outbox in (forth, back):
            outbox.settle()
        facts = self.attachments.trace.facts
        if training:
            facts[MESSAGES_FACT] += forth.sent + back.sent
            facts[WAITED_FACT] += sum(box.waited for box in (activations, gradients, forth, back))

    def _forward(self, micro: MicroBatches, one: Pass, received: Tensor | None) -> Tensor:
        batch = micro.batches[one.micro]
        if received is not None and micro.training:
            received.requires_grad_()
        with micro.computing(), span("forward", "compute"):
            output = self.stage.forward(one.part, received, lambda: micro.forward(batch))
            return micro.loss(output, batch) if one.part == self.stage.last else output

    def _told(self, key: tuple[int, Hashable], output: Tensor) -> list[Tensor]:
        """The encoded form of activations if the next stage does not know it yet (first batch of these shapes)."""
        form = TensorForm.of(output)
        if (known := self._forms.setdefault(key, form)) is form:
            return [form.encoded(self.device)]
        if known != form:
            block = self.stage.blocks(key[0])[0]
            raise ConfigError(
                f"block {block} gets shape {form.shape}, but got {known.shape} from an equally shaped batch before",
                hint="a pipeline needs activations whose shapes follow from the shapes of the batch's tensors",
            )
        return []

    # -- tied weights ------------------------------------------------------------------------------------------------

    def sum_tied(self) -> None:
        """Add up the gradients of weights that the first and the last stage both train; both get identical results."""
        if self.index not in (0, self.stages - 1):
            return
        other = self.stages - 1 - self.index
        for name in self.tied:
            if (tensor := self.attachments.trained.get(name)) is None:
                continue
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            grad = local_part(tensor.grad)
            sent = grad.to(self.device).contiguous()
            theirs = torch.empty_like(sent)
            with span("pipeline", "wire", sent.nbytes):
                works = [
                    dist.isend(sent, group=self.back, group_dst=other),
                    dist.irecv(theirs, group=self.back, group_src=other),
                ]
                for work in works:
                    assert work is not None
                    work.wait()
            grad.add_(theirs.to(grad.device))


def _send(back: Outbox, key: tuple[int, int], received: Tensor) -> None:
    """Send the gradient of received activations back to the stage that sent them."""
    assert received.grad is not None
    back.send(key, received.grad)
