"""Numbers with units as people read them; test_page_numbers.py holds the pages' scripts to the table."""

import math

import pytest

from shoestring import figures

TABLE = {
    "plain": [(2.13449, "2.134"), (400.0, "400"), (123_456.0, "123,456"), (math.nan, "NaN"), (-math.inf, "-∞")],
    "count": [(0, "0"), (7, "7"), (999.4, "999"), (999.6, "1k"), (14_230, "14.2k"), (3e9, "3B"), (2.5e15, "2,500T")],
    "memory": [
        (12, "12 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1000 * 1024, "1,000 KiB"),
        (1023.6 * 1024, "1 MiB"),
        (24 << 20, "24 MiB"),
        (2_254_857_830, "2.1 GiB"),
        (80 << 30, "80 GiB"),
        (-5 << 20, "-5 MiB"),
    ],
    "size": [
        (0, "0 B"),
        (12, "12 B"),
        (999.6, "1 kB"),
        (2.1e6, "2.1 MB"),
        (4.2e9, "4.2 GB"),
        (999_600, "1 MB"),
        (-3e6, "-3 MB"),
    ],
    "percent": [
        (0.003, "0.3%"),
        (0.0994, "9.9%"),
        (0.0996, "10%"),
        (0.312, "31%"),
        (1.0, "100%"),
        (0.0, "0%"),
        (0.05, "5%"),
        (-0.02, "-2%"),
    ],
    "seconds": [
        (0, "0 s"),
        (870e-9, "870 ns"),
        (12.34e-6, "12.3 µs"),
        (999.6e-6, "1 ms"),
        (0.0042, "4.2 ms"),
        (0.9996, "1 s"),
        (1.534, "1.53 s"),
        (312.0, "312 s"),
        (12_345.0, "12,345 s"),
        (-0.0042, "-4.2 ms"),
    ],
    "rate": [(9.8e-4, "9.8e-4"), (0.0, "0"), (0.1, "1.0e-1")],
    "duration": [(0.61, "0.6 s"), (42, "0:42"), (130, "2:10"), (3723, "1:02:03")],
}


@pytest.mark.parametrize(("name", "value", "text"), [(name, *row) for name, rows in TABLE.items() for row in rows])
def test_a_number_as_people_read_it(name, value, text):
    assert getattr(figures, name)(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("memory", 3 << 20, "+3 MiB"), ("size", 3e6, "+3 MB"), ("seconds", 0.0042, "+4.2 ms"), ("seconds", -1, "-1 s")],
)
def test_a_change_has_a_sign(name, value, text):
    assert getattr(figures, name)(value, sign=True) == text


def test_a_time_that_is_counted_in_nanoseconds():
    assert figures.nanoseconds(4.2e6) == figures.seconds(0.0042) == "4.2 ms"


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_printed_too(name, value):
    assert "1" not in getattr(figures, name)(value)
