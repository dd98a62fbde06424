"""Numbers as people read them; the console, the page and the comparison all use these."""

from __future__ import annotations

import math
from collections.abc import Sequence


def plain(value: float) -> str:
    """Four significant digits: 2.134, 0.42, 1.2e-05; whole numbers below a million in full."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _scaled(value: float, base: float, suffixes: Sequence[str]) -> str:
    if not math.isfinite(value):
        return plain(value)
    power = 0
    # 999.6 would print as "1e+03": step up as soon as three digits cannot hold it
    while abs(value) >= 999.5 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g}{suffixes[power]}" if abs(value) < 999.5 else f"{value:.0f}{suffixes[power]}"


def count(value: float) -> str:
    """Three digits and a suffix: 14.2k, 1.1M, 3B."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def size(nbytes: float) -> str:
    """Bytes in decimal units: 2.1 MB."""
    return _scaled(nbytes, 1000, (" B", " kB", " MB", " GB", " TB", " PB"))


def percent(share: float) -> str:
    """A share of one: 0.312 is 31%, 0.003 is 0.3%."""
    if not math.isfinite(share):
        return plain(share)
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def rate(value: float) -> str:
    """A learning rate: 9.8e-4."""
    if not math.isfinite(value) or value == 0:
        return plain(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """m:ss or h:mm:ss; below ten seconds with one digit more."""
    if not math.isfinite(seconds):
        return plain(seconds)
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
