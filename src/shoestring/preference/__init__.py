"""Preference optimization: training on which of two answers is better (DPO, SimPO, ORPO), or on ratings (KTO)."""

from shoestring.preference.settings import DPO, KTO, ORPO, SimPO

__all__ = ["DPO", "KTO", "ORPO", "SimPO"]
