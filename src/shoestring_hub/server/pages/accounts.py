"""Signing in and out, passwords, and joining by an invitation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth import login, update_session_auth_hash
from django.contrib.auth.forms import BaseUserCreationForm, PasswordChangeForm
from django.contrib.auth.tokens import default_token_generator
from django.contrib.auth.views import LoginView, LogoutView, PasswordResetConfirmView
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import URLPattern
from django.utils import timezone

from shoestring_hub.server.access import AccessRule, note, route, text_of
from shoestring_hub.server.models import INVITED_FOR, AuditEvent, Invitation, Member, Person, Role, digest_of

TRIES, WAIT = 10, timedelta(minutes=5)
"""Number of failed attempts to sign in with one name, and the period in which so many attempts lock the name."""
sign_in_view = LoginView.as_view(template_name="hub/sign_in.html", next_page="/")
sign_out_view = LogoutView.as_view(next_page="/sign-in")
reset_view = PasswordResetConfirmView.as_view(
    template_name="hub/reset.html", success_url="/sign-in", token_generator=default_token_generator
)


class SignUp(BaseUserCreationForm):
    """Form for the name and password of a new person."""

    class Meta(BaseUserCreationForm.Meta):
        model = Person
        fields = ("username",)


def sign_in(request: HttpRequest) -> HttpResponse:
    """The sign-in page; refuses a name with `TRIES` failed attempts in the last `WAIT`."""
    if request.method != "POST":
        return sign_in_view(request)
    name = text_of(request.POST, "username", 150)
    failed = AuditEvent.objects.filter(act=AuditEvent.REFUSED, person=name, time__gt=timezone.now() - WAIT)
    if failed.count() >= TRIES:
        return render(request, "hub/wait.html", {"minutes": WAIT.seconds // 60}, status=429)
    response = sign_in_view(request)
    note(AuditEvent.SIGNED_IN if response.status_code == 302 else AuditEvent.REFUSED, name, request.path)
    return response


def sign_out(request: HttpRequest) -> HttpResponse:
    """End the session, and have the browser remove what it has stored of the hub, cookies of the whole domain aside."""
    response = sign_out_view(request)
    response["Clear-Site-Data"] = '"cache", "storage", "prefetchCache", "prerenderCache"'
    return response


def account(request: HttpRequest) -> HttpResponse:
    """Change the password; this ends all other sessions of the person."""
    form: forms.Form = PasswordChangeForm(request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        update_session_auth_hash(request, form.save())
        return redirect("account")
    return render(request, "hub/account.html", {"form": form})


def reset_password(request: HttpRequest, uidb64: str, token: str) -> HttpResponse:
    """Set a new password through a link that `shoestring hub person NAME` has printed."""
    return reset_view(request, uidb64=uidb64, token=token)


def join(request: HttpRequest, secret: str) -> HttpResponse:
    """Join a project by an invitation, as the person who is signed in or as a new person."""
    person: Any = request.user
    since = timezone.now() - INVITED_FOR
    open_ones = Invitation.objects.select_related("project").filter(
        digest=digest_of(secret), used=None, created__gt=since
    )
    invitation = open_ones.first()
    if invitation is None:
        raise Http404
    form = None if person.is_authenticated else SignUp(request.POST or None)
    if request.method == "POST" and (form is None or form.is_valid()):
        with transaction.atomic():
            if not open_ones.update(used=timezone.now()):  # somebody else has used the invitation
                raise Http404
            person = person if form is None else form.save()
            role = invitation.role
            held = Member.objects.filter(project=invitation.project, person=person).first()
            Member.objects.update_or_create(
                project=invitation.project,
                person=person,
                defaults={"role": max(role, held.role) if held else role},
            )
        if form is not None:
            login(request, person)
        return redirect("runs", project=invitation.project.slug)
    context = {"invitation": invitation, "role": Role(invitation.role).label, "form": form}
    return render(request, "hub/join.html", context)


ROUTES: list[URLPattern] = [
    route("sign-in", sign_in, AccessRule.PUBLIC, "GET", "POST"),
    route("sign-out", sign_out, AccessRule.PUBLIC, "POST"),
    route("account", account, AccessRule.PERSON, "GET", "POST"),
    route("password/<str:uidb64>/<str:token>", reset_password, AccessRule.PUBLIC, "GET", "POST"),
    route("join/<str:secret>", join, AccessRule.PUBLIC, "GET", "POST"),
]
