"""Tools that prepare training data: crawl pages, make tasks, label them, exchange labels, and review raters.

python -m shoestring_recipes.annotation STORE ACTION …

STORE is an SQLite file, or the address of a database. `ACTION --help` lists the arguments of an action.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import DataError, ShoestringError
from shoestring_recipes.annotation import agreement, exchange, raters
from shoestring_recipes.annotation.store import AnnotationStore, open_store
from shoestring_recipes.annotation.tables import FAILED


def crawl(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Crawl the site of an address into the store, or continue an interrupted crawl."""
    from shoestring_recipes.annotation import crawl as crawling

    names = [field.name for field in dataclasses.fields(crawling.CrawlSettings)]
    settings = crawling.CrawlSettings(**_chosen(options, names))
    if options.again:
        store.retry_failed(crawling.site_of(options.url), FAILED)
    return crawling.crawl(store, options.url, settings)


def read(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Read the records of a paged JSON API into the store, or continue an interrupted reading."""
    from shoestring_recipes.annotation import paged

    names = [field.name for field in dataclasses.fields(paged.PagedInterface)]
    return paged.read_pages(store, paged.PagedInterface(**_chosen(options, names)))


def _chosen(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named options that the command line sets; the others keep the defaults of the settings."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def add(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Add items from a table with the columns url, title and text."""
    return [f"{exchange.read_items_csv(store, options.file)} new items"]


def project(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Add a project if `--choice` names its answers, and make tasks of the store's items."""
    if options.choice:
        store.add_project(options.project, options.question or options.project, options.choice, options.wanted)
    number = store.add_tasks(options.project, source=options.source, limit=options.limit)
    return [f"{number} new tasks in `{options.project}`"]


def rater(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Add a rater, and print the rater's link, which is not shown again."""
    token = store.add_rater(options.name)
    return [f"http://127.0.0.1:{options.port}/#{token}"]


def label(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Serve the labelling page to browsers on this machine until Ctrl-C."""
    from shoestring_recipes.annotation.server import LabelServer

    with LabelServer(store, store.project(options.project), options.port) as server:
        print(f"labels for `{options.project}` at {server.address}; each rater opens a link of `rater`", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return ["ended"]
    return []


def export(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Write tasks or labels as CSV, tasks with labels as JSON for Label Studio, or its labeling configuration."""
    chosen, lines = store.project(options.project), []
    if options.tasks:
        lines.append(f"{exchange.write_tasks_csv(store, chosen, options.tasks)} tasks in {options.tasks}")
    if options.labels:
        lines.append(f"{exchange.write_labels_csv(store, chosen, options.labels)} labels in {options.labels}")
    if options.label_studio:
        number = exchange.write_label_studio(store, chosen, options.label_studio)
        lines += [f"{number} tasks in {options.label_studio}", exchange.labeling_config(chosen).rstrip()]
    return lines or ["nothing to write: name --tasks, --labels or --label-studio"]


def take(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Add labels from a CSV file, or from a JSON export of Label Studio."""
    reading = exchange.read_label_studio if options.file.suffix == ".json" else exchange.read_labels_csv
    number = reading(store, store.project(options.project), options.file, add_raters=options.add_raters)
    return [f"{number} labels"]


def agree(store: AnnotationStore, options: argparse.Namespace) -> list[str]:
    """Report how well raters agree, who disagrees with all others and who copies; can also write soft labels."""
    chosen = store.project(options.project)
    rows = [(row.url, row.name, chosen.choices[row.choice]) for row in store.labels(chosen) if row.choice is not None]
    if not rows:
        raise DataError(f"the project `{options.project}` has no labels yet")
    labels, urls, people = exchange.labels_of(rows, chosen.choices)
    reviewed = raters.review(labels, merge=not options.leave_out)
    if options.soft:
        columns = ("url", "labels", *(f"p({choice})" for choice in chosen.choices))
        numbers = labels.counts.sum(1).tolist()
        cells = zip(urls, numbers, reviewed.consensus.soft.round(6).tolist(), strict=True)
        exchange.write_csv(options.soft, columns, ((url, number, *soft) for url, number, soft in cells))
    return describe(labels, reviewed, people, options.level)


def describe(labels: raters.Labels, reviewed: raters.Review, people: Sequence[str], level: str) -> list[str]:
    """Return lines about the agreement of all raters, about each rater, and about each group of copies."""
    values = np.arange(labels.classes, dtype=np.float64)
    alpha = agreement.alpha(labels.counts, values, level)
    interval = agreement.bootstrap(lambda counts: agreement.alpha(counts, values, level), labels.counts)
    lines = [
        f"{len(labels.item)} labels of {labels.raters} raters for {labels.items} items",
        f"Krippendorff's alpha ({level}): {agreement.described(alpha, interval)}",
        f"consensus: {reviewed.consensus.model}",
    ]
    if len(set(labels.counts.sum(1).tolist())) == 1:
        kappa, spread = agreement.fleiss(labels.counts), agreement.bootstrap(agreement.fleiss, labels.counts)
        lines.append(f"Fleiss' kappa: {agreement.described(kappa, spread)}")
    for judged in reviewed.judgements:
        kappa = agreement.described(judged.kappa, (judged.low, judged.high))
        note = f": {judged.note}" if judged.note else ""
        lines.append(f"{people[judged.rater]}, {judged.labels} labels, kappa with the others {kappa}{note}")
    groups = (", ".join(people[rater] for rater in group) for group in reviewed.groups)
    return [*lines, *(f"copies of each other: {names}" for names in groups)]


ACTIONS: Mapping[str, Callable[[AnnotationStore, argparse.Namespace], list[str]]] = {
    action.__name__: action for action in (crawl, read, add, project, rater, label, export, take, agree)
}


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    whole = argparse.ArgumentParser(prog="python -m shoestring_recipes.annotation", description=__doc__)
    whole.add_argument("store", help="File of the store, or the address of a PostgreSQL database.")
    actions = whole.add_subparsers(dest="action", required=True)
    added = {name: actions.add_parser(name, help=action.__doc__) for name, action in ACTIONS.items()}
    for name in ("project", "label", "export", "take", "agree"):
        added[name].add_argument("project", help="Name of the project.")
    for name in ("rater", "label"):
        added[name].add_argument("--port", type=int, default=8090, help="Port of the page on this machine.")
    new = added["crawl"].add_argument
    new("url", help="Address of the first page.")
    new("--delay", type=float, help="Seconds between requests; 1 by default.")
    new("--parallel", type=int, help="Maximum number of requests at a time; 2 by default.")
    new("--pages", type=int, help="Maximum number of pages in the store; 10,000 by default.")
    new("--depth", type=int, help="Maximum number of links from the first page; 20 by default.")
    new("--retries", type=int, help="Number of repeated requests after a failure; 3 by default.")
    new("--timeout", type=float, help="Seconds after which a request has failed; 30 by default.")
    new("--render", help="Pages that a browser opens: never (default), thin or always.")
    new("--agent", help="Name of the crawler; add an address at which you can be reached.")
    new("--again", action="store_true", help="Request addresses again that have failed before.")
    new = added["read"].add_argument
    new("url", help="Address of the first page of the interface.")
    new("source", help="Name of the source in the store.")
    new("--records", help="Name of the list of records in an answer; items by default.")
    new("--next", help="Name of the next page's address or cursor; next by default.")
    new("--parameter", help="Parameter that takes the cursor; cursor by default.")
    new("--identity", help="Name of a record's identity; id by default.")
    new("--text", help="Name of a record's text; text by default.")
    new("--title", help="Name of a record's title; title by default.")
    new("--token-variable", help="Environment variable with the token.")
    added["add"].add_argument("file", type=Path, help="CSV file with the columns url, title and text.")
    added["rater"].add_argument("name", help="Name of the rater; an email address for Label Studio.")
    new = added["project"].add_argument
    new("--question", help="Question that the page shows.")
    new("--choice", action="append", help="An answer to choose from; repeat it. Without it no project is added.")
    new("--wanted", type=int, default=3, help="Number of raters who are to label each task.")
    new("--source", default="", help="Source whose items become tasks, such as `crawl example.org`; all by default.")
    new("--limit", type=int, default=2**31 - 1, help="Maximum number of items that become tasks.")
    for flag, what in (
        ("--tasks", "CSV file for the tasks."),
        ("--labels", "CSV file for the labels."),
        ("--label-studio", "JSON file for tasks and labels in Label Studio's form."),
    ):
        added["export"].add_argument(flag, type=Path, help=what)
    added["take"].add_argument("file", type=Path, help="CSV file with url, rater and label, or Label Studio's JSON.")
    added["take"].add_argument("--add-raters", action="store_true", help="Add people whom the store does not know.")
    added["agree"].add_argument("--level", choices=agreement.LEVELS, default="nominal", help="Level of measurement.")
    added["agree"].add_argument("--soft", type=Path, help="CSV file for the probabilities of the choices of each item.")
    what = "Leave out whole groups of raters who copy each other, instead of counting one of each."
    added["agree"].add_argument("--leave-out", action="store_true", help=what)
    return whole


def main(arguments: Sequence[str]) -> int:
    """Run an action; returns the exit code."""
    options: Any = parser().parse_args(arguments)
    try:
        store = open_store(options.store if "://" in options.store else f"sqlite:///{options.store}")
        print("\n".join(ACTIONS[options.action](store, options)))
    except ShoestringError as error:
        _, message, hint = error.parts()
        print(f"error: {message}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
