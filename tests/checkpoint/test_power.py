"""Every state that a power loss during some checkpoints could leave a disk in."""

import logging
from dataclasses import replace

import pytest

from tests.rigs.checkpointing.known import PAGE
from tests.rigs.checkpointing.power_loss import Act, DiskHistory, Model, crashes, recorded, replayed

SAVES, SUBSETS = 3, 8


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    logging.getLogger("shoestring").setLevel(logging.CRITICAL)
    yield recorded(tmp_path_factory.mktemp("power") / "story", 1, SAVES)
    logging.getLogger("shoestring").setLevel(logging.NOTSET)


def test_a_checkpoint_that_was_committed_survives_power_loss(story, tmp_path):
    found = list(replayed(story, tmp_path, SUBSETS, restore=True))
    assert [line for lines in found for line in lines] == [] and len(found) > 150


@pytest.mark.parametrize(
    ("point", "where"),
    [
        ("sync: private part", ""),
        ("sync: new manifest", ""),
        ("sync folder: folder aside", ""),
        ("sync folder: saves", "run/saves"),
        ("sync folder: saves", "run"),
        ("sync folder: saves", "."),
    ],
)
def test_no_sync_is_needless(story, tmp_path, point, where):
    without = [act for act in story.acts if act.point != point or (where and act.path != where)]
    assert len(without) < len(story.acts)
    assert any(replayed(replace(story, acts=without), tmp_path, SUBSETS))


def test_a_folder_that_is_deleted_before_its_other_name_is_safe_is_found_out(story, tmp_path):
    renamed = [i for i, act in enumerate(story.acts) if act.name == "rename" and act.path.startswith("run/saves/step-")]
    assert [story.acts[i + 1].point for i in renamed] == ["sync folder: saves"] * (SAVES - 1)
    acts = [act for i, act in enumerate(story.acts) if i - 1 not in renamed]
    assert any(replayed(replace(story, acts=acts), tmp_path, SUBSETS))


def test_a_folder_that_gets_its_name_before_its_manifest_is_found_out(story, tmp_path):
    acts = list(story.acts)
    first = next(i for i, act in enumerate(acts) if act.point == "create: new manifest")
    named = next(i for i, act in enumerate(acts) if act.point == "rename: folder aside")
    aside, final = acts[named].path, acts[named].target
    later = [
        replace(a, path=a.path.replace(aside, final), target=a.target.replace(aside, final)) for a in acts[first:named]
    ]
    early = [act for act in later if act.name not in ("sync", "sync folder")]
    planted = DiskHistory([*acts[:first], acts[named], *early, *acts[named + 1 :]], story.files)
    assert any(replayed(planted, tmp_path, SUBSETS))


def test_what_a_crash_may_leave_of_a_write():
    """One page, the other, both or none of them, in a file that may be missing, or of its full length already."""
    acts = [
        Act(0, "create", "file"),
        Act(1, "reserve", "file", start=2 * PAGE),
        Act(2, "write", "file", data=b"a" * PAGE + b"b" * PAGE),
        Act(3, "sync folder", "."),
    ]
    after = [[files.get("file") for files in crashes(Model.of(acts), done, 512)] for done in range(5)]
    assert after[0] == [None, None] and set(after[1]) == {None, b""}
    zeros, whole = bytes(2 * PAGE), b"a" * PAGE + b"b" * PAGE
    assert set(after[2]) == {None, b"", zeros}
    torn = {b"", zeros, whole, b"a" * PAGE, b"a" * PAGE + bytes(PAGE), bytes(PAGE) + b"b" * PAGE}
    assert set(after[3]) == torn | {None} and set(after[4]) == torn
    synced = Model.of([*acts, Act(4, "sync", "file")])
    assert [files["file"] for files in crashes(synced, 5, 64)] == [whole, whole]
