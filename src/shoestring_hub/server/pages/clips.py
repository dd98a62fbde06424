"""Clips: the list of a project's, the page of one, uploads from the browser, the files themselves, and links to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import URLPattern, reverse
from django.utils import timezone

from shoestring.core.errors import ShoestringError
from shoestring_hub.protocol import CHUNK, CLIP_LIMIT
from shoestring_hub.server import api, clip_files, clip_queue
from shoestring_hub.server import clips as stored
from shoestring_hub.server.access import (
    Access,
    AccessRule,
    RefusedError,
    access_of,
    clip_of,
    refusal,
    route,
    text_of,
)
from shoestring_hub.server.models import GRACE, NAME, ClipJob, ClipShare, HubClip, HubRun
from shoestring_hub.server.pages.comments import comments_of
from shoestring_hub.server.ranges import send_file
from shoestring_hub.server.sight import clips_of

SHOWN = 24
"""Number of clips on a page of the list, and on the page of a run."""
VIDEO, POSTER = "video/mp4", "image/jpeg"


def clips(request: HttpRequest) -> HttpResponse:
    """The clips of a project, newest first, or its deleted ones; and a form for sending one."""
    access = access_of(request)
    deleted = request.GET.get("which") == "deleted" and access.writes
    shown = _present(access).exclude(deleted=None) if deleted else _present(access).filter(deleted=None)
    if not deleted:
        shown = shown.filter(run__deleted=None)
    pages = Paginator(shown, SHOWN)
    context = {"clips": pages.get_page(request.GET.get("page", "1")), "which": "deleted" if deleted else "present"}
    return render(request, "hub/clips.html", context | upload_variables(access))


def clips_of_run(access: Access, run: HubRun) -> dict[str, Any]:
    """Template variables for the clips on the page of a run."""
    shown = list(_present(access).filter(run=run, deleted=None)[: SHOWN + 1])
    return {"clips": shown[:SHOWN], "more_clips": len(shown) > SHOWN} | upload_variables(access)


def upload_variables(access: Access) -> dict[str, Any]:
    """Template variables for the form that sends a clip."""
    address, off = reverse("clips", kwargs={"project": access.project.slug}), settings.HUB_CLIPS.off
    return {"clips_at": address, "chunk": CHUNK, "most": CLIP_LIMIT, "name_limit": NAME, "clips_off": off}


def _present(access: Access) -> Any:
    return clips_of(access.project, access.person, access.role).order_by("-number")


def clip(request: HttpRequest) -> HttpResponse:
    """The page of a clip: its player, or how far its conversion is, and its comments."""
    return _clip(request)


def _clip(request: HttpRequest, link: str = "") -> HttpResponse:
    access, shown = access_of(request), clip_of(request)
    context = {
        "clip": shown,
        "job": shown.job,
        "grace": GRACE.days,
        "name_limit": NAME,
        "can_retry": shown.job.state == ClipJob.FAILED and bool(shown.chunks) and not settings.HUB_CLIPS.off,
        "clips_off": settings.HUB_CLIPS.off,
        "days": stored.DAYS,
        "link": link,
        "shares": shown.shares.select_related("made_by").order_by("created") if access.owns else (),
    }
    return render(request, "hub/clip.html", context | comments_of(request))


def clip_state(request: HttpRequest) -> HttpResponse:
    """How far the conversion of a clip is, for its open page."""
    job = clip_of(request).job
    return JsonResponse({"state": job.state, "progress": job.progress, "reason": job.reason, "tries": job.tries})


def clip_video(request: HttpRequest) -> HttpResponseBase:
    """The video of a clip, or the requested range of it."""
    return _file(request, clip_of(request), "video", VIDEO)


def clip_poster(request: HttpRequest) -> HttpResponseBase:
    """The picture that is shown before a clip plays."""
    return _file(request, clip_of(request), "poster", POSTER)


def _file(request: HttpRequest, shown: HubClip | None, field: str, kind: str) -> HttpResponseBase:
    digest = getattr(shown, field, "")
    if shown is None or not digest:
        raise Http404
    return send_file(request, clip_files.path_of(shown.project_id, digest), kind)


# -- uploads ----------------------------------------------------------------------------------------------------------


def _answering(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Answer refusals as JSON, because scripts send the requests."""

    @wraps(view)
    def answering(request: HttpRequest, **names: Any) -> HttpResponse:
        try:
            return view(request, **names)
        except (RefusedError, ShoestringError) as error:
            return refusal(error)

    return answering


@_answering
def post_clip(request: HttpRequest) -> HttpResponse:
    """Create a clip from chunks; answers 409 with the chunks that are missing, which the browser then sends."""
    access, fields = access_of(request), api.body_of(request)
    run = None
    if number := fields.count("run", 0, least=0):
        run = HubRun.objects.filter(project=access.project, number=number, deleted=None).first()
        if run is None:
            raise RefusedError(404, "the project has no such run")
    return JsonResponse({"page": stored.commit(access, stored.sent(fields), run).address})


@_answering
def put_clip_chunk(request: HttpRequest, digest_: str) -> HttpResponse:
    """Store a chunk of a clip, if its name is the digest of its bytes."""
    stored.check_on()
    stored.check_quota(access_of(request).project, CHUNK)
    return api.put_chunk(request, digest_)


# -- changes ----------------------------------------------------------------------------------------------------------


def edit_clip(request: HttpRequest) -> HttpResponse:
    """Change the name and the notes of a clip."""
    changed = clip_of(request)
    changed.name = text_of(request.POST, "name", NAME).strip() or changed.name
    changed.notes = text_of(request.POST, "notes", 50_000)
    changed.save(update_fields=["name", "notes"])
    return redirect(changed.address)


def delete_clip(request: HttpRequest) -> HttpResponse:
    """Delete a clip, or restore it within the grace period."""
    changed, deleted = clip_of(request), request.POST.get("deleted") == "yes"
    HubClip.objects.filter(pk=changed.pk).update(deleted=timezone.now() if deleted else None)
    return redirect("clips", project=changed.project.slug) if deleted else redirect(changed.address)


def retry_clip(request: HttpRequest) -> HttpResponse:
    """Queue the failed conversion of a clip again."""
    clip_queue.retry(clip_of(request))
    return redirect(clip_of(request).address)


def hide_clip(request: HttpRequest) -> HttpResponse:
    """Hide a clip from everybody but the person who sent it and the owners of the project, or show it again."""
    hidden = timezone.now() if request.POST.get("hidden") == "yes" else None
    HubClip.objects.filter(pk=clip_of(request).pk).update(hidden=hidden)
    return redirect(clip_of(request).address)


# -- links ------------------------------------------------------------------------------------------------------------


def share_clip(request: HttpRequest) -> HttpResponse:
    """Create a link by which whoever has it sees the clip; the link is shown only once."""
    days = text_of(request.POST, "days", 3)
    if days not in map(str, stored.DAYS):
        return redirect(clip_of(request).address)
    signed = stored.share(access_of(request), clip_of(request), int(days))
    return _clip(request, request.build_absolute_uri(reverse("shared_clip", kwargs={"signed": signed})))


def revoke_share(request: HttpRequest, share: int) -> HttpResponse:
    """End a link to the clip."""
    get_object_or_404(ClipShare, clip=clip_of(request), pk=share).delete()
    return redirect(f"{clip_of(request).address}#links")


def shared_clip(request: HttpRequest, signed: str) -> HttpResponse:
    """A clip for whoever has a link to it: the video and its name, and nothing else of the project."""
    shown = stored.shared_clip(signed)
    if shown is None:
        raise Http404
    return render(request, "hub/shared_clip.html", {"clip": shown, "at": request.path})


def shared_video(request: HttpRequest, signed: str) -> HttpResponseBase:
    """The video of a clip to which a link leads."""
    return _file(request, stored.shared_clip(signed), "video", VIDEO)


def shared_poster(request: HttpRequest, signed: str) -> HttpResponseBase:
    """The poster of a clip to which a link leads."""
    return _file(request, stored.shared_clip(signed), "poster", POSTER)


_CLIP = "<slug:project>/clips/<int:clip>"
# No project has a tilde in its name, so the links take no address away from projects.
_LINK = "~clip/<str:signed>"
ROUTES: list[URLPattern] = [
    route("<slug:project>/clips", clips, AccessRule.READER),
    route("<slug:project>/clips/send", post_clip, AccessRule.WRITER, "POST"),
    route("<slug:project>/clips/chunks/<str:digest_>", put_clip_chunk, AccessRule.WRITER, "PUT"),
    route(_CLIP, clip, AccessRule.READER),
    route(f"{_CLIP}/state", clip_state, AccessRule.READER),
    route(f"{_CLIP}/video.mp4", clip_video, AccessRule.READER),
    route(f"{_CLIP}/poster.jpg", clip_poster, AccessRule.READER),
    route(f"{_CLIP}/edit", edit_clip, AccessRule.WRITER, "POST"),
    route(f"{_CLIP}/delete", delete_clip, AccessRule.WRITER, "POST"),
    route(f"{_CLIP}/retry", retry_clip, AccessRule.WRITER, "POST"),
    route(f"{_CLIP}/hide", hide_clip, AccessRule.OWNER, "POST"),
    route(f"{_CLIP}/share", share_clip, AccessRule.OWNER, "POST"),
    route(f"{_CLIP}/shares/<int:share>/revoke", revoke_share, AccessRule.OWNER, "POST"),
    route(_LINK, shared_clip, AccessRule.PUBLIC),
    route(f"{_LINK}/video.mp4", shared_video, AccessRule.PUBLIC),
    route(f"{_LINK}/poster.jpg", shared_poster, AccessRule.PUBLIC),
]
