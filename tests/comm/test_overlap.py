"""Within a channel a cohort begins while another's last answers travel, and collectives keep their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean, Request
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.exchange.coordinator import Coordinator
from shoestring.comm.exchange.route import Route
from shoestring.core.feature import HOSTS
from shoestring.core.world import World

CPU, PATIENCE = torch.device("cpu"), 5.0


class TwoStages(Codec):
    """Doubles what it gets by two means."""

    stages = 2

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        for grad in grads.values():
            yield [Mean(grad)]
            yield [Mean(grad)]
            grad.mul_(2)


class Late:
    """A wire whose answers come when a test lets them, and that notes what begins and ends.

    Args:
        chained: whether waiting for an answer would start further collectives.
    """

    def __init__(self, route: Route, *, chained: bool = False) -> None:
        self.seen: list[str] = []
        self.changed = threading.Condition()
        self.held: set[str] = set()
        self.broken = ""
        self.route = route
        route.outer.start = self.start
        route.outer._starts_more = lambda requests: chained

    def note(self, what: str) -> None:
        with self.changed:
            self.seen.append(what)
            self.changed.notify_all()

    def start(self, requests: Sequence[Request]) -> Callable[[], list[Tensor]]:
        tensors = [request.tensor for request in requests]
        which = f"{tensors[0].numel()}.{sum(each.startswith(f'+{tensors[0].numel()}.') for each in self.seen)}"
        self.note(f"+{which}")

        def wait() -> list[Tensor]:
            with self.changed:
                assert self.changed.wait_for(lambda: which not in self.held, PATIENCE), self.seen
            self.note(f"-{which}")
            if which == self.broken:
                raise RuntimeError("a rank is lost")
            return tensors

        return wait

    def until(self, what: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: what in self.seen, PATIENCE)

    def release(self, which: str) -> None:
        with self.changed:
            self.held.discard(which)
            self.changed.notify_all()


def exchanging(late: Late, codec: Codec, count: int = 3) -> tuple[Coordinator, list[Exception | None]]:
    """Cohorts of 1, 2, … gradients, all of which have arrived."""
    names = {f"{size}": 4 * size for size in range(count, 0, -1)}
    coordinator = Coordinator([late.route], codec, names, 10**9, CPU, lambda: 1.0)
    ended: list[Exception | None] = []
    coordinator.begin()
    for size in range(1, count + 1):
        coordinator.arrive({f"{size}": torch.ones(size)}, ended.append)
    return coordinator, ended


def test_the_next_cohort_begins_while_the_last_answers_of_one_travel():
    late = Late(Route(World(), [HOSTS]))
    late.held = {"1.1"}
    coordinator, ended = exchanging(late, TwoStages())
    assert late.until("-2.0"), late.seen  # the second cohort's first answers are there
    assert "-1.1" not in late.seen
    late.release("1.1")
    coordinator.wait()
    assert ended == [None] * 3
    assert [each for each in late.seen if each[0] == "+"] == ["+1.0", "+1.1", "+2.0", "+2.1", "+3.0", "+3.1"]
    coordinator.close()


def test_no_third_cohort_takes_memory():
    late = Late(Route(World(), [HOSTS]))
    late.held = {"1.0"}
    coordinator, ended = exchanging(late, DenseCodec(), 4)
    assert late.until("+2.0")
    late.changed.acquire()
    assert not late.changed.wait_for(lambda: "+3.0" in late.seen, 0.05)
    late.changed.release()
    late.release("1.0")
    coordinator.wait()
    assert len(ended) == 4
    coordinator.close()


def test_what_starts_collectives_when_it_is_waited_for_ends_before_the_next_cohort():
    late = Late(Route(World(), [HOSTS]), chained=True)
    coordinator, _ = exchanging(late, TwoStages())
    coordinator.wait()
    assert late.seen == [f"{way}{size}.{stage}" for size in (1, 2, 3) for stage in (0, 1) for way in "+-"]
    coordinator.close()


@pytest.mark.parametrize("broken", ["1.0", "1.1"])
def test_an_error_of_one_cohort_is_raised_and_others_end(broken):
    late = Late(Route(World(), [HOSTS]))
    late.broken = broken
    coordinator, ended = exchanging(late, TwoStages())
    with pytest.raises(RuntimeError, match=r"the exchange of `1` at step 0: a rank is lost"):
        coordinator.wait()
    assert late.until("-3.1")
    coordinator.close()
    assert [type(each) for each in ended] == [RuntimeError, type(None), type(None)]


def test_a_codec_that_yields_more_often_than_it_says_is_found():
    class More(TwoStages):
        stages = 1

    late = Late(Route(World(), [HOSTS]))
    coordinator, _ = exchanging(late, More())
    with pytest.raises(AssertionError, match="More yields more often than its stages say"):
        coordinator.wait()
    coordinator.close()
