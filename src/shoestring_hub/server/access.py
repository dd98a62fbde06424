"""Access control: every route has one rule, which is checked here before the route's view runs.

A person without a role in a project gets the same answer as for a project that does not exist. Roles are read at every
request, so a person who loses a role or is deactivated, or whose token is revoked, loses access at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import wraps
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse, QueryDict
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt

from shoestring.core.errors import ShoestringError
from shoestring_hub.server.models import (
    NAME,
    AuditEvent,
    HubClip,
    HubRun,
    Member,
    Person,
    Project,
    Role,
    Token,
    digest_of,
)
from shoestring_hub.server.sight import Sight, clips_of


class AccessRule(Enum):
    """Who may use a route."""

    PUBLIC = "everybody"
    PERSON = "whoever is signed in"
    LISTING = "whoever is signed in, with what lies in their projects"
    READER = Role.READER
    WRITER = Role.WRITER
    OWNER = Role.OWNER
    TOKEN = "programs with a token"
    TOKEN_READ = "programs with a token that may read"
    TOKEN_WRITE = "programs with a token of a writer"


@dataclass(frozen=True)
class Access:
    """The person, project, role, run, clip and token of a request, as determined by the rule of its route."""

    person: Person
    project: Project
    role: Role
    run: HubRun | None = None
    token: Token | None = None
    clip: HubClip | None = None

    @property
    def writes(self) -> bool:
        """Whether the person may change runs; templates use this."""
        return self.role >= Role.WRITER

    @property
    def owns(self) -> bool:
        """Whether the person may change the project; templates use this."""
        return self.role >= Role.OWNER


class RefusedError(Exception):
    """Refuses a program's request with an HTTP status and a message; `facts` tell the client how to continue."""

    def __init__(self, status: int, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status, self.facts = status, facts


View = Callable[..., HttpResponse]


def route(pattern: str, view: View, rule: AccessRule, *methods: str) -> URLPattern:
    """Create a route with its rule; all routes must be created here. The route has the name of its view.

    The parameters `project` (a slug), `run` and `clip` (numbers) in the pattern are resolved here: the view gets the
    project, the run and the clip from `access_of(request)`, and all other parameters as arguments. A view that shows
    rows of several projects has the rule `LISTING`, and takes them from `sight_of(request)`.
    """
    methods = methods or ("GET",)
    guard = _guard_program if rule in (AccessRule.TOKEN, AccessRule.TOKEN_READ, AccessRule.TOKEN_WRITE) else _guard_page
    guarded = guard(view, rule, {*methods, "HEAD"} if "GET" in methods else set(methods))
    guarded.rule, guarded.methods = rule, methods  # type: ignore[attr-defined]
    return path(pattern, guarded, name=view.__name__)


def access_of(request: HttpRequest) -> Access:
    """The person, project, role, run and token that the route's rule has determined for this request."""
    return request.access  # type: ignore[attr-defined]


def sight_of(request: HttpRequest) -> Sight:
    """What the person who sent the request may see in all projects; only for routes with the rule `LISTING`."""
    return request.sight  # type: ignore[attr-defined]


def text_of(fields: QueryDict, name: str, limit: int) -> str:
    """Text from a form or query, cut to `limit` characters and without NUL, which PostgreSQL cannot store."""
    return fields.get(name, "").replace("\0", "")[:limit]


def run_of(request: HttpRequest) -> HubRun:
    """The run that the request's path names."""
    run = access_of(request).run
    assert run is not None
    return run


def clip_of(request: HttpRequest) -> HubClip:
    """The clip that the request's path names."""
    clip = access_of(request).clip
    assert clip is not None
    return clip


def _guard_page(view: View, rule: AccessRule, methods: set[str]) -> Any:
    @wraps(view)
    def guarded(request: HttpRequest, **names: Any) -> HttpResponse:
        if request.method not in methods:
            return HttpResponseNotAllowed(sorted(methods))
        if "\0" in request.path:
            raise Http404
        if rule is AccessRule.PUBLIC:
            return view(request, **names)
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if rule is AccessRule.LISTING:
            request.sight = Sight(request.user)
        elif rule is not AccessRule.PERSON:
            access = _access_of_person(request.user, names.pop("project"), names.pop("run", None))
            if access.role < rule.value:
                return render(request, "hub/refused.html", {"rule": rule.name.lower()}, status=403)
            number = names.pop("clip", None)
            request.access = access if number is None else replace(access, clip=_clip_of(access, number))
        response = view(request, **names)
        if request.method == "POST" and response.status_code < 400:
            note(view.__name__, request.user.username, request.path, getattr(request, "access", None))
        return response

    return guarded


def note(act: str, person: str, path: str, access: Access | None = None) -> None:
    """Record an action, or an attempt at one, as an audit event."""
    AuditEvent.objects.create(
        act=act, person=person.replace("\0", "")[:150], path=path[:NAME], project=access.project if access else None
    )


def _guard_program(view: View, rule: AccessRule, methods: set[str]) -> Any:
    @csrf_exempt  # unlike a cookie, a token is never sent by a browser for another site
    @wraps(view)
    def guarded(request: HttpRequest, **names: Any) -> HttpResponse:
        try:
            if request.method not in methods:
                raise RefusedError(405, "this address does not support the method")
            request.access = _access_of_token(request, rule)
            return view(request, **names)
        except (RefusedError, ShoestringError) as error:
            return refusal(error)

    return guarded


def refusal(error: RefusedError | ShoestringError) -> HttpResponse:
    """The answer to a program, or to a script of a page, whose request is refused."""
    if isinstance(error, RefusedError):
        return JsonResponse({"error": str(error)} | error.facts, status=error.status)
    return JsonResponse({"error": error.parts()[1]}, status=400)


def _clip_of(access: Access, number: int) -> HubClip:
    clip = clips_of(access.project, access.person, access.role).filter(number=number).first()
    if clip is None:
        raise Http404
    return clip


def _access_of_person(person: Any, slug: str, number: int | None) -> Access:
    member = Member.objects.select_related("project").filter(person=person, project__slug=slug).first()
    if member is None:
        raise Http404
    run = None
    if number is not None:
        run = HubRun.objects.filter(project=member.project, number=number).select_related("person", "project").first()
        if run is None or (run.deleted and member.role < Role.WRITER):
            raise Http404
    return Access(person, member.project, Role(member.role), run)


def _access_of_token(request: HttpRequest, rule: AccessRule) -> Access:
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    token = Token.objects.select_related("person", "project").filter(digest=digest_of(secret)).first()
    role = None
    if scheme == "Bearer" and token and token.person.is_active:
        held = Member.objects.filter(person=token.person, project=token.project).first()
        role = Role(held.role) if held else None
    if token is None or role is None:
        raise RefusedError(401, "the token is not valid: it was revoked, or its person has no role in the project")
    if rule is AccessRule.TOKEN_WRITE and role < Role.WRITER:
        raise RefusedError(403, "the person who made this token may only read in this project")
    if rule is AccessRule.TOKEN_READ and token.write_only:
        raise RefusedError(403, "this token may only write")
    now = timezone.now()
    if token.used is None or (now - token.used).total_seconds() > 60:  # at most one database write a minute
        Token.objects.filter(pk=token.pk).update(used=now)
    return Access(token.person, token.project, role, token=token)
