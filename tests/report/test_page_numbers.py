"""The scripts of pages print numbers as figures.py does."""

import json

from shoestring.report.document import packaged
from tests.browser import Browser, needs_chromium
from tests.report.test_figures import TABLE

SHARED = ("count", "memory", "size", "percent", "seconds", "duration")


@needs_chromium
def test_pages_print_numbers_as_the_console_does():
    rows = [(name, value, text) for name in SHARED for value, text in TABLE[name]]
    functions = f"({{{', '.join(SHARED)}}})"
    call = f"({json.dumps(rows)}).map(([name, value]) => {functions}[name](value))"
    with Browser() as browser:
        printed = browser.value(f"{packaged('shoestring.report', 'elements.js')}\n{call}")
    assert printed == [text for *_, text in rows]
