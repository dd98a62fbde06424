"""Checkpoints in memory give their slots back when another process needs them, and go to disk from then on."""

from dataclasses import replace

from broker_hosts import Pretended

from shoestring.checkpoint.tiers.budget import OWN, STAGING
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.leases import Priority
from shoestring.testing.checkpointing.known import BETWEEN, build_checkpointer, trained
from shoestring.testing.checkpointing.surroundings import listening


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
    assert [line for line in said if "others on this host need the" in line], said
    checkpointer.close()
    memory.leave()
    other.leave()
