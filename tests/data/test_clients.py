"""Clients: their turns on any number of ranks, a position for each, and what is refused."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.data import Data
from shoestring.data.clients import ClientLoader, Clients
from shoestring.data.order import permutation


class Numbers(Dataset):
    draws = False

    def __init__(self, name, samples):
        self.name, self.samples, self.fingerprint = name, samples, name

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"x": torch.tensor([sum(self.name.encode()), index])}


def clients(sizes, present=None):
    return Clients({f"c{number}": Numbers(f"c{number}", size) for number, size in enumerate(sizes)}, present)


def taken(loader, steps):
    """The turn and the ids of each of the next steps."""
    return [(loader.turn, [part["ids"].tolist() for part in step]) for step in islice(iter(loader), steps)]


shapes = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)
)


@pytest.mark.slow
@settings(max_examples=40)
@given(shapes, st.sampled_from([0.0, 0.4]), st.integers(0, 5))
def test_every_present_client_has_one_turn_a_round_on_any_number_of_ranks(shape, absent, seed):
    sizes, ranks, steps, part = shape
    ranks = min(ranks, len(sizes))
    loaders = [
        ClientLoader(clients(sizes), steps=steps, batch=part * ranks, rank=rank, size=ranks, absent=absent, seed=seed)
        for rank in range(ranks)
    ]
    logs = [taken(loader, 4 * steps * len(sizes)) for loader in loaders]
    flags = [[(turn.round, turn.opens, turn.first, turn.last, turn.closes) for turn, _ in log] for log in logs]
    assert all(one == flags[0] for one in flags)
    rounds = sorted({turn.round for turn, _ in logs[0]})[:-1]  # the last one may not be whole
    streams = {}
    for number in rounds:
        present = [name for of_rank in loaders[0].present(number) for name in of_rank]
        for rank, log in enumerate(logs):
            turns = [(turn.client, ids) for turn, ids in log if turn.round == number]
            names = [name for name, _ in turns[::steps] if name]
            assert names == loaders[rank].present(number)[rank]
            assert [name for name, _ in turns] == [name for name, _ in turns[::steps] for _ in range(steps)]
            for name, ids in turns:
                streams.setdefault(name, []).extend(ids[0])
        longest = max(map(len, loaders[0].present(number)))
        assert sum(turn.round == number for turn, _ in logs[0]) == longest * steps and len(present) <= len(sizes)
    for name, ids in streams.items():  # each client's own order, in which an absence leaves no gap
        if name:
            own = next(loader.loaders[name] for loader in loaders if name in loader.loaders)
            right = [i for e in range(len(ids)) for i in permutation(own.seed, e, own.samples)]
            assert ids == right[: len(ids)]


@settings(max_examples=25)
@given(shapes, st.integers(0, 30), st.integers(0, 3))
def test_a_loader_continues_where_it_was(shape, stop, seed):
    sizes, _, steps, part = shape
    arguments = {"steps": steps, "batch": 2 * part, "accumulate": 2, "absent": 0.3, "seed": seed}
    whole, first, again = (ClientLoader(clients(sizes), **arguments) for _ in range(3))
    log = taken(whole, stop + 12)
    taken(first, stop)
    again.load_state_dict(first.state_dict())
    assert taken(again, 12) == log[stop:]


def test_on_another_number_of_ranks_the_round_starts_again_and_positions_stay():
    one = ClientLoader(clients([4, 5, 6]), steps=2, batch=2)
    log = taken(one, 6 + 3)  # a round, a turn and a half
    state = one.state_dict()
    for rank in range(2):
        loader = ClientLoader(clients([4, 5, 6]), steps=2, batch=4, rank=rank, size=2)
        loader.load_state_dict(loader.merge([state], rank, 2))
        (turn, _), *_ = taken(loader, 1)
        assert (turn.round, turn.opens, turn.first) == (1, True, True)
        assert turn.client == f"c{rank}"
        seen = sum(2 for earlier, _ in log if earlier.client == turn.client)
        assert loader.loaders[turn.client].consumed == seen + 2
    ended = ClientLoader(clients([4, 5, 6]), steps=2, batch=2)
    taken(ended, 6)
    assert ended.merge([ended.state_dict()], 0, 1)["round"] == 1  # a whole round does not start again
    longer = ClientLoader(clients([4, 5, 6]), steps=3, batch=2)
    longer.load_state_dict(state)
    assert taken(longer, 1)[0][0].opens


def test_an_idle_rank_gets_samples_that_move_no_position():
    loader = ClientLoader(clients([3, 3, 3]), steps=1, batch=4, rank=1, size=2)
    (busy, _), (idle, ids) = taken(loader, 2)
    assert busy.client == "c1" and idle.client == "" and idle.closes and ids == [[0, 1]]
    assert loader.loaders["c1"].consumed == 2


def test_clients_are_one_data_set_one_after_the_other():
    together = clients([2, 3])
    assert len(together) == 5 and together[2]["x"].tolist() == together[-3]["x"].tolist() == [ord("c") + ord("1"), 0]
    with pytest.raises(IndexError):
        together[5]
    assert together.fingerprint != clients([3, 2]).fingerprint


def test_refusals_are_one_line():
    other = ClientLoader(clients([2, 3]), steps=1, batch=1)
    changed = Clients({"c0": Numbers("new", 2), "c1": Numbers("c1", 3)})
    cases = [
        (lambda: Clients({}), DataError, "there are no clients"),
        (lambda: clients([1, 0]), DataError, "the client `c1` has no samples"),
        (lambda: Clients({"c0": iter([])}), DataError, "the client `c0` has list_iterator as its data set"),
        (lambda: Clients({"": Numbers("", 1)}), DataError, "the client `` has Numbers"),
        (lambda: ClientLoader(clients([1]), steps=1, batch=2, size=2), ConfigError, "2 ranks share 1 clients"),
        (lambda: ClientLoader(clients([1]), steps=0, batch=1), ConfigError, "turns of 0 steps"),
        (lambda: ClientLoader(clients([1]), steps=1, batch=1, absent=1.0), ConfigError, "an absence of 1.0"),
        (lambda: taken(ClientLoader(clients([1], lambda *_: False), steps=1, batch=1), 1), DataError, "1000 rounds"),
        (lambda: other.load_state_dict(ClientLoader(clients([2]), steps=1, batch=1).state_dict()), DataError, "`c1`"),
        (lambda: other.load_state_dict(ClientLoader(changed, steps=1, batch=1).state_dict()), DataError, "`c0`: the"),
        (lambda: Data(clients=True, workers=2), ConfigError, "data.clients cannot be combined"),
        (lambda: Data(clients=True, per_rank=True), ConfigError, "data.clients cannot be combined"),
        (lambda: Data(absent=0.5), ConfigError, "data.absent is for clients"),
        (lambda: Data(clients=True, absent=1.5), ConfigError, "data.absent is 1.5"),
    ]
    for act, kind, message in cases:
        with pytest.raises(kind) as refusal:
            act()
        assert message in str(refusal.value) and "\n" not in str(refusal.value)
