"""All routes of the hub. The tests and the benchmark for information leaks enumerate this list."""

from __future__ import annotations

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern

from shoestring_hub.server import api, opening
from shoestring_hub.server.access import AccessRule, route
from shoestring_hub.server.pages import accounts, clips, comments, feed, projects, run, search, table


def health(request: HttpRequest) -> HttpResponse:
    """Whether the hub and its database answer, and whether clips are off."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return HttpResponse("well\nclips are off\n" if settings.HUB_CLIPS.off else "well\n", content_type="text/plain")


urlpatterns: list[URLPattern] = [
    route("health", health, AccessRule.PUBLIC),
    *api.ROUTES,
    *opening.ROUTES,
    *accounts.ROUTES,
    *feed.ROUTES,
    *search.ROUTES,
    *projects.ROUTES,
    *table.ROUTES,
    *run.ROUTES,
    *clips.ROUTES,
    *comments.ROUTES,
]
