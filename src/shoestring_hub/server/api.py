"""The API for programs with a token, in JSON and plain bytes; `client/connection.py` is its client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import URLPattern

from shoestring.core.errors import ShoestringError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring_hub.protocol import CHUNK, DIGEST, KEY, LOG_PART, digest
from shoestring_hub.server import chunks, clips, logs, runs
from shoestring_hub.server.access import AccessRule, RefusedError, access_of, route
from shoestring_hub.server.models import Deposit, File, HubRun

ASKED = 5000
"""Maximum number of chunks in one query, and of files in one commit."""


def whoami(request: HttpRequest) -> HttpResponse:
    """Describe the token of the request: its person, project, role and machine."""
    access = access_of(request)
    assert access.token is not None
    facts = {"person": access.person.username, "project": access.project.slug, "role": access.role.label}
    return JsonResponse(facts | {"write_only": access.token.write_only, "machine": access.token.machine})


def open_run(request: HttpRequest, key: str) -> HttpResponse:
    """Find or create a run, begin an attempt if requested, and describe the run's log."""
    fields, access = body_of(request), access_of(request)
    if not KEY.fullmatch(key):
        raise RefusedError(400, "a run's key has 32 hexadecimal digits")
    run = runs.open_run(access, key, fields.text("name", "run"))
    if fields.flag("begin", False):
        run = logs.begin(run)
    return JsonResponse(logs.describe(run) | {"number": run.number, "page": run.address})


def splice_log(request: HttpRequest, key: str) -> HttpResponse:
    """Replace the end of a run's log by the body of the request."""
    try:
        at, have, attempt = (int(request.GET[name]) for name in ("at", "have", "attempt"))
    except (KeyError, ValueError) as error:
        raise RefusedError(400, "`at`, `have` and `attempt` must be whole numbers") from error
    data = bytes_of(request, LOG_PART)
    return JsonResponse({"size": logs.splice(_own_run(request, key), data, at=at, have=have, attempt=attempt)})


def missing_chunks(request: HttpRequest) -> HttpResponse:
    """List the requested chunks that the project lacks; a write-only token learns only about chunks it has sent."""
    access, names = access_of(request), body_of(request).get("digests")
    names = names if isinstance(names, list) else []
    _check_count(names)
    asked = [name for name in names if isinstance(name, str) and DIGEST.fullmatch(name)]
    token = access.token
    if token is not None and token.write_only:
        asked_of = set(Deposit.objects.filter(token=token, digest__in=asked).values_list("digest", flat=True))
    else:
        asked_of = set(asked)
    there = {name for name in asked_of if chunks.touch(access.project.pk, name)}
    return JsonResponse({"missing": [name for name in asked if name not in there]})


def put_chunk(request: HttpRequest, digest_: str) -> HttpResponse:
    """Store a chunk, if its name is the digest of its bytes."""
    access, data = access_of(request), bytes_of(request, CHUNK)
    if digest(data) != digest_:
        raise RefusedError(400, "the bytes do not match this digest")
    try:
        chunks.put(access.project.pk, digest_, data)
    except OSError as error:
        raise RefusedError(507, f"the hub cannot store more: {error.strerror}") from error
    if access.token is not None and access.token.write_only:
        Deposit.objects.get_or_create(token=access.token, digest=digest_)
    return JsonResponse({"size": len(data)})


def commit_files(request: HttpRequest, key: str) -> HttpResponse:
    """Set files of a run, either all or none; answers 409 with the missing chunks if the project lacks any."""
    run, access = _own_run(request, key), access_of(request)
    files = body_of(request).tables("files")
    _check_count(files)
    if missing := runs.commit(run, files, access.token):
        raise RefusedError(409, "chunks are missing", missing=missing)
    return JsonResponse({"files": len(files)})


def keep_only(request: HttpRequest, key: str) -> HttpResponse:
    """Remove the files of a run that its folder no longer has."""
    run, fields = _own_run(request, key), body_of(request)
    runs.keep_only(run, fields.texts("paths"), checkpoints=fields.flag("checkpoints", False))
    return JsonResponse({})


def list_files(request: HttpRequest, number: int) -> HttpResponse:
    """The files of a run with their chunks, and its log with its segments."""
    run = _run_to_read(request, number)
    files = File.objects.filter(run=run).order_by("path").values("path", "size", "chunks")
    return JsonResponse({"name": run.name, "key": run.key, "files": list(files), "log": logs.describe(run)})


def get_chunk(request: HttpRequest, number: int) -> HttpResponse:
    """Send one chunk of a file of a run; the path is in the body, because it may be too long for a URL."""
    run, fields = _run_to_read(request, number), body_of(request)
    file = File.objects.filter(run=run, path=fields.text("path").replace("\0", "")).first()
    if file is None or fields.count("chunk", least=0) >= len(file.chunks):
        raise RefusedError(404, "the run has no such chunk")
    data = chunks.read(run.project_id, file.chunks[fields.count("chunk", least=0)])
    return HttpResponse(data, content_type="application/octet-stream")


def get_log(request: HttpRequest, number: int) -> HttpResponse:
    """The bytes of a run's log."""
    return StreamingHttpResponse(logs.read(_run_to_read(request, number)), content_type="application/octet-stream")


def send_clip(request: HttpRequest) -> HttpResponse:
    """Create a clip of the project or of one of its runs, or find the one that was sent before."""
    access, fields = access_of(request), body_of(request)
    run = _own_run(request, key) if (key := fields.text("run", "")) else None
    clip = clips.commit(access, clips.sent(fields), run)
    return JsonResponse({"number": clip.number, "page": clip.address})


def _own_run(request: HttpRequest, key: str) -> HubRun:
    access = access_of(request)
    run = HubRun.objects.filter(project=access.project, key=key).first()
    if run is None:
        raise RefusedError(404, "the project has no such run")
    runs.check_run(access, run)
    return run


def _run_to_read(request: HttpRequest, number: int) -> HubRun:
    run = HubRun.objects.filter(project=access_of(request).project, number=number, deleted=None).first()
    if run is None:
        raise RefusedError(404, "the project has no such run")
    return run


def bytes_of(request: HttpRequest, limit: int) -> bytes:
    """The body of a request, of at most `limit` bytes."""
    data = request.read(limit + 1)
    if len(data) > limit:
        raise RefusedError(413, f"the body has more than {limit:,} bytes")
    return data


def body_of(request: HttpRequest) -> Fields:
    """The body of a request, a JSON object."""
    try:
        return Fields(foreign.parse_json(bytes_of(request, 8 << 20) or b"{}"), "the body", ShoestringError)
    except ValueError as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error


def _check_count(asked: Sequence[Any]) -> None:
    if len(asked) > ASKED:
        raise RefusedError(413, f"more than {ASKED:,} entries in one request")


ROUTES: list[URLPattern] = [
    route("api/whoami", whoami, AccessRule.TOKEN),
    route("api/chunks/missing", missing_chunks, AccessRule.TOKEN_WRITE, "POST"),
    route("api/chunks/<str:digest_>", put_chunk, AccessRule.TOKEN_WRITE, "PUT"),
    route("api/own/<str:key>", open_run, AccessRule.TOKEN_WRITE, "POST"),
    route("api/own/<str:key>/log", splice_log, AccessRule.TOKEN_WRITE, "PUT"),
    route("api/own/<str:key>/files", commit_files, AccessRule.TOKEN_WRITE, "POST"),
    route("api/own/<str:key>/keep", keep_only, AccessRule.TOKEN_WRITE, "POST"),
    route("api/clips", send_clip, AccessRule.TOKEN_WRITE, "POST"),
    route("api/runs/<int:number>", list_files, AccessRule.TOKEN_READ),
    route("api/runs/<int:number>/chunk", get_chunk, AccessRule.TOKEN_READ, "POST"),
    route("api/runs/<int:number>/log", get_log, AccessRule.TOKEN_READ),
]
