"""Comments on runs and clips: writing, changing, hiding, and who sees which of them."""

from __future__ import annotations

import re
from datetime import timedelta

from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.utils import timezone

from shoestring_hub.server.access import Access
from shoestring_hub.server.markdown import mentioned
from shoestring_hub.server.models import AuditEvent, Comment, HubClip, HubRun, Member, Mention, Person

COMMENTS = 5000
"""Maximum number of comments on a run or clip, deleted ones included."""
WRITES, PERIOD = 60, timedelta(minutes=10)
"""Number of times that a person may comment, edit and follow in a period."""
LIMITED = ("post_comment", "edit_comment", "follow_person", "follow_project")
"""Names of the routes that count towards `WRITES`."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean_text(text: str) -> str:
    """The text of a comment without control characters, including those that reverse the direction of text."""
    return _CONTROL.sub("", text.replace("\r\n", "\n")).strip()


def writes_too_often(person: Person) -> bool:
    """Whether a person has reached the limit `WRITES`; deleting comments does not lower the count."""
    since = timezone.now() - PERIOD
    acts = AuditEvent.objects.filter(act__in=LIMITED, person=person.username, time__gt=since)
    return acts.count() >= WRITES


def visible_comments(access: Access, target: HubRun | HubClip) -> QuerySet[Comment]:
    """Comments on a run or clip, oldest first; hidden ones only for their author and for owners of the project."""
    comments: QuerySet[Comment] = target.comments.filter(deleted=None).select_related("person").order_by("number")
    return comments if access.owns else comments.filter(Q(hidden=None) | Q(person=access.person))


def post(access: Access, target: HubRun | HubClip, text: str) -> Comment | None:
    """Add a comment to a run or clip; None if it has `COMMENTS` already."""
    with transaction.atomic():
        # The lock prevents two comments from taking one number.
        type(target).objects.select_for_update().get(pk=target.pk)
        newest = target.comments.aggregate(newest=Max("number"))["newest"] or 0
        if newest >= COMMENTS:
            return None
        comment = target.comments.create(number=newest + 1, person=access.person, text=text)
        _store_mentions(comment)
    return comment


def edit(comment: Comment, text: str) -> None:
    """Replace the text of a comment."""
    with transaction.atomic():
        comment.text, comment.edited = text, timezone.now()
        comment.save(update_fields=["text", "edited"])
        _store_mentions(comment)


def delete(comment: Comment) -> None:
    """Erase the text of a comment; its number is not used again, so links to other comments stay right."""
    with transaction.atomic():
        comment.text, comment.deleted = "", timezone.now()
        comment.save(update_fields=["text", "deleted"])
        Mention.objects.filter(comment=comment).delete()


def _store_mentions(comment: Comment) -> None:
    """Record whom a comment mentions; people without a role in the project cannot be told from made-up names."""
    Mention.objects.filter(comment=comment).delete()
    if "@" not in comment.text:
        return
    names = dict(Member.objects.filter(project=comment.target.project_id).values_list("person__username", "person"))
    people = sorted(names[name] for name in mentioned(comment.text, names))
    Mention.objects.bulk_create(Mention(comment=comment, person_id=person) for person in people)
