"""Sinks as a user would write them, named in a run file by `tests.report.own_sinks:…`."""

import json


class Rows:
    """Appends each row to a file; what a user's own sink looks like."""

    def __init__(self, folder, name, settings):
        self.path = folder / "own.txt"
        self.path.write_text(f"{name} {settings['run']['steps']}\n")

    def write(self, step, values):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self):
        with self.path.open("a") as file:
            file.write("closed\n")


class Breaks(Rows):
    """Fails at the third step."""

    def write(self, step, values):
        if step == 3:
            raise ConnectionError("the server is gone")
        super().write(step, values)


def refuses(folder, name, settings):
    raise PermissionError("no key")


def nothing(folder, name, settings):
    return object()
