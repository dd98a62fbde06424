"""Comments on the pages of runs and clips: reading, writing, editing, deleting and hiding them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import URLPattern
from django.utils import timezone

from shoestring_hub.server import comments
from shoestring_hub.server.access import AccessRule, access_of, route, run_of
from shoestring_hub.server.models import COMMENT, Comment, HubClip, HubRun

SHOWN = 50
"""Number of comments on a page."""


class CommentText(forms.Form):
    """Form for the text of a comment."""

    text = forms.CharField(max_length=COMMENT, label="Comment, in Markdown", widget=forms.Textarea({"rows": 6}))

    def clean_text(self) -> str:
        """Refuse a text of which nothing is left without its control characters."""
        text = comments.clean_text(self.cleaned_data["text"])
        if not text:
            raise ValidationError("A comment needs a text.")
        return text


def limited(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Refuse requests of a person who comments or follows too often."""

    @wraps(view)
    def checked(request: HttpRequest, **names: Any) -> HttpResponse:
        person: Any = request.user
        if comments.writes_too_often(person):
            context = {"minutes": comments.PERIOD.seconds // 60, "text": request.POST.get("text", "")}
            return render(request, "hub/too_often.html", context, status=429)
        return view(request, **names)

    return checked


def comments_of(request: HttpRequest) -> dict[str, Any]:
    """Template variables for the comments on a request's run or clip; the newest page unless the URL names another."""
    access, target = access_of(request), _target_of(request)
    visible = comments.visible_comments(access, target)
    pages = Paginator(visible, SHOWN)
    linked = request.GET.get("comment", "")
    if linked.isascii() and linked.isdecimal() and len(linked) < 9:
        number: Any = visible.filter(number__lt=int(linked)).count() // SHOWN + 1
    else:
        number = request.GET.get("comments", pages.num_pages)
    names = frozenset(access.project.people.values_list("username", flat=True))
    shown = {"comments": pages.get_page(number), "members": names, "comment_limit": COMMENT}
    return shown | {"target": target, "comments_at": f"{target.address}/comments"}


def _target_of(request: HttpRequest) -> HubRun | HubClip:
    return access_of(request).clip or run_of(request)


@limited
def post_comment(request: HttpRequest) -> HttpResponse:
    """Comment on a run or clip."""
    access, target = access_of(request), _target_of(request)
    if target.deleted:
        raise Http404
    form = _form(request)
    if form.is_valid():
        comment = comments.post(access, target, form.cleaned_data["text"])
        if comment is not None:
            return _show(target, comment)
        form.add_error(None, f"There are at most {comments.COMMENTS:,} comments on one page.")
    return render(request, "hub/comment.html", {"form": form, "target": target}, status=400)


@limited
def edit_comment(request: HttpRequest, comment: int) -> HttpResponse:
    """Change the text of one's own comment."""
    edited, form = _own(request, comment), _form(request)
    if not form.is_valid():
        return render(request, "hub/comment.html", {"form": form, "target": _target_of(request)}, status=400)
    comments.edit(edited, form.cleaned_data["text"])
    return _show(_target_of(request), edited)


def delete_comment(request: HttpRequest, comment: int) -> HttpResponse:
    """Delete one's own comment."""
    comments.delete(_own(request, comment))
    return redirect(f"{_target_of(request).address}#comments")


def hide_comment(request: HttpRequest, comment: int) -> HttpResponse:
    """Hide a comment from everybody but its author and the owners of the project, or show it again."""
    hidden = get_object_or_404(comments.visible_comments(access_of(request), _target_of(request)), number=comment)
    hidden.hidden = timezone.now() if request.POST.get("hidden") == "yes" else None
    hidden.save(update_fields=["hidden"])
    return _show(_target_of(request), hidden)


def _form(request: HttpRequest) -> CommentText:
    # Browsers send line ends as two characters, but count one against the limit.
    return CommentText({"text": request.POST.get("text", "").replace("\r\n", "\n")})


def _own(request: HttpRequest, number: int) -> Comment:
    access = access_of(request)
    visible = comments.visible_comments(access, _target_of(request))
    return get_object_or_404(visible, number=number, person=access.person)


def _show(target: HubRun | HubClip, comment: Comment) -> HttpResponse:
    return redirect(f"{target.address}?comment={comment.number}#comment-{comment.number}")


ROUTES: list[URLPattern] = [
    route(f"<slug:project>/{target}/comments{path}", view, rule, "POST")
    for target in ("runs/<int:run>", "clips/<int:clip>")
    for path, view, rule in (
        ("", post_comment, AccessRule.READER),
        ("/<int:comment>/edit", edit_comment, AccessRule.READER),
        ("/<int:comment>/delete", delete_comment, AccessRule.READER),
        ("/<int:comment>/hide", hide_comment, AccessRule.OWNER),
    )
]
