"""Faults in the code under test, which a rank plants before it trains: that the judge of "everything at once" sees."""

import os

from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.tiers.file_acts import Files, Lock
from shoestring.checkpoint.tiers.keeper import DISK, Keeper


def trust_what_is_read() -> None:
    """Checksums are not looked at."""
    Part.verify = lambda self, start=0, stop=None: None


def acknowledge_early() -> None:
    """A checkpoint is said to be on disk, and never gets there but at the end of the run."""
    persist = Keeper._persist

    def say_only(self, slot, record):
        if record.notes.get("last"):
            persist(self, slot, record)
        self.standing.safe[DISK] = record.checkpoint.step

    Keeper._persist = say_only


def lock_nobody_out() -> None:
    """Locks are files that everybody has."""

    def lock(self, path, says, wait=None):
        with path.open("a+b") as file:
            return Lock(path, os.dup(file.fileno()))

    Files.lock = lock
