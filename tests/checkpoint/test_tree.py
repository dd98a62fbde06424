"""Every tensor of a state has a name of its own, whatever its keys are; what has none is refused."""

import json
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_state import same

from shoestring import checkpoint
from shoestring.checkpoint.format import tree
from shoestring.checkpoint.format.layout import Box, Leaf
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.format.part import Draft
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.checkpoint.format.tree import encode, merged, merged_states
from shoestring.checkpoint.interop import exports
from shoestring.checkpoint.tiers.disk import Disk, manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.staging import Content, Frame
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Kept
from shoestring.core.world import World

# -- names ------------------------------------------------------------------------------------------------------------

alike = st.text("a/~01=:@#", max_size=4)
keys = st.one_of(alike, st.integers(-2, 12), st.booleans(), st.none(), st.floats(allow_nan=False), st.just("1~2"))
states = st.recursive(
    st.just(None),
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


def numbered(value, count):
    """A state of these keys, every leaf of which is another tensor."""
    if isinstance(value, dict):
        return {key: numbered(each, count) for key, each in value.items()}
    if isinstance(value, list):
        return [numbered(each, count) for each in value]
    return torch.tensor(next(count))


@pytest.mark.slow
@settings(max_examples=200)
@example({"a": {"1~2": None, 1: None, "1": None}}, {})
@example({"a/b": {"c": None}, "a": {"b/c": None}, "0:x": {}}, {"x": {}})
@example({"0:x": {}}, {"x": {}})
@given(st.dictionaries(alike, states, max_size=4), st.dictionaries(alike, states, max_size=4))
def test_every_tensor_has_a_name_of_its_own(shared, own):
    count = iter(range(1000))
    shared, own = numbered(shared, count), numbered(own, count)
    leaves, trees = {}, {}
    for name, state in shared.items():
        found = {}
        trees[name] = tree.encode({"it": state}, tree.root(name), found)
        assert not leaves.keys() & found.keys()
        leaves |= found
    for name, state in own.items():
        found = {}
        trees[name, "own"] = tree.encode({"it": state}, tree.root(name), found)
        found = {f"0:{path}": tensor for path, tensor in found.items()}
        assert not leaves.keys() & found.keys()
        leaves |= found
    assert len(leaves) == next(count)
    trees = {name: json.loads(json.dumps(each)) for name, each in trees.items()}
    for name, state in shared.items():
        assert same(tree.decode(trees[name], leaves.__getitem__)["it"], state)
    for name, state in own.items():
        assert same(tree.decode(trees[name, "own"], lambda path: leaves[f"0:{path}"])["it"], state)


def test_plain_names_are_written_as_they_are():
    found, state = {}, {"blocks.0.weight": torch.ones(1), "list": [torch.ones(1)], "state": {1: torch.ones(1)}}
    tree.encode(state, tree.root("model"), found)
    assert list(found) == ["model/blocks.0.weight", "model/list/0", "model/state/1"]


def test_keys_that_are_not_a_number_are_refused():
    with pytest.raises(CheckpointError, match="cannot save `x/NaN`: two values have this name"):
        tree.encode({math.nan: torch.ones(1), float("nan"): torch.ones(1)}, "x", {})


TWINS = {"1~2": 10.0, 1: 11.0, "1": 12.0, "a/b": 13.0, "a": {"b": 14.0}, "~=1": 15.0}


def tensors(value):
    return {key: tensors(each) if isinstance(each, dict) else torch.tensor(each) for key, each in value.items()}


def test_one_file_holds_all_of_them():
    assert same(unpack(pack(tensors(TWINS))), tensors(TWINS))


class State:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


NAMES = {  # by the name of a state: whether it is each rank's own
    "0:loader": False,
    "loader": True,
    "a": False,
    "a/b": False,
    "1": True,
    "0:1": False,
}


def test_a_generation_holds_all_of_them(tmp_path):
    world = World.current()
    state = {name: tensors({"x": float(number), "b/x": number + 0.5}) for number, name in enumerate(NAMES)}
    state["a"] |= {"b": tensors({"x": 77.0}), **tensors(TWINS)}
    kept = {name: Kept(State(state[name]), "own" if own else "same", None) for name, own in NAMES.items()}
    content = Content(kept)
    checkpoint = CheckpointId(3, 0, "ab", 1, 1)
    disk = Disk(tmp_path, Files())
    parts = {}
    for name, draft in Frame(content, world).drafts(content, {"step": 3}).items():
        parts[name] = torch.empty(draft.nbytes, dtype=torch.uint8)
        draft.fill(parts[name])
    disk.commit(Record(checkpoint, disk.write(checkpoint, parts), {}))
    found = exports.opened(manifests(tmp_path))
    assert all(same(read(found.state(name)), state[name]) for name in NAMES)


def read(value):
    return {key: read(each) for key, each in value.items()} if isinstance(value, dict) else value.read()


def test_a_checkpoint_of_version_0_1_is_read(tmp_path):
    """Its names are the paths as they are, and a number behind those that were taken."""
    names = {"model/1": 1.0, "model/1~1": 2.0, "model/a/b": 3.0, "model/a/b~3": 4.0, "0:loader/at": 5.0}
    pairs = [[1, {"tensor": "model/1"}], ["1", {"tensor": "model/1~1"}], ["a/b", {"tensor": "model/a/b"}]]
    model = {"map": [*pairs, ["a", {"map": [["b", {"tensor": "model/a/b~3"}]]}]]}
    own = {"loader": {"map": [["at", {"tensor": "loader/at"}]]}}
    about = {"step": 3, "homes": {}, "trees": {"shared": {"model": model}, "own": own}}
    draft = Draft.of([Leaf(name, (), Box((), ()), (0,), torch.tensor(value)) for name, value in names.items()], about)
    data = torch.empty(draft.nbytes, dtype=torch.uint8)
    draft.fill(data)
    disk, checkpoint = Disk(tmp_path, Files()), CheckpointId(3, 0, "ab", 1, 1)
    disk.commit(Record(checkpoint, disk.write(checkpoint, {"private-0": data}), {}))
    found = exports.opened(manifests(tmp_path))
    assert same(read(found.state("model")), tensors({1: 1.0, "1": 2.0, "a/b": 3.0, "a": {"b": 4.0}}))
    assert same(read(found.state("loader")), tensors({"at": 5.0}))


def test_pieces_that_read_alike_are_all_there():
    rows = [Leaf("a", (9,), Box((5 + n,), (1,)), (0,), torch.tensor([float(n)])) for n in range(3)]
    names = ["a@5", "a@5#", *(f"a@5#{number}" for number in range(10, 30)), "__metadata__"]
    odd = [Leaf(name, (1,), Box((0,), (1,)), (0,), torch.ones(1)) for name in names]
    for leaves in ([*rows, *odd], [*odd, *rows], [*odd[::-1], *rows]):
        draft = Draft.of(leaves, {})
        data = torch.empty(draft.nbytes, dtype=torch.uint8)
        draft.fill(data)
        record = exports.Part("a part", data, exports.sums(data))
        assert sorted(piece.tensor for piece in record.pieces) == sorted(leaf.name for leaf in leaves)


def test_a_tensor_by_the_name_of_safetensors_metadata_is_not_exported(tmp_path):
    held = {"__metadata__": exports.held("__metadata__", torch.ones(2))}
    with pytest.raises(CheckpointError, match="reserves this name"):
        exports.write_safetensors(held, tmp_path / "out.safetensors")


# -- names of states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["progress", "random", "checkpoint"])
@pytest.mark.parametrize("which", ["state", "own"])
def test_names_of_our_own_states_are_refused(name, which, tmp_path):
    model = torch.nn.Linear(1, 1)
    given = {"state": {"model": model}, "own": {"loader": State({})}}
    given[which] = given[which] | {name: State({})}
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"))
    with pytest.raises(ConfigError, match=f"`{name}` is reserved for a state that"):
        checkpoint.attach(given["state"], own=given["own"], settings=settings)


def test_one_name_in_both_is_refused(tmp_path):
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"))
    with pytest.raises(ConfigError, match="`loader` is in `state` and in `own`"):
        checkpoint.attach({"loader": State({})}, own={"loader": State({})}, settings=settings)


def test_trees_of_ranks_that_train_different_parameters_are_merged():
    def of(*names):
        state = {"state": {name: {"step": 1, "odd": (name, 2)} for name in names}, "groups": [{"params": [*names]}]}
        return encode(state, "optimizer", {})

    assert merged([of("a"), of("a")]) == of("a")
    assert merged([of("a", "b"), of("b", "c"), of()]) == of("a", "b", "c")
    assert merged([of(), of("a")]) == of("a")
    assert merged([encode(value, "x", {}) for value in (1, 2)]) == 1
    assert merged([encode(value, "x", {}) for value in ([1, 2], [1])]) == [1, 2]
    assert merged([encode(value, "x", {}) for value in ({1: 2}, {"1": 3})]) == encode({1: 2, "1": 3}, "x", {})
    assert merged_states([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
