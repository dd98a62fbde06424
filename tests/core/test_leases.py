"""One budget of host memory: what is granted, and who gives back first."""

from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World


def test_what_fits_is_granted_and_what_does_not_is_refused():
    memory = HostMemory(100)
    assert memory.take("a", 60, Priority.CACHE) and not memory.take("b", 50, Priority.CACHE)
    assert memory.take("b", 40, Priority.CACHE) and memory.take(
        "a", 60, Priority.CACHE
    )  # its own lease is none beside it
    memory.give("b")
    assert memory.take("a", 100, Priority.CACHE)


def test_who_is_refused_keeps_what_it_had_until_it_gives_it():
    """Its memory is in use until it has been freed: nobody else may be told that it is there."""
    memory = HostMemory(100)
    assert memory.take("a", 60, Priority.CACHE) and not memory.take("a", 101, Priority.CACHE)
    assert memory.leases == {"a": (60, Priority.CACHE)}
    assert memory.take("needed", 50) and not memory.take("a", 60, Priority.CACHE)
    assert memory.leases["a"] == (60, Priority.CACHE) and not memory.take("b", 20, Priority.CACHE)
    memory.give("a")
    assert memory.take("b", 20, Priority.CACHE)


def test_where_memory_gets_short_the_last_orders_end_first():
    memory = HostMemory(100)
    orders = {"first back": Priority.PEERS, "second back": Priority.CHECKPOINT, "last back": Priority.CACHE}

    def ended():
        """Those that are refused what they have, and give it."""
        refused = [name for name, order in orders.items() if not memory.take(name, 30, order)]
        for name in refused:
            memory.give(name)
        return refused

    assert ended() == []
    assert memory.take("another", 45, Priority.CHECKPOINT) is False and ended() == []  # two are of its order and before
    assert memory.take("needed", 20) and memory.take("last back", 30, Priority.CACHE) and ended() == ["first back"]
    assert memory.take("needed", 50) and ended() == ["first back", "second back"]
    assert memory.take("needed", 500) and ended() == list(orders) and list(memory.leases) == ["needed"]
    memory.give("needed")
    assert ended() == []


def test_the_budget_is_set_once_and_what_is_in_use_comes_on_top():
    memory = HostMemory()
    assert memory.take("before", 1000, Priority.CACHE)
    memory.settle(8000, ranks=2)
    assert memory.budget == 3500 + 1000
    memory.settle(80)
    assert memory.budget == 4500


def test_it_says_who_has_what():
    memory = HostMemory(5 << 20)
    assert str(memory) == "5 MiB (nothing taken)"
    assert memory.take("a", 1 << 20, Priority.CACHE) and memory.take("b", 2 << 20)
    assert str(memory) == "5 MiB (a 1 MiB, b 2 MiB taken)"


def test_a_world_has_one_and_nothing_limits_it_at_first():
    world = World()
    assert world == World() and world.memory.take("a", 1 << 60, Priority.CACHE)
