"""The feed, following people and projects, and the pages of people."""

from __future__ import annotations

from django.db.models import Exists, OuterRef, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import URLPattern

from shoestring_hub.server.access import AccessRule, access_of, route, sight_of, text_of
from shoestring_hub.server.models import Follow, Mention
from shoestring_hub.server.pages.comments import limited
from shoestring_hub.server.pages.listing import list_newest


def feed(request: HttpRequest) -> HttpResponse:
    """New runs, clips and comments of followed people and projects, and comments that mention the person who reads."""
    sight = sight_of(request)
    people, projects = sight.followed_people(), sight.followed_projects()
    followed = Q(person__in=people) | Q(project__in=projects)
    runs = sight.runs().filter(followed).exclude(person=sight.person)
    clips = sight.clips().filter(followed).exclude(person=sight.person)
    mention = Mention.objects.filter(comment=OuterRef("pk"), person=sight.person)
    comments = sight.comments().annotate(mentions_me=Exists(mention))
    on_followed = Q(run__project__in=projects) | Q(clip__project__in=projects)
    comments = comments.filter(Q(person__in=people) | on_followed | Q(mentions_me=True)).exclude(person=sight.person)
    context = {
        "listing": list_newest(runs, clips, comments, request.GET.get("before", "")),
        "known": set(sight.people().values_list("pk", flat=True)),
        "follows": people.exists() or projects.exists(),
    }
    return render(request, "hub/feed.html", context)


def following(request: HttpRequest) -> HttpResponse:
    """The people and projects that the person who reads may follow, with a button for each."""
    sight = sight_of(request)
    followed = set(sight.followed_people().values_list("pk", flat=True))
    people = sight.people().exclude(pk=sight.person.pk).filter(Q(is_active=True) | Q(pk__in=followed))
    context = {
        "people": [(person, person.pk in followed) for person in people.order_by("username")],
        "projects": sight.projects().order_by("slug"),
        "followed_projects": set(sight.followed_projects().values_list("pk", flat=True)),
    }
    return render(request, "hub/following.html", context)


def person(request: HttpRequest, name: str) -> HttpResponse:
    """The page of a person, with that person's runs, clips and comments in projects shared with the reader."""
    sight = sight_of(request)
    shown = get_object_or_404(sight.people(), username=name)
    listing = list_newest(
        sight.runs().filter(person=shown),
        sight.clips().filter(person=shown),
        sight.comments().filter(person=shown),
        request.GET.get("before", ""),
    )
    context = {
        "person": shown,
        "projects": sight.projects_with(shown).order_by("slug"),
        "followers": sight.followers_of(shown).order_by("username"),
        "followed": sight.followed_people().filter(pk=shown.pk).exists(),
        "listing": listing,
        "known": {shown.pk},
    }
    return render(request, "hub/person.html", context)


@limited
def follow_person(request: HttpRequest, name: str) -> HttpResponse:
    """Follow somebody with whom one shares a project, or stop following."""
    sight = sight_of(request)
    followed = get_object_or_404(sight.people().exclude(pk=sight.person.pk), username=name)
    if request.POST.get("follow") != "yes":
        Follow.objects.filter(follower=sight.person, person=followed).delete()
    elif followed.is_active:
        Follow.objects.get_or_create(follower=sight.person, person=followed)
    else:
        raise Http404
    if text_of(request.POST, "from", 20) == "following":
        return redirect("following")
    return redirect("person", name=followed.username)


@limited
def follow_project(request: HttpRequest) -> HttpResponse:
    """Follow a project, or stop following it."""
    access = access_of(request)
    if request.POST.get("follow") == "yes":
        Follow.objects.get_or_create(follower=access.person, project=access.project)
    else:
        Follow.objects.filter(follower=access.person, project=access.project).delete()
    return redirect("following")


# No project has an @ in its name, so the pages of people take no address away from projects.
ROUTES: list[URLPattern] = [
    route("feed", feed, AccessRule.LISTING),
    route("following", following, AccessRule.LISTING),
    route("@<str:name>", person, AccessRule.LISTING),
    route("@<str:name>/follow", follow_person, AccessRule.LISTING, "POST"),
    route("<slug:project>/follow", follow_project, AccessRule.READER, "POST"),
]
