"""The queue of clips to convert, in the database. Every write of a worker is a compare-and-set on the job's epoch.

A worker takes a job with a lease and the next epoch, and extends the lease while it converts. If the worker is killed
or stalls, the lease ends, and another worker takes the job with a higher epoch; whatever the first one writes later is
refused. Times are those of the database's clock.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Count, DateTimeField, ExpressionWrapper, F, Min, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from shoestring_hub.server.models import TEXT, ClipJob, HubClip

LEASE = timedelta(seconds=15)
"""Time after which the job of a worker that does not respond passes to another one."""
TRIES = 5
"""Number of attempts at a clip, after which it has failed."""
PAUSE = timedelta(seconds=2)
"""Time between the first and the second attempt; doubles before each later attempt."""
FAR = timedelta(minutes=10)
"""A job that is due later than this from now was queued before the clock was set back, and may be taken now."""


def claim() -> ClipJob | None:
    """Take the job that has waited longest, or whose lease ended first; None if nothing is due."""
    for _ in range(10):
        due = Q(due__lte=Now()) | Q(due__gt=_from_now(FAR))
        jobs = ClipJob.objects.filter(due, state__in=(ClipJob.WAITING, ClipJob.HELD), clip__deleted=None)
        job = jobs.select_related("clip__project").order_by("due", "pk").first()
        if job is None:
            return None
        if job.tries >= TRIES:  # its last worker ended without reporting a reason
            fail(job, job.reason or "each attempt to convert it was interrupted", final=True)
        elif _write(job, state=ClipJob.HELD, epoch=F("epoch") + 1, tries=F("tries") + 1, due=_from_now(LEASE)):
            job.epoch, job.tries, job.state = job.epoch + 1, job.tries + 1, ClipJob.HELD
            return job
    return None


def renew(job: ClipJob, progress: float) -> bool:
    """Extend a lease and store the progress; False if the lease is lost."""
    return _write(job, due=_from_now(LEASE), progress=progress)


def finish(job: ClipJob, **result: Any) -> bool:
    """Store the result of a conversion, fields of `HubClip`; False, and nothing is stored, if the lease is lost."""
    with transaction.atomic():
        if not _write(job, state=ClipJob.DONE, progress=1.0, reason=""):
            return False
        HubClip.objects.filter(pk=job.clip_id).update(**result, chunks=[])
    return True


def fail(job: ClipJob, reason: str, *, final: bool) -> bool:
    """End an attempt with a reason. The job waits for another attempt unless this was the last one, or `final`."""
    if final or job.tries >= TRIES:
        return _write(job, state=ClipJob.FAILED, reason=reason[:TEXT])
    wait = PAUSE * 2 ** (job.tries - 1)
    return _write(job, state=ClipJob.WAITING, reason=reason[:TEXT], progress=0.0, due=_from_now(wait))


def give_back(job: ClipJob) -> bool:
    """End a lease because the worker stops; the attempt does not count."""
    return _write(job, state=ClipJob.WAITING, tries=F("tries") - 1, progress=0.0, due=Now())


def retry(clip: HubClip) -> bool:
    """Queue a failed clip again; False if it has not failed, or if its uploaded file is gone."""
    failed = ClipJob.objects.filter(clip=clip, state=ClipJob.FAILED).exclude(clip__chunks=[])
    waiting = {"state": ClipJob.WAITING, "tries": 0, "progress": 0.0, "reason": "", "due": Now()}
    return bool(ClipJob.objects.filter(pk__in=failed.values("pk")).update(**waiting, epoch=F("epoch") + 1))


def figures() -> dict[str, float]:
    """Numbers of clips by state, and the age in seconds of the oldest one that waits for a worker."""
    counts = dict(ClipJob.objects.values_list("state").annotate(Count("pk")))
    waiting = ClipJob.objects.filter(state=ClipJob.WAITING, due__lte=timezone.now(), clip__deleted=None)
    oldest = waiting.aggregate(oldest=Min("due"))["oldest"]
    states = (ClipJob.WAITING, ClipJob.HELD, ClipJob.DONE, ClipJob.FAILED)
    age = (timezone.now() - oldest).total_seconds() if oldest else 0.0
    return {f"clips_{state}": counts.get(state, 0) for state in states} | {"clips_oldest_waiting_seconds": age}


def _write(job: ClipJob, **values: Any) -> bool:
    same: QuerySet[ClipJob] = ClipJob.objects.filter(pk=job.pk, epoch=job.epoch, state=job.state)
    return bool(same.update(**values))


def _from_now(time: timedelta) -> ExpressionWrapper:
    return ExpressionWrapper(Now() + time, output_field=DateTimeField())
