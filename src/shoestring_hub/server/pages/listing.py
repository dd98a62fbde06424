"""Runs and comments of several projects in one list, newest first, in pages that continue where the last one ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db.models import QuerySet

from shoestring_hub.server.models import Comment, HubRun, Person
from shoestring_hub.server.text_search import excerpt

SHOWN = 30
"""Number of runs and comments on a page."""
_PLACE = re.compile(r"(\d{1,17})\.(\d{1,4})", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class ListedItem:
    """A comment in a list, or, without a comment, a run."""

    run: HubRun
    comment: Comment | None
    excerpt: Sequence[tuple[str, bool]]
    """Pieces of the text, with whether each is a match of the search."""

    @property
    def time(self) -> datetime:
        """When the comment was posted or the run was created."""
        return self.comment.created if self.comment else self.run.created

    @property
    def person(self) -> Person:
        """Who posted the comment, or pushed the run."""
        return self.comment.person if self.comment else self.run.person


@dataclass(frozen=True)
class ListedPage:
    """A page of a list, and the place where the next page begins; empty if there is none."""

    rows: Sequence[ListedItem]
    after: str


def list_newest(
    runs: QuerySet[HubRun], comments: QuerySet[Comment], place: str, words: Sequence[str] = ()
) -> ListedPage:
    """One page of some runs and comments, which the caller must have restricted to those that may be seen.

    Args:
        place: where the page begins, as an earlier page stated it: a time, and how many rows of just this time precede
            the page. Neither tells how many rows of other projects there are, as an id would.
        words: the words of a search, which are marked in the excerpts.
    """
    match = _PLACE.fullmatch(place)
    skipped, moment = (int(match[2]), _EPOCH + int(match[1]) * _MICROSECOND) if match else (0, None)
    if moment is not None:
        runs, comments = runs.filter(created__lte=moment), comments.filter(created__lte=moment)
    most = skipped + SHOWN + 1
    newest_runs = runs.select_related("project", "person").order_by("-created", "-pk")[:most]
    newest_comments = comments.select_related("run__project", "person").order_by("-created", "-pk")[:most]
    rows = [ListedItem(run, None, excerpt(run.notes, words) if words else ()) for run in newest_runs]
    rows += [ListedItem(comment.run, comment, excerpt(comment.text, words)) for comment in newest_comments]
    rows.sort(key=lambda row: row.time, reverse=True)  # stable: rows of the same time keep their order
    skipped = min(skipped, sum(row.time == moment for row in rows))
    rows = rows[skipped:]
    return ListedPage(rows[:SHOWN], _place_after(rows[:SHOWN], moment, skipped) if len(rows) > SHOWN else "")


def _place_after(rows: Sequence[ListedItem], moment: datetime | None, skipped: int) -> str:
    last = rows[-1].time
    count = sum(row.time == last for row in rows) + (skipped if last == moment else 0)
    return f"{(last - _EPOCH) // _MICROSECOND}.{count}"
