"""Power loss: the acts of checkpoints to disk, and every state of the disk that a crash between two of them can leave.

The model is weaker than the file systems in use: what is written to a file is safe once the file is synced, and an
entry of a folder once the folder is; until then each of them may or may not have happened, a write page by page.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.disk import MANIFEST, checked, manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.errors import CheckpointError
from shoestring.core.kept import Progress
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import BETWEEN, PAGE, KnownState, build_checkpointer
from tests.rigs.checkpointing.trainee import kind_of

SUBSETS = 64
SAVES = 4  # of a story
COMMITTED = "committed"

Tree = dict[str, bytes | None]
"""The files of a folder by their paths; folders are None."""


@dataclass(frozen=True)
class Act:
    """One act on the disk, as it was recorded; paths are relative to the folder that is watched."""

    at: float
    name: str
    path: str
    target: str = ""
    data: bytes = b""
    start: int = 0

    @property
    def point(self) -> str:
        """Its name, as for kills."""
        return f"{self.name}: {kind_of(Path(self.path))}"


class RecordingFiles(Files):
    """Notes every act below a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.acts = root, list[Act]()

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        if not path.is_relative_to(self.root):
            return
        target = str(data.relative_to(self.root)) if isinstance(data, Path) else ""
        content = b"" if isinstance(data, Path) else bytes(data)
        self.acts.append(Act(time.monotonic(), act, str(path.relative_to(self.root)), target, content, at))


@dataclass(frozen=True)
class DiskHistory:
    """Checkpoints that happened: the acts of all ranks in their order, and the files of each step's checkpoint."""

    acts: Sequence[Act]
    files: Mapping[int, Mapping[str, bytes]]


# -- recording --------------------------------------------------------------------------------------------------------


def told(folder: str, ranks: int, saves: int) -> dict[str, Any]:
    """A scenario: save, and tell what was done to the disk."""
    root, rank = Path(folder) / "disk", dist.get_rank() if ranks > 1 else 0
    recorder = RecordingFiles(root)
    checkpointer, state, progress = build_checkpointer(root, rank, ranks, recorder)
    files = {}
    for step in range(1, saves * BETWEEN + 1):
        state.content, progress.step = state.make(step), step
        checkpointer.wait()
        checkpointer.capture(False)
        checkpointer.drain()
        if checkpointer.safe["disk"] == step:
            recorder.acts.append(Act(time.monotonic(), COMMITTED, str(step)))
            final = next((root / "run" / "saves").glob(f"step-{step:08d}-*"))
            files[str(step)] = {path.name: path.read_bytes().hex() for path in final.iterdir()}
        checkpointer.group.all_gather(None)
    checkpointer.close()
    return {"acts": [[a.at, a.name, a.path, a.target, a.data.hex(), a.start] for a in recorder.acts], "files": files}


def recorded(folder: Path, ranks: int, saves: int = SAVES) -> DiskHistory:
    """The story of some checkpoints of so many ranks."""
    (folder / "disk").mkdir(parents=True)
    if ranks == 1:
        every = [told(str(folder), ranks, saves)]
    else:
        with Pool(ranks) as pool:
            every = pool.call(told, folder=str(folder), ranks=ranks, saves=saves)
    acts = [
        Act(at, name, path, target, bytes.fromhex(data), start)
        for each in every
        for at, name, path, target, data, start in each["acts"]
    ]
    files = {int(step): {n: bytes.fromhex(d) for n, d in f.items()} for step, f in every[0]["files"].items()}
    return DiskHistory(sorted(acts, key=lambda act: act.at), files)


# -- what a disk makes of it ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What an act does to a file (its content) or a folder (an entry of it), and until which act it is not safe."""

    act: int
    node: int
    kind: str
    """"link" (name, child), "move" (name to target), "unlink" (name), "size" (start), "put" (data at start)."""
    name: str = ""
    target: str = ""
    child: int = 0
    start: int = 0
    data: bytes = b""


@dataclass
class Model:
    """The files and folders that acts lead to, as nodes; 0 is the root."""

    effects: list[Effect] = field(default_factory=list)
    safe_at: list[float] = field(default_factory=list)
    """Of each effect: the number of the act that made it safe."""
    live: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    count: int = 1

    @classmethod
    def of(cls, acts: Iterable[Act]) -> Model:
        model = cls()
        for number, act in enumerate(acts):
            model._do(number, act)
        return model

    def _do(self, number: int, act: Act) -> None:
        path = Path(act.path)
        match act.name:
            case "folder":
                self._folder(number, path)
            case "create":
                self._link(number, path, {})
            case "reserve":
                self._add(Effect(number, self._there(path), "size", start=act.start))
            case "write":
                self._add(Effect(number, self._there(path), "put", start=act.start, data=act.data))
            case "rename":
                self._rename(number, path, Path(act.target))
            case "unlink" if self._node(path) is not None:
                self._unlink(number, path)
            case "remove" if self._node(path) is not None:
                self._remove(number, path)
            case "sync" | "sync folder":
                self._sync(number, self._node(path))

    def _node(self, path: Path) -> int | None:
        node: int | None = 0
        for name in path.parts:
            node = self.live.get(node, {}).get(name) if node is not None else None
        return node

    def _there(self, path: Path) -> int:
        node = self._node(path)
        assert node is not None, f"{path} is not there"
        return node

    def _add(self, effect: Effect) -> None:
        self.effects.append(effect)
        self.safe_at.append(float("inf"))

    def _link(self, number: int, path: Path, entries: dict[str, int]) -> None:
        assert self._node(path) is None, f"{path} is written over"
        parent, child = self._there(path.parent), self.count
        self.count += 1
        self.live[parent][path.name] = child
        self.live[child] = entries
        self._add(Effect(number, parent, "link", path.name, child=child))

    def _folder(self, number: int, path: Path) -> None:
        for each in reversed([path, *path.parents]):
            if self._node(each) is None:
                self._link(number, each, {})

    def _rename(self, number: int, path: Path, target: Path) -> None:
        assert path.parent == target.parent
        parent, child = self._there(path.parent), self._there(path)
        self.live[parent][target.name] = self.live[parent].pop(path.name)
        self._add(Effect(number, parent, "move", path.name, target.name, child))

    def _unlink(self, number: int, path: Path) -> None:
        parent = self._there(path.parent)
        del self.live[parent][path.name]
        self._add(Effect(number, parent, "unlink", path.name))

    def _remove(self, number: int, path: Path) -> None:
        for name in list(self.live[self._there(path)]):
            self._remove(number, path / name)
        self._unlink(number, path)

    def _sync(self, number: int, node: int | None) -> None:
        for index, effect in enumerate(self.effects):
            if effect.node == node:
                self.safe_at[index] = min(self.safe_at[index], number)

    def split(self, done: int) -> tuple[list[int], list[int]]:
        """Of the effects of the first `done` acts, those that are safe, and those that are not."""
        there = [index for index, effect in enumerate(self.effects) if effect.act < done]
        return [i for i in there if self.safe_at[i] < done], [i for i in there if self.safe_at[i] >= done]

    def files(self, chosen: Iterable[int], written: Callable[[int], bool] = lambda index: True) -> Tree:
        """The files that there are if these effects are what happened.

        Args:
            written: whether the next page was written, of the write that is effect number `index`.
        """
        entries: dict[int, dict[str, int]] = {0: {}}
        data: dict[int, bytearray] = {}
        for index in sorted(chosen):
            effect = self.effects[index]
            if effect.kind in ("put", "size"):
                _put(data.setdefault(effect.node, bytearray()), effect, partial(written, index))
                continue
            names = entries.setdefault(effect.node, {})
            names.pop(effect.name, None)
            if effect.kind != "unlink":
                names[effect.target or effect.name] = effect.child
        folders = {effect.node for effect in self.effects if effect.kind in ("link", "move", "unlink")}
        return dict(_walk(0, "", entries, data, folders))


def _put(content: bytearray, effect: Effect, written: Callable[[], bool]) -> None:
    if effect.kind == "size":
        content.extend(bytes(max(0, effect.start - len(content))))
    for at in range(0, len(effect.data), PAGE):
        if written():
            piece, start = effect.data[at : at + PAGE], effect.start + at
            content.extend(bytes(max(0, start + len(piece) - len(content))))
            content[start : start + len(piece)] = piece


def _walk(
    node: int, path: str, entries: Mapping[int, Mapping[str, int]], data: Mapping[int, bytearray], folders: set[int]
) -> Iterator[tuple[str, bytes | None]]:
    for name, child in entries.get(node, {}).items():
        if child in folders:
            yield f"{path}{name}", None
            yield from _walk(child, f"{path}{name}/", entries, data, folders)
        else:
            yield f"{path}{name}", bytes(data.get(child, b""))


def crashes(model: Model, done: int, subsets: int) -> Iterator[Tree]:
    """The states in which a crash after the first `done` acts may leave the disk."""
    safe, loose = model.split(done)
    yield model.files(safe)
    yield model.files([*safe, *loose])
    for index in loose:
        yield model.files([*safe, index])
    for seed in range(subsets if loose else 0):
        draw = random.Random(f"{done} {seed}")
        share = draw.choice([0.2, 0.5, 0.8])
        whole = {*safe, *(loose if seed % 2 else ())}  # every other time the writes are torn
        chosen = [index for index in loose if draw.random() < share]
        yield model.files([*safe, *chosen], partial(_drawn, draw, whole))


def _drawn(draw: random.Random, whole: set[int], index: int) -> bool:
    return index in whole or draw.random() < 0.5


# -- checking ---------------------------------------------------------------------------------------------------------


def replayed(story: DiskHistory, folder: Path, subsets: int = SUBSETS, restore: bool = False) -> Iterator[list[str]]:
    """Of each different state that a crash could leave, what is wrong with it, one line each.

    Args:
        folder: where the states are put.
        restore: whether one rank restores each of them, besides what is found in it being compared.
    """
    model, seen = Model.of(story.acts), set[tuple[Any, int]]()
    restorer = build_checkpointer(folder / "disk", 0, 1, Files()) if restore else None
    for done in range(len(story.acts) + 1):
        committed = max((int(act.path) for act in story.acts[:done] if act.name == COMMITTED), default=0)
        for state in crashes(model, done, subsets):
            key = frozenset(state.items()), committed
            if key not in seen:
                seen.add(key)
                put(folder / "disk", state)
                where = f"after {done} acts, the last {story.acts[done - 1].point if done else 'none'}"
                yield [f"{where}: {each}" for each in judged(story, folder / "disk", committed, restorer)]
    if restorer:
        restorer[0].close()


def put(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Make a folder of these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, data in files.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def judged(
    story: DiskHistory, disk: Path, committed: int, restorer: tuple[Checkpointer, KnownState, Progress] | None
) -> Iterator[str]:
    """What is wrong with a disk, if `committed` is the newest step whose checkpoint was said to be safe."""
    saves, newest = disk / "run" / "saves", 0
    for path, record in manifests(saves):
        step = record.checkpoint.step
        try:
            checked(path, record)
        except CheckpointError as error:
            yield f"step {step} is under its final name, but: {error}"
            continue
        there = {each.name: each.read_bytes() for each in path.iterdir()}
        if there != story.files.get(step):
            yield f"step {step} verifies, and is not what was saved"
        newest = max(newest, step)
    for path in saves.glob("step-*"):
        if (path / MANIFEST).exists() and not any(path == each for each, _ in manifests(saves)):
            yield f"`{path.name}` has a damaged manifest"
    if newest < committed:
        yield f"step {committed} was safe, found was {newest or 'nothing'}"
    if restorer:
        yield from _restored(*restorer, newest)


def _restored(checkpointer: Checkpointer, state: KnownState, progress: Progress, newest: int) -> Iterator[str]:
    state.content, progress.step = state.make(0), 0
    step = resume(checkpointer, "auto") or 0
    good = {
        name: torch.equal(value, state.content[name]) for name, value in state.make(step).items() if name == "bytes"
    }
    if step != newest or progress.step != step or not all(good.values()):
        yield f"step {newest} was found, and step {step} restored, with {good}"
