"""Older saves go only once the new one has been read back from the disk, and was what was written."""

from dataclasses import replace

import pytest

from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.disk import checked, manifests
from shoestring.checkpoint.tiers.file_acts import Files
from tests.rigs.checkpointing.known import BETWEEN, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import listening


class Flipping(Files):
    """Writes one bit of the files of some kind wrong, once it is told to; the system notices nothing."""

    def __init__(self, kind):
        self.kind, self.broken = kind, False

    def _put(self, descriptor, path, view, at):
        if self.broken and self.kind in path.name and path.is_relative_to(self.root):
            view = bytearray(view)
            view[len(view) // 2] ^= 1 << 3
            view = memoryview(view)
        super()._put(descriptor, path, view, at)


@pytest.mark.parametrize("kind", ["private", "manifest"])
def test_a_disk_that_flips_a_bit_costs_no_earlier_checkpoint(tmp_path, kind):
    files = Flipping(kind)
    files.root = tmp_path / "disk"
    checkpointer, state, progress = build_checkpointer(files.root, 0, 1, files)
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    files.broken = True
    with listening() as said:
        trained(checkpointer, state, progress, range(BETWEEN + 1, 3 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == BETWEEN and len(said) == 1  # although each checkpoint has a folder of its own
    assert all(
        "no checkpoints to disk: it does not hold the bytes that were written" in line and kind in line for line in said
    )
    saves = files.root / "run" / "saves"
    ((path, record),) = manifests(saves)
    assert record.checkpoint.step == BETWEEN and checked(path, record)["parts"] == 1
    assert [each.name for each in saves.iterdir() if each.name.startswith(".")] == []
    files.broken = False
    trained(checkpointer, state, progress, range(3 * BETWEEN + 1, 4 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == 4 * BETWEEN
    checkpointer.close()


def test_without_peers_a_deadline_keeps_no_checkpoint_from_the_disk(tmp_path):
    """However long it takes: it is all that there is to resume from."""
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    checkpointer.settings = replace(checkpointer.settings, deadline=1e-9)
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    assert checkpointer.schedule.seconds("disk") > checkpointer.settings.deadline  # it is known to take longer
    state.content, progress.step = state.make(BETWEEN + 1), BETWEEN + 1
    checkpointer.wait()
    checkpointer.capture(True)
    assert checkpointer.safe["disk"] == BETWEEN + 1 and checkpointer.finished
    checkpointer.close()
    again, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    assert resume(again, "auto") == BETWEEN + 1
    assert state.content["bytes"].equal(state.make(BETWEEN + 1)["bytes"])
    again.close()
