"""Pages of projects: creating a project, and its people, invitations and tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import URLPattern, reverse

from shoestring_hub.server.access import AccessRule, access_of, route, text_of
from shoestring_hub.server.models import (
    INVITED_FOR,
    NAME,
    Invitation,
    Member,
    Project,
    Role,
    Token,
    digest_of,
    draw_secret,
)

SHOWN = 50
"""Number of audit events on the page of a project's people."""
TAKEN = {
    "account",
    "api",
    "compare",
    "feed",
    "following",
    "health",
    "join",
    "password",
    "search",
    "sign-in",
    "sign-out",
    "static",
}
"""Names that a project cannot have, because other pages use them as addresses."""


class NewProject(forms.ModelForm):
    """Form for the name of a new project, which is also its address."""

    class Meta:
        model = Project
        fields = ("slug",)
        labels: ClassVar = {"slug": "Name"}

    def clean_slug(self) -> str:
        """Refuse names that are taken or that are addresses of other pages."""
        slug = self.cleaned_data["slug"].lower()
        if slug in TAKEN:
            raise ValidationError("This name is the address of another page.")
        if Project.objects.filter(slug=slug).exists():
            raise ValidationError("This name is taken.")
        return slug


class NewToken(forms.Form):
    """Form for a new token, which is meant for one machine."""

    machine = forms.CharField(max_length=NAME, label="Machine that uses it")
    write_only = forms.BooleanField(required=False, label="May only write")


class RoleChoice(forms.Form):
    """Form for a role in a project."""

    role = forms.TypedChoiceField(choices=Role.choices, coerce=int)


def home(request: HttpRequest) -> HttpResponse:
    """The projects of the person who is signed in, and a form for a new project, which this person will own."""
    form = NewProject(request.POST or None)
    person: Any = request.user
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            project = form.save()
            Member.objects.create(project=project, person=person, role=Role.OWNER)
        return redirect("runs", project=project.slug)
    shown = Q(project__runs__deleted=None, project__runs__archived=False)
    held = (
        Member.objects.filter(person=person)
        .select_related("project")
        .annotate(count=Count("project__runs", filter=shown), updated=Max("project__runs__updated", filter=shown))
        .order_by("project__slug")
    )
    return render(request, "hub/home.html", {"memberships": held, "form": form})


def people(request: HttpRequest) -> HttpResponse:
    """The people of a project, and its open invitations."""
    return _people(request)


def _people(request: HttpRequest, link: str = "", problem: str = "") -> HttpResponse:
    project = access_of(request).project
    context = {
        "memberships": project.memberships.select_related("person").order_by("-role", "person__username"),
        "invitations": project.invitations.filter(used=None).select_related("made_by").order_by("created"),
        "roles": Role.choices,
        "days": INVITED_FOR.days,
        "events": project.events.order_by("-time")[:SHOWN],
        "link": link,
        "problem": problem,
    }
    return render(request, "hub/people.html", context)


def invite(request: HttpRequest) -> HttpResponse:
    """Create an invitation; its link is shown only once."""
    access, form = access_of(request), RoleChoice(request.POST)
    if not form.is_valid():
        return _people(request, problem="Choose a role.")
    secret, role = draw_secret("join"), form.cleaned_data["role"]
    Invitation.objects.create(project=access.project, role=role, digest=digest_of(secret), made_by=access.person)
    return _people(request, link=request.build_absolute_uri(reverse("join", kwargs={"secret": secret})))


def withdraw_invitation(request: HttpRequest, invitation: int) -> HttpResponse:
    """Delete an invitation, so that its link stops working."""
    access = access_of(request)
    Invitation.objects.filter(project=access.project, pk=invitation).delete()
    return redirect("people", project=access.project.slug)


def set_role(request: HttpRequest, person: int) -> HttpResponse:
    """Change the role of a person, or remove the person; a project keeps at least one owner."""
    access = access_of(request)
    role = RoleChoice(request.POST)
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=access.project.pk)
        held = access.project.memberships.filter(person=person)
        others = access.project.memberships.filter(role=Role.OWNER, person__is_active=True).exclude(person=person)
        new = role.cleaned_data["role"] if role.is_valid() else None
        if new != Role.OWNER and not others.exists():
            return _people(request, problem="A project keeps at least one owner.")
        if new is None:
            held.delete()
            Token.objects.filter(project=access.project, person=person).delete()
        else:
            held.update(role=new)
    stays = access.project.memberships.filter(person=access.person, role=Role.OWNER).exists()
    return redirect("people", project=access.project.slug) if stays else redirect("home")


def tokens(request: HttpRequest) -> HttpResponse:
    """The person's own tokens for a project, and a form for a new token, whose secret is shown only once."""
    access, secret = access_of(request), ""
    form = NewToken(request.POST or None)
    if request.method == "POST" and form.is_valid():
        secret = draw_secret("hub")
        Token.objects.create(
            project=access.project, person=access.person, digest=digest_of(secret), **form.cleaned_data
        )
        form = NewToken()
    own = Token.objects.filter(project=access.project, person=access.person).order_by("created")
    context = {"tokens": own, "form": form, "secret": secret, "address": request.build_absolute_uri("/")}
    return render(request, "hub/tokens.html", context)


def revoke_token(request: HttpRequest, token: int) -> HttpResponse:
    """Delete one of the person's own tokens; an owner of the project may delete any token."""
    access = access_of(request)
    revoked = Token.objects.filter(project=access.project, pk=token)
    (revoked if access.owns else revoked.filter(person=access.person)).delete()
    return redirect("tokens", project=access.project.slug)


def edit_project(request: HttpRequest) -> HttpResponse:
    """Change the notes of a project."""
    project = access_of(request).project
    project.notes = text_of(request.POST, "notes", 50_000)
    project.save(update_fields=["notes"])
    return redirect("runs", project=project.slug)


ROUTES: list[URLPattern] = [
    route("", home, AccessRule.PERSON, "GET", "POST"),
    route("<slug:project>/people", people, AccessRule.OWNER),
    route("<slug:project>/people/invite", invite, AccessRule.OWNER, "POST"),
    route("<slug:project>/people/invitations/<int:invitation>/withdraw", withdraw_invitation, AccessRule.OWNER, "POST"),
    route("<slug:project>/people/<int:person>", set_role, AccessRule.OWNER, "POST"),
    route("<slug:project>/tokens", tokens, AccessRule.READER, "GET", "POST"),
    route("<slug:project>/tokens/<int:token>/revoke", revoke_token, AccessRule.READER, "POST"),
    route("<slug:project>/edit", edit_project, AccessRule.OWNER, "POST"),
]
