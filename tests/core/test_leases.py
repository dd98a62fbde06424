"""One budget of host memory: what is granted, and who gives back first."""

from shoestring.core.leases import HostMemory
from shoestring.core.world import World


def test_what_fits_is_granted_and_what_does_not_is_refused():
    memory = HostMemory(100)
    assert memory.take("a", 60, 1) and not memory.take("b", 50, 1) and memory.take("b", 40, 1)
    assert memory.take("a", 60, 1)  # its own lease is none beside it
    assert not memory.take("a", 61, 1) and list(memory.leases) == ["b"]  # it has ended
    assert memory.take("b", 100, 1)
    memory.give("b")
    assert memory.take("a", 100, 1)


def test_where_memory_gets_short_the_highest_orders_end_first():
    memory = HostMemory(100)
    orders = {"first back": 3, "second back": 2, "last back": 1}

    def ended():
        return [name for name, order in orders.items() if not memory.take(name, 30, order)]

    assert ended() == []
    assert memory.take("another", 45, 2) is False and ended() == []  # there are two of its order and below
    assert memory.take("needed", 20) and memory.take("last back", 30, 1) and ended() == ["first back"]
    assert memory.take("needed", 50) and ended() == ["first back", "second back"]
    assert memory.take("needed", 500) and ended() == list(orders) and list(memory.leases) == ["needed"]
    memory.give("needed")
    assert ended() == []


def test_it_says_who_has_what():
    memory = HostMemory(5e6)
    assert str(memory) == "5 MB (nothing taken)"
    assert memory.take("a", 10**6, 1) and memory.take("b", 2 * 10**6)
    assert str(memory) == "5 MB (a 1 MB, b 2 MB taken)"


def test_a_world_has_one_and_nothing_limits_it_at_first():
    world = World()
    assert world == World() and world.memory.take("a", 1 << 60, 1)
