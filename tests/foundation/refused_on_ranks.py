"""Runs that are refused, in the processes of a pool."""

import os

from shoestring.core.errors import ShoestringError
from shoestring.core.world import World
from shoestring.run import load
from shoestring.training.loop import train


def train_each(folder, source, cases):
    """What training says of a run file with each of these flags."""
    os.chdir(folder)
    said = []
    for flags in cases:
        try:
            train(load(source, flags), World.current())
            said.append(None)
        except ShoestringError as error:
            said.append(error.parts())
    return said
