"""Fragments: which parameters are merged together, and the memory in which they travel."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from shoestring.comm import DiLoCo
from shoestring.comm.local.fragments import FlatPool, Fragment, assign_fragments, group_parameters
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.testing import jobs


def test_layers_are_shared_out_strided_or_in_sequence_and_completely() -> None:
    model = jobs.tiny()
    model.blocks.extend(jobs.ResidualBlock(0.0) for _ in range(4))
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    for layout, expected in (("strided", [{0, 2, 4}, {1, 3, 5}]), ("sequential", [{0, 1, 2}, {3, 4, 5}])):
        groups = assign_fragments(model, 2, layout)
        assert sorted(chain(*groups)) == sorted(trained)
        layers = [{int(name.split(".")[1]) for name in group if name.startswith("blocks.")} for group in groups]
        assert layers == expected
    assert len(group_parameters(model)) == 6 + 3


def test_merges_use_memory_again_but_never_that_of_another() -> None:
    model = jobs.tiny()
    small, large = ({name: dict(model.named_parameters())[name]} for name in ("scale", "embedding.weight"))
    with torch.no_grad():
        fragments = [Fragment(parameters, momentum=False) for parameters in (small, large)]
    pool, (little, much) = FlatPool(fragments), (fragment.anchor for fragment in fragments)
    assert len(little) < len(much)
    first, second = pool.take(little), pool.take(much)
    assert (first.shape, second.shape) == (little.shape, much.shape)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    pool.give_back([first])
    again = pool.take(much)  # what a smaller fragment leaves is large enough for the largest
    assert again.shape == much.shape and again.data_ptr() == first.data_ptr()
    pool.give_back([torch.empty(len(little)), again, second])  # the first one came with a checkpoint
    assert pool.take(much.double()).dtype == torch.float64
    assert {pool.take(much).data_ptr() for _ in range(2)} == {again.data_ptr(), second.data_ptr()}


def test_a_merge_under_way_is_resumed_with_its_own_fragments_only() -> None:
    def streamed(fragments: int) -> Job:
        feature = DiLoCo(every=4, fragments=fragments, delay=1)
        return compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), [feature])

    with streamed(4) as job:
        for number in range(2):
            job.step(jobs.batch(number))
        state = job.kept["outer"].state.state_dict()
    assert [merge["fragments"] for merge in state["flights"]] == [[1]]
    for fragments in (1, 2):
        with (
            streamed(fragments) as job,
            pytest.raises(ConfigError, match="saved while other fragments were being exchanged"),
        ):
            job.kept["outer"].state.load_state_dict(state)
