"""Checkpoints in memory give their slots back when another process needs them, and go to disk from then on."""

from dataclasses import replace

import pytest
from broker_hosts import Pretended
from giving_back_ranks import FAULTS, peers_slots

from shoestring.checkpoint.tiers.budget import HELD, OWN, STAGING
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.leases import Priority
from shoestring.testing.suite import shared
from tests.rigs.checkpointing.known import BETWEEN, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import listening


def test_slots_are_freed_at_the_next_step_and_disk_goes_on(tmp_path):
    host = Pretended(tmp_path / "user" / "broker", total=1 << 30)
    memory, other = host.tenant("run"), host.tenant("other")
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    checkpointer.world = replace(checkpointer.world, memory=memory)
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    nbytes, priority = memory.leases[OWN]
    assert priority is Priority.CHECKPOINT and list(checkpointer.folder.glob("*"))
    assert other.take("offload", host.total - nbytes // 2)
    memory.look()
    with listening() as said:
        trained(checkpointer, state, progress, [BETWEEN + 1])
        assert OWN not in memory.leases and not list(checkpointer.folder.glob("*"))  # at a step without a checkpoint
        assert not other.called_back and not memory.called_back
        trained(checkpointer, state, progress, range(BETWEEN + 2, 3 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == 3 * BETWEEN and list(memory.leases) == [STAGING]
    assert [line for line in said if "other processes on this host need the" in line], said
    checkpointer.close()
    memory.leave()
    other.leave()


def given_back(pool, tmp_path, fault):
    for first, then, safe, called in pool.call(peers_slots, folder=str(tmp_path), fault=fault):
        assert first[2], "nothing was held for others"
        assert then == [0, first[1], 0], "what is held for others goes, and nothing else"
        assert HELD not in called and safe["memory"] >= 2


def test_what_is_held_for_other_hosts_goes_first(request, tmp_path):
    given_back(shared(request.config)["pool"], tmp_path, "")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault])
def test_a_fault_of_giving_back_is_seen(request, tmp_path, fault):
    with pytest.raises(AssertionError):
        given_back(shared(request.config)["pool"], tmp_path, fault)
