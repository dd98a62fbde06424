"""Reads and writes tasks and labels as CSV, and as JSON in Label Studio's format.

Label Studio documents its format on the pages "Label Studio JSON format of annotated tasks" and "Import tasks". A file
is a list of tasks with `data` and `annotations`; the `result` of an annotation is a list of regions. A choice is a
region whose `type` is `choices` and whose `value.choices` is a list of texts. `completed_by` is the number of a user,
or an object with the user's `email`. Here a rater named `user 7` is user 7 of Label Studio; any other name is treated
as an email address.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

import numpy as np

from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring_recipes.annotation.raters import Labels

if TYPE_CHECKING:  # training imports this module without a database
    from shoestring_recipes.annotation.store import AnnotationStore

LARGEST = 512 << 20
"""Maximum size of a file in bytes."""
TASK_COLUMNS = ("task", "url", "title", "text")
LABEL_COLUMNS = ("task", "url", "rater", "label", "seconds", "made")
_USER = re.compile(r"user (\d{1,18})")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell as a formula, which texts from the web must not be."""


# -- CSV ---------------------------------------------------------------------------------------------------------------


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    """Write a table, and return the number of its rows. Texts that begin like a formula get a leading apostrophe."""
    text, written = io.StringIO(newline=""), 0
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])
        written += 1
    _write(path, text.getvalue())
    return written


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}", hint="name another file") from error


def read_csv(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table with their line numbers.

    Raises:
        DataError: the file cannot be read, is no CSV, or lacks a column.
    """
    try:
        content = foreign.read_text(path, LARGEST)
    except (OSError, ValueError) as error:
        raise DataError(f"`{path}` cannot be read: {error}") from error
    csv.field_size_limit(foreign.LINE_LIMIT)
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"`{path}` has no column `{missing[0]}`", hint=f"its columns: {reader.fieldnames}")
        for row in reader:
            cells = {name: value for name, value in row.items() if isinstance(name, str) and isinstance(value, str)}
            yield reader.line_num, dict.fromkeys(needed, "") | cells
    except csv.Error as error:
        raise DataError(f"`{path}` is no CSV at line {reader.line_num}: {error}") from error


def write_tasks_csv(store: AnnotationStore, project: Any, path: Path) -> int:
    """Write the tasks of a project as CSV, and return their number."""
    return write_csv(path, TASK_COLUMNS, ((row.task, row.url, row.title, row.text) for row in store.tasks(project)))


def write_labels_csv(store: AnnotationStore, project: Any, path: Path) -> int:
    """Write the labels of a project as CSV, and return their number; the label of a skipped task is empty."""
    rows = (
        (row.task, row.url, row.name, "" if row.choice is None else project.choices[row.choice], row.seconds, row.made)
        for row in store.labels(project)
    )
    return write_csv(path, LABEL_COLUMNS, rows)


def read_items_csv(store: AnnotationStore, path: Path) -> int:
    """Add items from a table with the columns `url`, `title` and `text`, and return how many are new.

    Raises:
        DataError: as for `read_csv`, or a row has no address or no text.
    """
    rows = list(read_csv(path, ("url", "title", "text")))
    for line, row in rows:
        if not row["url"].strip() or not row["text"].strip():
            raise DataError(f"`{path}`, line {line}: a row needs an address and a text")
    source = f"file {path.name}"[:100]
    with store.writing() as connection:
        return sum(store.add_item(source, row["url"], row["title"], row["text"], connection) for _, row in rows)


def read_labels_csv(store: AnnotationStore, project: Any, path: Path, *, add_raters: bool = False) -> int:
    """Add labels from a table with the columns `url`, `rater` and `label`, and return their number.

    Args:
        add_raters: whether to add raters whom the store does not know; otherwise an unknown rater is an error.

    Raises:
        DataError: as for `read_csv`, or a task, rater or label is unknown, or a label differs from the stored one.
    """
    rows = [
        (f"`{path}`, line {line}", row["url"], "", row["rater"], row["label"] or None, row.get("seconds", ""))
        for line, row in read_csv(path, ("url", "rater", "label"))
    ]
    return _add_labels(store, project, rows, add_raters)


def _add_labels(
    store: AnnotationStore, project: Any, rows: Sequence[tuple[str, str, str, str, str | None, Any]], add_raters: bool
) -> int:
    """Check all labels, then store them. A row holds the place in the file, the address of the task's item, the number
    of the task (used if the address is empty), the rater, the label (None for a skipped task) and the seconds."""
    by_url = {row.url: row.task for row in store.tasks(project)}
    people, checked = store.raters(), []
    for place, url, number, rater, label, seconds in rows:
        task = by_url.get(url) if url else int(number) if number.isdecimal() else None
        if task is None:
            raise DataError(f"{place}: the project `{project.name}` has no task `{foreign.one_line(url or number)}`")
        if not rater:
            raise DataError(f"{place}: a label has no rater")
        if rater not in people and not add_raters:
            hint = f"{nearest(rater, people) if people else 'add the rater'}; or let the import add raters"
            raise DataError(f"{place}: there is no rater `{foreign.one_line(rater)}`", hint=hint)
        if label is not None and label not in project.choices:
            message = f"{place}: the project `{project.name}` has no choice `{foreign.one_line(label)}`"
            raise DataError(message, hint=nearest(label, project.choices))
        try:
            checked.append((task, rater, label, float(seconds or 0)))
        except (TypeError, ValueError) as error:
            raise DataError(f"{place}: `{foreign.one_line(str(seconds))}` are no seconds") from error
    for rater in dict.fromkeys(row[1] for row in checked):
        if rater not in people:
            store.add_rater(rater)
    people = store.raters()
    for task, rater, label, seconds in checked:
        choice = None if label is None else project.choices.index(label)
        store.add_label(project, task, people[rater], choice, seconds, replace=False)
    return len(checked)


# -- Label Studio ------------------------------------------------------------------------------------------------------


def labeling_config(project: Any) -> str:
    """Return the labeling configuration with which Label Studio shows the tasks of a project."""
    choices = "\n".join(f"    <Choice value={quoteattr(choice)}/>" for choice in project.choices)
    return (
        f"<View>\n  <Header value={quoteattr(project.question)}/>\n"
        '  <Text name="text" value="$text"/>\n  <Choices name="label" toName="text" choice="single" required="true">\n'
        f"{choices}\n  </Choices>\n</View>\n"
    )


def write_label_studio(store: AnnotationStore, project: Any, path: Path) -> int:
    """Write the tasks of a project with their labels in Label Studio's format, and return the number of tasks."""
    annotations: dict[int, list[dict[str, Any]]] = {}
    for row in store.labels(project):
        user = _USER.fullmatch(row.name)
        region = {"id": f"label_{row.rater}", "from_name": "label", "to_name": "text", "type": "choices"}
        chosen = [] if row.choice is None else [{**region, "value": {"choices": [project.choices[row.choice]]}}]
        annotation = {
            "result": chosen,
            "was_cancelled": row.choice is None,
            "ground_truth": False,
            "created_at": f"{row.made.isoformat()}Z",
            "lead_time": row.seconds,
            "completed_by": int(user[1]) if user else {"email": row.name},
        }
        annotations.setdefault(row.task, []).append(annotation)
    tasks = [
        {
            "id": row.task,
            "data": {"text": row.text, "title": row.title, "url": row.url},
            "annotations": annotations.get(row.task, []),
        }
        for row in store.tasks(project)
    ]
    _write(path, json.dumps(tasks, ensure_ascii=False, indent=1))
    return len(tasks)


def read_label_studio(store: AnnotationStore, project: Any, path: Path, *, add_raters: bool = False) -> int:
    """Add labels from a JSON export of Label Studio, and return their number. A task is identified by `data.url`, or by
    its `id` if it has no URL.

    Raises:
        DataError: the file is not such an export, or as for `read_labels_csv`.
    """
    try:
        tasks = foreign.read_json(path, LARGEST)
    except (OSError, ValueError) as error:
        raise DataError(f"`{path}` cannot be read: {error}") from error
    if not isinstance(tasks, list):
        raise DataError(f"`{path}` is no list of tasks", hint="export from Label Studio as JSON, not as JSON-MIN")
    rows = []
    for number, task in enumerate(tasks, 1):
        place = f"`{path}`, task {number}"
        if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
            raise DataError(f"{place} has no `data`", hint="export from Label Studio as JSON, not as JSON-MIN")
        url, identity = task["data"].get("url"), task.get("id")
        for annotation in _objects(task.get("annotations"), f"{place}: `annotations`"):
            label = None if annotation.get("was_cancelled") else _choice(annotation, place)
            rater = _user(annotation.get("completed_by"), place)
            seconds = annotation.get("lead_time")
            rows.append((place, url if isinstance(url, str) else "", str(identity), rater, label, seconds))
    return _add_labels(store, project, rows, add_raters)


def _objects(value: Any, place: str) -> list[dict[str, Any]]:
    """Check that a value is a list of objects, and return it; an empty list for None."""
    values = [] if value is None else value
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise DataError(f"{place} is no list of objects")
    return values


def _choice(annotation: dict[str, Any], place: str) -> str:
    """Return the choice of an annotation, which must have exactly one."""
    regions = [one for one in _objects(annotation.get("result"), f"{place}: `result`") if one.get("type") == "choices"]
    values = [value.get("choices") for region in regions if isinstance(value := region.get("value"), dict)]
    if len(values) != 1 or not isinstance(values[0], list) or len(values[0]) != 1 or not isinstance(values[0][0], str):
        raise DataError(f"{place}: an annotation has not exactly one choice")
    return values[0][0]


def _user(value: Any, place: str) -> str:
    """Return the rater's name for a value of `completed_by`: an email address, or `user` and a number."""
    if isinstance(value, dict) and isinstance(value.get("email"), str):
        return value["email"]
    number = value.get("id") if isinstance(value, dict) else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError(f"{place}: `completed_by` is neither a number nor an object with `email`")
    return f"user {number}"


# -- arrays ------------------------------------------------------------------------------------------------------------


def labels_of(rows: Iterable[tuple[str, str, str]], choices: Sequence[str]) -> tuple[Labels, list[str], list[str]]:
    """Build labels from rows that hold an item's address, a rater's name and a choice.

    Returns:
        The labels, the addresses of the items, and the names of the raters; both lists are indexed by number.
    """
    items: dict[str, int] = {}
    people: dict[str, int] = {}
    numbers = {choice: number for number, choice in enumerate(choices)}
    cells = [
        (items.setdefault(url, len(items)), people.setdefault(rater, len(people)), numbers[choice])
        for url, rater, choice in rows
    ]
    item, rater, label = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    labels = Labels(item, rater, label, len(items), len(people), len(choices))
    return labels, list(items), list(people)
