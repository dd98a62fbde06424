"""Clips that people and programs send: what is accepted, and links that show one clip to people without an account."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.core.signing import BadSignature, TimestampSigner
from django.db import IntegrityError, transaction
from django.db.models import Max, Sum
from django.utils import timezone

from shoestring import figures
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring_hub.protocol import CHUNK, CLIP_LIMIT, DIGEST, digest
from shoestring_hub.server import chunks, media
from shoestring_hub.server.access import Access, RefusedError
from shoestring_hub.server.models import (
    NAME,
    ClipJob,
    ClipShare,
    HubClip,
    HubRun,
    Member,
    Project,
    Role,
    digest_of,
    draw_secret,
)
from shoestring_hub.server.runs import missing_chunks

SENT, PERIOD = 200, timedelta(hours=1)
"""Number of clips that a person may send in a period."""
DAYS = (1, 7, 30)
"""Lifetimes of links, in days."""


@dataclass(frozen=True)
class SentClip:
    """A client's description of the clip that it sends."""

    name: str
    size: int
    chunks: list[str]


def sent(fields: Fields) -> SentClip:
    """Parse a client's description of a clip.

    Raises:
        RefusedError: the description is malformed, or the clip is too large.
    """
    size, named = fields.count("size", most=1 << 60), fields.texts("chunks")
    if size > CLIP_LIMIT:
        raise RefusedError(413, f"a clip has at most {figures.size(CLIP_LIMIT)}")
    if len(named) != -(-size // CHUNK) or not all(map(DIGEST.fullmatch, named)):
        raise RefusedError(400, "the clip has malformed chunks")
    return SentClip(foreign.one_line(fields.text("name", "")).replace("\0", "").strip()[:NAME] or "clip", size, named)


def commit(access: Access, clip: SentClip, run: HubRun | None) -> HubClip:
    """Create a clip and queue its conversion; returns the existing clip if it was sent to the same place before.

    Raises:
        RefusedError: clips are off, the clip was deleted, is invalid or exceeds a limit, or chunks are missing (409).
    """
    check_on()
    token = access.token
    by = f"token {token.pk}" if token is not None and token.write_only else ""  # must not learn what others sent
    key = digest("\n".join([str(run.number) if run else "", by, *clip.chunks]).encode())
    if known := HubClip.objects.filter(project=access.project, key=key).select_related("project").first():
        if known.deleted:
            raise RefusedError(410, "the clip was deleted on the hub; restore it there first")
        return known
    recent = HubClip.objects.filter(person=access.person, created__gt=timezone.now() - PERIOD)
    if recent.count() >= SENT:
        raise RefusedError(429, f"more than {SENT} clips in an hour; wait")
    check_quota(access.project, clip.size)
    if missing := missing_chunks(access.project.pk, set(clip.chunks), token):
        raise RefusedError(409, "chunks are missing", missing=missing)
    if not chunks.add_up(access.project.pk, clip.chunks, clip.size):
        raise RefusedError(400, "the chunks do not add up to the size of the clip")
    if not media.format_of(chunks.read(access.project.pk, clip.chunks[0])[: media.HEAD]):
        raise RefusedError(415, f"this is no clip: {', '.join(media.FORMATS.values())} are accepted")
    return _create(access, clip, run, key)


def check_on() -> None:
    """Refuse if the hub takes no clips."""
    if settings.HUB_CLIPS.off:
        raise RefusedError(403, f"clips are off on this hub: {settings.HUB_CLIPS.off}")


def check_quota(project: Project, size: int) -> None:
    """Refuse `size` bytes if a project has no space left for them.

    Raises:
        RefusedError: the clips of the project would exceed the quota.
    """
    used = HubClip.objects.filter(project=project).aggregate(used=Sum("size"))["used"] or 0
    quota = settings.HUB_CLIPS.quota * 1e9
    if used + size > quota:
        reason = f"its clips take {figures.size(used)} of {figures.size(quota)}"
        raise RefusedError(413, f"the project has no space for the clip: {reason}; deleted clips count for 30 days")


def _create(access: Access, clip: SentClip, run: HubRun | None, key: str) -> HubClip:
    for _ in range(100):
        newest = HubClip.objects.filter(project=access.project).aggregate(newest=Max("number"))["newest"] or 0
        fields = {"run": run, "key": key, "name": clip.name, "size": clip.size, "chunks": clip.chunks}
        try:
            with transaction.atomic():
                row = HubClip.objects.create(project=access.project, person=access.person, number=newest + 1, **fields)
                ClipJob.objects.create(clip=row)
                return row
        except IntegrityError:  # another request took the number or created the clip
            if row := HubClip.objects.filter(project=access.project, key=key).select_related("project").first():
                return row
    raise RefusedError(503, "too many clips are being created at the same time")


# -- links ------------------------------------------------------------------------------------------------------------

_signer = TimestampSigner(salt="shoestring_hub.clip")


def share(access: Access, clip: HubClip, days: int) -> str:
    """Create a link to a clip, and return its signed secret, which is shown only once."""
    secret = draw_secret("clip")
    ClipShare.objects.create(clip=clip, digest=digest_of(secret), days=days, made_by=access.person)
    return _signer.sign(secret)


def shared_clip(signed: str) -> HubClip | None:
    """The clip to which a link leads; None if the link has expired or ended, or if the clip is not shown any more."""
    try:
        secret = _signer.unsign(signed, max_age=max(DAYS) * 86400)
    except BadSignature:
        return None
    links = ClipShare.objects.filter(digest=digest_of(secret)).select_related("clip__project", "clip__job", "clip__run")
    link = links.first()
    return link.clip if link is not None and _holds(link, signed) else None


def _holds(link: ClipShare, signed: str) -> bool:
    clip = link.clip
    try:
        _signer.unsign(signed, max_age=link.days * 86400)
    except BadSignature:
        return False
    owner = Member.objects.filter(project=clip.project, person=link.made_by, role=Role.OWNER, person__is_active=True)
    gone = clip.deleted or clip.hidden or (clip.run is not None and clip.run.deleted)
    return not gone and clip.job.state == ClipJob.DONE and owner.exists()
