"""`shoestring plan --explain`: how the ranks of a host would divide the operators of a step, and in how many bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring._torch import tree_map_only, without_data
from shoestring.core.task import Batch, sum_and_count
from shoestring.core.world import World
from shoestring.graph import Split
from shoestring.graph.choosing import GIB
from shoestring.graph.explain import explain
from shoestring.graph.search import SplitSearch
from shoestring.memory.predicted import device_type
from shoestring.models.without_data import with_fake_tensors
from shoestring.planning.cluster import Cluster, read_cluster
from shoestring.precision import Graph
from shoestring.precision.fact_names import CHOSEN_TITLE
from shoestring.precision.graph_pass import Rules, describe_bits
from shoestring.report import reading
from shoestring.run import Run
from shoestring.training.data_loading import DataSets, open_data, sequence_of
from shoestring.training.user_code import UserCode, import_user_code


class _Step(nn.Module):
    """A model that returns the loss of a batch, as training computes it."""

    def __init__(self, model: nn.Module, code: UserCode) -> None:
        super().__init__()
        self.model, self.code = model, code

    def forward(self, batch: Batch) -> Tensor:
        total, count = sum_and_count(self.code.loss(self.code.forward(self.model, batch), batch))
        return total / count


def explain_operators(run: Run, cluster: Path) -> Iterator[str]:
    """Trace a step of a run's model on a micro-batch for all ranks of a host, and describe how they would divide it.

    The features of the run are left out, except for the mesh and the memory of [graph.split]. Nothing is computed and
    no ranks are started; data is opened as for the run.

    Args:
        cluster: path of the file that `shoestring probe` wrote on that host.

    Raises:
        ConfigError: the cluster file is unusable or has several hosts, or the model cannot be traced.
    """
    measured = read_cluster(cluster)
    sequence = sequence_of(run.data, run.settings.model, run.model)
    run = replace(run, data=replace(run.data, sequence=sequence))
    code = import_user_code(run, skip=("run.evaluate", "run.sinks"))
    folder = Path(run.settings.folder or Path("runs") / run.name)
    data = open_data(run, World(), folder, code)
    try:
        settings = next((feature for feature in run.features if isinstance(feature, Graph)), Graph())
        chosen = dict[str, int]()  # group -> bits chosen from measured errors in an earlier start of the run
        if settings.measure and (folder / "summary.json").exists():
            items = reading.tables(reading.read(folder).summary, "report_items")
            rows = next((item["rows"] for item in items if item.get("title") == CHOSEN_TITLE), [])
            with suppress(TypeError, ValueError):
                chosen = {str(name): int(bits) for name, bits in rows}
        rules = Rules(forward=settings.forward_propagation, wide=settings.wide, eight=settings.fp8, chosen=chosen)
        yield from _explained(run, code, data, measured, rules)
    finally:
        data.close()


def _explained(run: Run, code: UserCode, data: DataSets, cluster: Cluster, rules: Rules) -> Iterator[str]:
    settings = run.settings
    samples = max(settings.batch // settings.accumulate, 1)
    batch = data.first_batch(samples)
    with torch.device("meta"):
        model = code.model.build(data.model_arguments)
    device = device_type()

    def fake(tensor: Tensor) -> Any:
        return torch.empty_like(tensor, device=device)

    with without_data():
        step, inputs = _Step(with_fake_tensors(model, device), code), tree_map_only(Tensor, fake, batch)
    room = min(one.memory for one in cluster.devices)
    split = next((feature for feature in run.features if isinstance(feature, Split)), Split())
    memory = split.gib * GIB or room or float("inf")
    explained = explain(step.train(), inputs, cluster=cluster, settings=SplitSearch(memory=memory), mesh=split.mesh)
    explained = replace(explained, prefix="model.")
    ranks = " × ".join(str(axis.ranks) for axis in explained.costs)
    yield f"{samples} samples on {ranks} ranks of a host, without the features of the run"
    yield from explained.lines()
    yield ""
    yield from describe_bits(explained.step.graph, rules)
