"""Private means private: every route, everybody, two projects."""

import pytest
from django.http import Http404
from django.test import Client
from django.urls import path

pytestmark = pytest.mark.usefixtures("configured")

STORED = {"worker_script", "template_texts", "speculation_rules"}
LINKED = {"shared_clip", "shared_video", "shared_poster"}
"""What whoever has a link to a clip may see; `test_clips.py` says which links lead to it."""
PUBLIC = {"health", "sign_in", "sign_out", "reset_password", "join"} | STORED | LINKED
CHANGING = {"edit_run", "archive_run", "delete_run"}
CHANGING |= {"post_clip", "put_clip_chunk", "edit_clip", "delete_clip", "retry_clip"}
OWNERS = {"people", "invite", "withdraw_invitation", "set_role", "edit_project", "hide_comment"}
OWNERS |= {"hide_clip", "share_clip", "revoke_share"}
LISTINGS = {"feed", "following", "person", "follow_person", "search"}
READERS_WRITE = {"tokens", "revoke_token", "post_comment", "edit_comment", "delete_comment", "follow_project"}
"""What readers may change: only what is their own."""


@pytest.fixture(scope="module")
def sides(configured):
    from tests.rigs.hub.leaks import Side

    return Side("alpha").seed(), Side("beta").seed()


def test_nobody_reaches_another_project(sides):
    from tests.rigs.hub.leaks import attack

    attempts = attack(*sides, methods=())
    assert not attempts.leaks
    assert attempts.tried > 1000 and attempts.admitted > 20


def test_a_route_without_a_rule_is_found(monkeypatch):
    """Every route is made by `route`, which needs a rule; one that is not has none."""
    from shoestring_hub.server.urls import health, urlpatterns

    ruled = lambda patterns: all(hasattr(pattern.callback, "rule") for pattern in patterns)  # noqa: E731
    assert ruled(urlpatterns)
    assert not ruled([*urlpatterns, path("open", lambda request: health(request))])


def test_the_rules_are_those_that_are_meant():
    from shoestring_hub.server.access import AccessRule
    from shoestring_hub.server.urls import urlpatterns

    rules = {pattern.name: pattern.callback.rule for pattern in urlpatterns}
    of = lambda rule: {name for name, one in rules.items() if one is rule}  # noqa: E731
    assert of(AccessRule.PUBLIC) == PUBLIC
    assert of(AccessRule.PERSON) == {"home", "account"}
    assert of(AccessRule.LISTING) == LISTINGS
    assert {p.name for p in urlpatterns if "POST" in p.callback.methods} & of(AccessRule.READER) == READERS_WRITE
    assert of(AccessRule.WRITER) == CHANGING and of(AccessRule.OWNER) == OWNERS
    assert of(AccessRule.TOKEN) == {"whoami"} and of(AccessRule.TOKEN_READ) == {"list_files", "get_chunk", "get_log"}
    for pattern in urlpatterns:  # what changes something is not asked for by GET
        if pattern.callback.rule in (AccessRule.WRITER, AccessRule.OWNER) and pattern.name != "people":
            assert pattern.callback.methods in (("POST",), ("PUT",))


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("fault", ["role", "project", "token", "sight", "people", "comments", "clips"])
def test_the_attack_sees_a_fault(sides, monkeypatch, fault):
    """Each check of `access`, taken away, is a leak that the attack finds."""
    from shoestring_hub.server import access, sight
    from shoestring_hub.server.models import Comment, HubClip, HubRun, Member, Person, Project, Role
    from tests.rigs.hub.leaks import attack

    def any_role(person, slug, number):
        project = Project.objects.get(slug=slug)
        return access.Access(person, project, Role.OWNER, HubRun.objects.filter(project=project, number=number).first())

    def any_run(person, slug, number):
        found = Member.objects.select_related("project").filter(person=person, project__slug=slug).first()
        run = HubRun.objects.filter(number=number, project__slug="beta").first()
        if found is None or (number and run is None):
            raise Http404
        return access.Access(person, found.project, Role(found.role), run)

    real = access._access_of_token
    faults = {
        "role": (access, "_access_of_person", any_role),
        "project": (access, "_access_of_person", any_run),
        "token": (access, "_access_of_token", lambda request, rule: real(request, access.AccessRule.TOKEN)),
        "sight": (sight.Sight, "_shared", Member.objects.values("project")),
        "people": (sight.Sight, "people", lambda self: Person.objects.all()),
        "comments": (sight.Sight, "comments", lambda self: Comment.objects.all()),
        "clips": (access, "_clip_of", lambda _, number: HubClip.objects.get(number=number, project__slug="beta")),
    }
    monkeypatch.setattr(*faults[fault])
    assert attack(*sides, methods=("GET",)).leaks


def test_forms_of_other_sites_change_nothing(sides):
    client = Client(enforce_csrf_checks=True)
    client.force_login(sides[0].people["owner"])
    for address in ("/alpha/edit", "/alpha/runs/1/delete", "/alpha/people/invite", "/sign-out", "/"):
        assert client.post(address, {"slug": "forged", "notes": "forged"}).status_code == 403


def test_uploaded_pages_run_without_the_hubs_origin_and_files_are_attachments(sides):
    client = Client()
    client.force_login(sides[0].people["reader"])
    run = sides[0].run.number
    report = client.get(f"/alpha/runs/{run}/report")
    assert report["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in report["Content-Security-Policy"]
    file = client.get(f"/alpha/runs/{run}/files/report.html")
    assert file["Content-Disposition"] == 'attachment; filename="report.html"'
    for answer in (report, file, client.get("/alpha/")):
        assert answer["X-Content-Type-Options"] == "nosniff" and answer["Cache-Control"] == "private, no-store"


def test_a_deactivated_person_loses_access_at_once_and_the_runs_stay(sides):
    from shoestring_hub.server.models import Person

    client, writer = Client(), sides[0].people["writer"]
    client.force_login(writer)
    assert client.get("/alpha/").status_code == 200
    token = {"Authorization": f"Bearer {sides[0].tokens['writer']}"}
    assert Client().get("/api/whoami", headers=token).status_code == 200
    Person.objects.filter(pk=writer.pk).update(is_active=False)
    assert client.get("/alpha/").status_code == 302
    assert Client().get("/api/whoami", headers=token).status_code == 401
    Person.objects.filter(pk=writer.pk).update(is_active=True)


def test_notes_are_markdown_without_html(sides):
    from shoestring_hub.server.pages.filters import markdown

    text = markdown(
        "# Head\n<script>alert(1)</script> [x](javascript:alert(1)) <img src=x onerror=alert(1)> **b** | a |\n"
    )
    assert "<h1>Head</h1>" in text and "<strong>b</strong>" in text
    assert "<script" not in text and "<img" not in text and 'href="javascript' not in text
