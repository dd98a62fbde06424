"""How `run.resume` is decided: small cases one by one, and what holds in all of them."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.format.history import Epoch, History
from shoestring.checkpoint.format.manifest import CheckpointId, Entry
from shoestring.checkpoint.recovery.attempts import MOST
from shoestring.checkpoint.recovery.decide import ResumeFacts, decide
from shoestring.checkpoint.recovery.offers import DISK, MEMORY, Available, Offer, Wish
from shoestring.checkpoint.tiers.plain import OneFiles

AUTO = Wish(Path("/run"), Path("/memory"))
LINE = History("r", (Epoch(2, "c"), Epoch(1, "b", 6)))
"""The newest start continued step 6 of the one before."""


def checkpoint(step, start=2, ranks=1, run="r"):
    return CheckpointId(step, start, "abcd"[start], ranks, 1, run)


def offers(*placed, start=2, ranks=1, run="r", last=False):
    """Offers from words such as "8 disk", "8 memory 1" (rank 1's part, on host 1) or "8 held 1 0" (on host 0)."""
    made = []
    for word in placed:
        step, place, *numbers = word.split()
        rank, host = [*map(int, numbers), 0, 0][:2] if len(numbers) != 1 else [int(numbers[0])] * 2
        of, level = checkpoint(int(step), start, ranks, run), DISK if place == "disk" else MEMORY
        folder = f"/run/{of.name}" if level == DISK else f"/memory/host-{host}"
        file = f"{'held' if place == 'held' else 'own'}-{of.name}.private-{rank}"
        part = f"private-{rank}"
        made.append(Offer(of, host, level, f"{folder}/{file}", part, Entry(file, 8, ()), (("last", last),)))
    return tuple(made)


def decided(*placed, history=LINE, wish=AUTO, facts=None, files=(), unusable=(), unseen="", **more):
    there = tuple(each for each in placed if isinstance(each, Offer))
    there += offers(*(each for each in placed if isinstance(each, str)), **more)
    hosts = max((offer.checkpoint.ranks for offer in there), default=1)
    return decide(Available(there, unusable, files, unseen), history, wish, facts or ResumeFacts(hosts))


# -- small cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placed", "ranks", "expected"),
    [
        (["8 disk"], 1, (8, DISK)),
        (["8 disk", "9 memory"], 1, (9, MEMORY)),
        (["9 disk", "8 memory"], 1, (9, DISK)),
        (["8 disk", "8 memory"], 1, (8, MEMORY)),
        (["8 disk 0", "8 disk 1", "9 memory 0"], 2, (8, DISK)),  # the other host is lost
        (["8 disk 0", "8 disk 1", "9 memory 0", "9 memory 1"], 2, (9, MEMORY)),
        (["8 disk 0", "8 disk 1", "9 memory 0", "9 held 1 0"], 2, (9, "peers")),
        (["8 memory 0", "8 disk 1"], 2, (8, DISK)),  # from two levels
    ],
)
def test_the_newest_complete_checkpoint_is_taken_wherever_it_is(placed, ranks, expected):
    plan = decided(*placed, ranks=ranks)
    assert (plan.action, plan.step, plan.level) == ("load", *expected)
    assert all(left.reason for left in plan.not_taken) and plan.refusal is None
    assert plan.replays and plan.follows_failure and not plan.ended


def test_of_a_run_that_has_ended_nothing_is_replayed_and_no_failure_is_counted():
    plan = decided("8 disk", last=True)
    assert plan.ended and plan.on_disk and not plan.replays and not plan.follows_failure
    plan = decided("8 memory", last=True)  # killed on the way to the disk
    assert plan.ended and not plan.on_disk and plan.follows_failure


def reasons(plan):
    return {left.checkpoint.step: left.reason for left in plan.not_taken}


def test_each_offer_that_is_not_taken_has_its_reason():
    there = (
        *offers("11 memory 0", ranks=2),
        *offers("10 disk", "9 disk", "7 disk", "4 memory"),
        *offers("8 disk", "5 disk", start=1),
        *offers("12 memory", start=0, run="x"),
        *offers("13 disk", start=3),
    )
    damaged = {there[1].key: "a flipped bit"}
    facts = ResumeFacts(1, damaged=damaged, attempts={there[2].checkpoint.name: MOST})
    plan = decided(*there, facts=facts)
    assert (plan.action, plan.step) == ("load", 7)
    assert reasons(plan) == {
        13: "abandoned: the run went back to an earlier step, or another start took over",
        12: "it is of another run",
        11: "incomplete: the parts of 1 of 2 ranks are missing",
        10: "damaged: a flipped bit",
        9: f"the last {MOST} attempts to load it ended the process",
        8: "abandoned: the run went back to step 6 and continued from there",
        5: "older than step 7",
        4: "older than step 7",
    }
    assert plan.warnings == (f"skipping the checkpoint of step 9: {reasons(plan)[9]}",)


def one(newest, undamaged, count=1):
    return (OneFiles(f"step-{newest:08d}.safetensors", count, undamaged),)


@pytest.mark.parametrize(
    ("placed", "files", "expected"),
    [
        ([], (), ("start anew", 0)),
        ([], one(8, 8), ("load one file", 8)),
        ([], one(8, 4), ("load one file", 4)),
        ([], one(8, 0), ("refuse", 0)),
        (["8 disk"], one(8, 8), ("load", 8)),
        (["8 disk"], one(9, 9), ("load one file", 9)),
        (["8 disk"], one(9, 0), ("load", 8)),
        (["9 memory 0"], one(8, 8), ("load one file", 8)),
    ],
)
def test_a_checkpoint_in_one_file_counts_by_its_step(placed, files, expected):
    plan = decided(*placed, files=files, ranks=2 if placed == ["9 memory 0"] else 1)
    assert (plan.action, plan.step) == expected


def test_nothing_is_begun_beside_checkpoints_that_cannot_be_used():
    refusals = {
        "abandoned": decided("8 disk", start=1),
        "incomplete": decided("8 disk 0", ranks=2),
        "manifest": decided(unusable=("step-8",)),
        "one file": decided(files=one(8, 0, 3)),
        "unseen": decided(unseen="cannot look"),
        "attempts": decided("8 disk", facts=ResumeFacts(attempts={checkpoint(8).name: MOST})),
    }
    assert {plan.action for plan in refusals.values()} == {"refuse"}
    messages = {name: plan.why for name, plan in refusals.items()}
    often = f"step 8: the last {MOST} attempts to load it ended the process"
    assert messages == {
        "abandoned": "`/run` holds no checkpoint of the newest start, only others up to step 8",
        "incomplete": "no checkpoint in `/run` can be read: all 1 are damaged or incomplete",
        "manifest": "`/run` holds checkpoints, and none of them can be used: step-8",
        "one file": "no checkpoint in `/run` can be read: all 3 are damaged",
        "unseen": "nothing to resume from: cannot look",
        "attempts": f"no checkpoint in `/run` can be read: {often}",
    }
    anew = decided("8 memory 0", ranks=2)  # a first checkpoint that was cut short
    assert anew.action == "start anew" and anew.warnings[0].endswith("are incomplete: starting from step 0")


def test_memory_counts_only_if_it_is_known_of_which_run_it_is():
    assert decided("8 memory", history=None).action == "start anew"
    assert decided("8 memory", history=None, facts=ResumeFacts(history_damaged=True)).step == 8
    assert decided("8 memory", "7 disk", history=None).step == 8  # the same run is on disk
    plan = decided(*offers("8 memory", run="x"), *offers("7 disk"), history=None)
    assert plan.step == 7 and plan.history is None


def test_what_is_named_is_taken_though_the_run_went_back_from_it():
    there = offers("8 disk", start=1) + offers("9 disk")
    assert decided(*there).step == 9
    plan = decided(*there, wish=Wish(AUTO.disk, only=Path(there[0].path).parent))
    assert plan.step == 8 and not plan.replays and not plan.follows_failure
    assert reasons(plan)[9] == f"`{Path(there[0].path).parent}` was named"
    assert decided(wish=Wish(AUTO.disk)).action == "load one file"  # which may have been named: its reader says


def test_what_cannot_be_put_together_is_given_up_for_the_next():
    there = offers("8 disk", "9 disk")
    facts = ResumeFacts().after(there[1].checkpoint, {}, "`weight` is incomplete")
    plan = decided(*there, facts=facts)
    assert plan.step == 8 and reasons(plan)[9] == "`weight` is incomplete"
    plan = decided(there[1], facts=facts)
    assert plan.why.endswith("all 1 are damaged or incomplete: step 9: `weight` is incomplete")


def test_a_lost_part_is_rebuilt_from_parity():
    notes = (("ranks", [0, 1, 2]), ("lengths", [8, 8, 8]), ("marks", [0, 0, 0]))
    there = [*offers("8 memory 0", "8 memory 2", ranks=3)]
    there += [
        replace(offer, part=offer.part.replace("private", "parity"), path=f"{offer.path}-parity", notes=notes)
        for offer in there
    ]
    plan = decided(*there)
    assert (plan.action, plan.level) == ("load", "peers")
    (rebuild,) = plan.rebuilds
    assert (rebuild.lost, rebuild.builder, rebuild.holders) == (1, 1, {0: 0, 2: 2})
    lost = decided(*there, facts=ResumeFacts(3, damaged={there[-1].key: "it"}))
    assert lost.action == "start anew" and not lost.rebuilds


# -- what always holds ------------------------------------------------------------------------------------------------

WORDS = [f"{step} {place}" for step in (7, 8, 9) for place in ("disk 0", "disk 1", "memory 0", "memory 1", "held 1 0")]
FACTS = (
    ResumeFacts(2),
    ResumeFacts(2, history_damaged=True),
    ResumeFacts(2, attempts={checkpoint(9, ranks=2).name: MOST}),
)


def check(plan, found, facts):
    """What holds of every plan."""
    taken = [*plan.offers, *(offer for left in plan.not_taken for offer in left.offers)]
    assert sorted(offer.key for offer in taken) == sorted(offer.key for offer in found.offers)
    assert all(left.reason and left.offers for left in plan.not_taken)
    assert (plan.refusal is not None) == (plan.action == "refuse")
    assert (plan.checkpoint is not None) == (plan.action == "load") == bool(plan.offers)
    files = max((files.undamaged for files in found.one_files), default=0)
    if plan.action == "load":
        assert plan.history is None or plan.history.holds(plan.checkpoint)
        assert {offer.part for offer in plan.offers} == {"private-0", "private-1"}
        assert not {offer.key for offer in plan.offers} & facts.damaged.keys()
        assert plan.step >= files
    newer = [left for left in plan.not_taken if left.checkpoint.step > max(plan.step, files)]
    assert not any(left.reason.startswith("older") for left in newer)
    if plan.action == "start anew":
        assert not found.unusable and not found.one_files
        assert not any(offer.level == DISK for offer in found.offers)


def test_every_case_of_few_offers():
    for size in range(4):
        for words in itertools.combinations(WORDS, size):
            found = Available(offers(*words, ranks=2))
            for history, facts in itertools.product((LINE, None), FACTS):
                check(decide(found, history, AUTO, facts), found, facts)


histories = st.sampled_from(
    [None, LINE, History("r", (Epoch(3, "d"), Epoch(2, "c", 8))), History("x", (Epoch(0, "a"),))]
)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 3)), unique=True, max_size=12),
    histories,
    st.sampled_from(FACTS),
    st.sampled_from([(), one(8, 8), one(9, 0)]),
    st.randoms(),
)
def test_damage_falls_back_step_by_step_and_the_order_of_offers_does_not_count(words, history, facts, files, draw):
    there = [each for word, start in words for each in offers(word, start=start, ranks=2)]
    found, step = Available(tuple(there), one_files=files), None
    while (plan := decide(found, history, AUTO, facts)).checkpoint is not None:
        check(plan, found, facts)
        shuffled = decide(replace(found, offers=tuple(draw.sample(there, len(there)))), history, AUTO, facts)
        assert (shuffled.checkpoint, {*map(id, shuffled.offers)}) == (plan.checkpoint, {*map(id, plan.offers)})
        assert step is None or plan.step <= step
        step = plan.step
        facts = facts.after(plan.checkpoint, {draw.choice(plan.offers).key: "a flipped bit"}, "")
    check(plan, found, facts)
