"""Which operators are narrowed: the passes against their definitions, on drawn graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.precision.lists import LISTS, list_of
from shoestring.precision.narrowing import Flow, narrowed

KINDS = ("allow", "infer", "deny", "clear", None)


@st.composite
def flows(draw):
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=12))
    sources = {
        node: draw(st.lists(st.integers(0, node - 1), max_size=3, unique=True)) if node else []
        for node in range(len(kinds))
    }
    users = {node: [user for user in sources if node in sources[user]] for node in sources}
    return Flow(range(len(kinds)), sources, users), dict(enumerate(kinds))


def paths(flow, kinds, through):
    """All pairs of nodes with a path between them whose inner nodes are of some kinds, by brute force."""
    reach = {(source, node) for node in flow.nodes for source in flow.sources[node]}
    while True:
        more = {(a, d) for a, b in reach for c, d in reach if b == c and kinds[b] in through} - reach
        if not more:
            return reach
        reach |= more


@pytest.mark.slow
@given(drawn=flows(), forward=st.booleans())
@settings(max_examples=300)
def test_what_is_narrowed_and_why(drawn, forward):
    flow, kinds = drawn
    bits = narrowed(flow, kinds, forward=forward)
    assert {*bits.narrow} | {*bits.wide} == {*flow.nodes}
    assert not {*bits.narrow} & {*bits.wide}
    for node in flow.nodes:
        if kinds[node] == "allow":
            assert bits.narrow[node] == "a product"
        if kinds[node] in ("deny", None):
            assert node in bits.wide
    inner = ("infer", "clear")
    for deny, node in paths(flow, kinds, inner):
        if kinds[deny] == "deny" and kinds[node] == "infer":
            assert node in bits.wide, "a number that needs 32 bits is rounded"
    for node in bits.narrow:  # nothing is narrowed far from products
        if kinds[node] != "allow":
            ends = {a for a, b in paths(flow, kinds, inner) if b == node} | {
                b for a, b in paths(flow, kinds, inner) if a == node
            }
            assert any(kinds[end] == "allow" for end in ends)


@given(drawn=flows())
def test_forward_propagation_only_adds(drawn):
    flow, kinds = drawn
    less, more = narrowed(flow, kinds), narrowed(flow, kinds, forward=True)
    assert less.narrow.items() <= more.narrow.items()
    added = more.narrow.keys() - less.narrow.keys()
    assert {more.narrow[node] for node in added} <= {"after a product"}


@given(drawn=flows(), forward=st.booleans(), data=st.data())
@settings(max_examples=80)
def test_measured_errors_overrule_the_passes(drawn, forward, data):
    flow, kinds = drawn
    bits = narrowed(flow, kinds, forward=forward)
    movable = [node for node in flow.nodes if kinds[node] in ("allow", "infer")]
    same = narrowed(flow, kinds, forward=forward, measured={node: node in bits.narrow for node in movable})
    assert {kinds[node] for node in {*same.narrow} ^ {*bits.narrow}} <= {"clear"}
    measured = {node: data.draw(st.booleans()) for node in movable if data.draw(st.booleans())}
    other = narrowed(flow, kinds, forward=forward, measured=measured)
    assert {*other.narrow} | {*other.wide} == {*flow.nodes}
    assert not {*other.narrow} & {*other.wide}
    for node in flow.nodes:
        if node in movable:
            assert (node in other.narrow) == measured.get(node, node in bits.narrow)
        elif kinds[node] in ("deny", None):
            assert node in other.wide
    for node in (node for node, few in measured.items() if not few):  # it reads no number that was rounded for others
        for view in flow.sources[node]:
            if kinds[view] == "clear" and view in other.narrow:
                assert any(one in other.narrow for one in flow.sources[view])


def test_a_widened_operator_reads_no_view_that_is_rounded_for_another():
    kinds = {0: None, 1: "clear", 2: "allow", 3: "allow"}
    flow = Flow(range(4), {0: [], 1: [0], 2: [1], 3: [1]}, {0: [1], 1: [2, 3], 2: [], 3: []})
    assert {*narrowed(flow, kinds).narrow} == {1, 2, 3}
    assert {*narrowed(flow, kinds, measured={2: False}).narrow} == {3}


def test_a_line_of_operators():
    kinds = ["allow", "infer", "allow", "infer", "deny", "infer", "clear", "allow", "infer", "clear"]
    sources = {node: [node - 1] if node else [] for node in range(len(kinds))}
    flow = Flow(range(len(kinds)), sources, {node: [node + 1] for node in range(9)} | {9: []})
    bits = narrowed(flow, dict(enumerate(kinds)))
    assert {*bits.narrow} == {0, 1, 2, 7, 6}  # a view of denied numbers, which a product reads, may be narrowed
    assert bits.wide[5] == "after an operator that needs 32 bits"
    assert bits.wide[3] == bits.wide[8] == "not between products"
    assert {*narrowed(flow, dict(enumerate(kinds)), forward=True).narrow} == {0, 1, 2, 3, 6, 7, 8, 9}


def test_no_operator_is_in_two_lists():
    names = [name for operators in LISTS.values() for name in operators]
    assert len(names) == len({*names})
    assert list_of("mm") == "allow"
    assert list_of("no_such_operator") is None
