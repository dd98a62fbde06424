"""Formats numbers with units for people, in the console, in the output of all commands, and in reports.

- Memory of tensors, processes and devices is shown in binary units (KiB, MiB, GiB), as torch and the system show it.
- Stored or sent data, such as files, checkpoints and messages, is shown in decimal units (kB, MB, GB), as on the labels
  of disks and networks.
- Times have three digits and the unit that fits: 4.2 ms, 1.53 s. The duration of a run and the time left have the form
  1:02:03.
- Fractions are shown in percent, as whole numbers, or with one decimal below 10%.

`report/web/elements.js` has the same functions in JavaScript, for the scripts of reports; one test covers both files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def plain(value: float) -> str:
    """Format a number with four significant digits: 2.134, 0.42, 1.2e-05; whole numbers below a million in full."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _scaled(value: float, base: float, suffixes: Sequence[str], *, sign: bool = False) -> str:
    """Format a number with three significant digits and the first suffix that makes it less than `base`.

    Numbers from 1,000 to 1,023, which occur with binary units, keep their four digits.
    """
    if not math.isfinite(value):
        return plain(value) + suffixes[0]
    power = 0
    # Three digits cannot show 999.6 ("1e+03"), so the next suffix is taken from 999.5 on.
    while abs(value) >= base - 0.5 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    plus = "+" if sign else ""
    return f"{value:{plus}.3g}{suffixes[power]}" if abs(value) < 999.5 else f"{value:{plus},.0f}{suffixes[power]}"


def count(value: float) -> str:
    """Format a count with three digits and a suffix: 14.2k, 1.1M, 3B."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def memory(nbytes: float, *, sign: bool = False) -> str:
    """Format bytes of memory, in binary units: 2.1 GiB."""
    return _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"), sign=sign)


def size(nbytes: float, *, sign: bool = False) -> str:
    """Format bytes that are stored or sent, in decimal units: 2.1 MB."""
    return _scaled(nbytes, 1000, (" B", " kB", " MB", " GB", " TB", " PB"), sign=sign)


def percent(share: float) -> str:
    """Format a fraction in percent: 0.312 is 31%, 0.003 is 0.3%."""
    if not math.isfinite(share):
        return plain(share)
    return f"{share:.1%}".replace(".0%", "%") if abs(share) < 0.0995 else f"{share:.0%}"


def rate(value: float) -> str:
    """Format a learning rate with two digits: 9.8e-4."""
    if not math.isfinite(value) or value == 0:
        return plain(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def seconds(value: float, *, sign: bool = False) -> str:
    """Format a time with three digits and the unit that fits: 870 ns, 4.2 ms, 1.53 s; whole seconds from 1,000 s on."""
    if not math.isfinite(value):
        return f"{plain(value)} s"
    plus = "+" if sign else ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= 0.9995 * scale:  # 0.9996 ms would print as "1e+03 µs"
            scaled = value / scale
            return f"{scaled:{plus}.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:{plus},.0f} {unit}"
    return f"{1e9 * value:{plus}.0f} ns" if value else "0 s"


def nanoseconds(value: float, *, sign: bool = False) -> str:
    """Format a number of nanoseconds as `seconds` does."""
    return seconds(value / 1e9, sign=sign)


def duration(value: float) -> str:
    """Format a duration in seconds as a clock: m:ss or h:mm:ss; below ten seconds as seconds with one decimal."""
    if not math.isfinite(value):
        return plain(value)
    if abs(value) < 10:
        return f"{value:.1f} s"
    minutes, second = divmod(round(value), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
