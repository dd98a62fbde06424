"""Optimizers, gradient clipping and learning-rate schedules."""

from __future__ import annotations

from shoestring.optim.settings.adascale import AdaScale
from shoestring.optim.settings.around_step import Clip, Schedule
from shoestring.optim.settings.averaging import EMA, LAWA, ScheduleFree
from shoestring.optim.settings.eight_bit import AdamW8bit
from shoestring.optim.settings.groups import Group
from shoestring.optim.settings.layerwise import LAMB, LARS
from shoestring.optim.settings.muon import Muon
from shoestring.optim.settings.standard import SGD, AdamW

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "LAWA",
    "SGD",
    "AdaScale",
    "AdamW",
    "AdamW8bit",
    "Clip",
    "Group",
    "Muon",
    "Schedule",
    "ScheduleFree",
]
