"""Recipes trained at toy size, and photos of the forms in which people have them."""

from pathlib import Path

import numpy as np
from PIL import Image

from shoestring.cli import main

MODULES = str(Path(__file__).parents[1] / "clients" / "node_modules")
"""What npm has installed for the tests, the data of the recipe `reply` among it."""


def train_toy(folders, recipe, *arguments):
    """The folder of a short run of a recipe."""
    folder = folders.mktemp(recipe) / "run"
    assert main(["train", recipe, *arguments, "--folder", str(folder)]) == 0
    return folder


def save_photos(folder, coloured):
    """A picture (height, width, 3) as PNG of 8 and 16 bits, as CMYK, from a turned camera, and broken off."""
    folder.mkdir()
    grey = np.asarray(Image.fromarray(coloured).convert("L"))
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(coloured).convert("CMYK").save(folder / "print.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(np.rot90(coloured, -1).copy()).save(folder / "turned.jpg", exif=exif, quality=95)
    (folder / "broken.jpg").write_bytes((folder / "print.jpg").read_bytes()[:300])
