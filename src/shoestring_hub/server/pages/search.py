"""The search over runs, clips, comments, projects and people."""

from __future__ import annotations

from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern

from shoestring_hub.server.access import AccessRule, route, sight_of, text_of
from shoestring_hub.server.pages.listing import list_newest
from shoestring_hub.server.text_search import matching, words_of

QUERY = 200
"""Maximum length of a query, in characters."""
SHOWN = 20
"""Maximum number of people and of projects in the results."""


def search(request: HttpRequest) -> HttpResponse:
    """Runs, clips, comments, projects and people that match all words of a query, as far as one may see them."""
    sight, query = sight_of(request), text_of(request.GET, "q", QUERY)
    words, before = words_of(query), request.GET.get("before", "")
    own = list(sight.projects().order_by("slug").values_list("slug", flat=True))
    chosen = request.GET.get("project", "")
    context = {"query": query, "own": own, "chosen": chosen if chosen in own else "", "asked": bool(words)}
    if words:
        runs, clips = matching(sight.runs(), words), matching(sight.clips(), words)
        comments = matching(sight.comments(), words)
        if context["chosen"]:
            runs, clips = runs.filter(project__slug=chosen), clips.filter(project__slug=chosen)
            comments = comments.filter(Q(run__project__slug=chosen) | Q(clip__project__slug=chosen))
        elif not before:
            context["projects"] = matching(sight.projects(), words).order_by("slug")[:SHOWN]
            people = sight.people().filter(username__icontains=query.strip().removeprefix("@"))
            context["people"] = people.order_by("username")[:SHOWN]
        context["listing"] = list_newest(runs, clips, comments, before, words)
        context["known"] = set(sight.people().values_list("pk", flat=True))
    return render(request, "hub/search.html", context)


ROUTES: list[URLPattern] = [route("search", search, AccessRule.LISTING)]
