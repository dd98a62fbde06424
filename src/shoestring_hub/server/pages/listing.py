"""Lists runs, clips and comments of several projects together, newest first, and divided into pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from shoestring_hub.server.models import Comment, HubClip, HubRun, Person
from shoestring_hub.server.text_search import excerpt

SHOWN = 30
"""Number of runs, clips and comments on a page."""
_PLACE = re.compile(r"(\d{1,17})\.(\d{1,4})", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class ListedItem:
    """An entry of a list: a comment, or a run or clip if `comment` is None."""

    target: HubRun | HubClip
    comment: Comment | None
    excerpt: Sequence[tuple[str, bool]]
    """Pieces of the text, each with whether it matches the search."""

    @property
    def time(self) -> datetime:
        """When the comment was posted, or the run or clip was created."""
        return self.comment.created if self.comment else self.target.created

    @property
    def is_clip(self) -> bool:
        """Whether this is a clip, or a comment on one; templates use this."""
        return isinstance(self.target, HubClip)

    @property
    def person(self) -> Person:
        """Who posted the comment, pushed the run, or sent the clip."""
        return self.comment.person if self.comment else self.target.person


@dataclass(frozen=True)
class ListedPage:
    """A page of a list, and the place where the next page begins; empty if there is none."""

    rows: Sequence[ListedItem]
    after: str


def list_newest(
    runs: QuerySet[HubRun], clips: QuerySet[HubClip], comments: QuerySet[Comment], place: str, words: Sequence[str] = ()
) -> ListedPage:
    """One page of some runs, clips and comments, which the caller must have restricted to those that may be seen.

    Args:
        place: `ListedPage.after` of the page before: a time, and how many rows of exactly this time precede the page.
            Unlike an id, neither reveals how many rows of other projects there are.
        words: the words of a search, which are marked in the excerpts.
    """
    match = _PLACE.fullmatch(place)
    skipped, moment = (int(match[2]), _EPOCH + int(match[1]) * _MICROSECOND) if match else (0, None)
    most = skipped + SHOWN + 1

    def newest(rows: QuerySet[Any], *related: str) -> QuerySet[Any]:
        rows = rows if moment is None else rows.filter(created__lte=moment)
        return rows.select_related("person", *related).order_by("-created", "-pk")[:most]

    targets = [*newest(runs, "project"), *newest(clips, "project")]
    rows = [ListedItem(target, None, excerpt(target.notes, words) if words else ()) for target in targets]
    for comment in newest(comments, "run__project", "clip__project"):
        rows.append(ListedItem(comment.target, comment, excerpt(comment.text, words)))
    rows.sort(key=lambda row: row.time, reverse=True)  # stable: rows of the same time keep their order
    skipped = min(skipped, sum(row.time == moment for row in rows))
    rows, more = rows[skipped : skipped + SHOWN], len(rows) > skipped + SHOWN
    if not more:
        return ListedPage(rows, after="")
    last = rows[-1].time
    count = sum(row.time == last for row in rows) + (skipped if last == moment else 0)
    return ListedPage(rows, after=f"{(last - _EPOCH) // _MICROSECOND}.{count}")
