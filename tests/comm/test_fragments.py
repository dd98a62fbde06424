"""Fragments: which parameters are merged together."""

from __future__ import annotations

from itertools import chain

from shoestring.comm.local.fragments import assign_fragments, group_parameters
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
