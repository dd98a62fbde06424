"""Who may comment, follow and search, who sees what of whom, and in which order."""

import re
from datetime import timedelta
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.hub.lab import Lab, rows, signed_in, text_at

pytestmark = pytest.mark.usefixtures("configured")

# -- rights -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labs(configured):
    """Two projects with runs and comments of each kind; `both` reads in one and writes in the other."""
    from django.utils import timezone

    from shoestring_hub.server.models import Follow, HubRun, Person

    red, blue = (Lab(slug) for slug in ("red", "blue"))
    both = red.add("both", "reader")
    blue.add("both", "writer")
    left = red.add("left", "writer")
    for lab in (red, blue):
        lab.comment("writer", f"open{lab.slug} to all of @{lab.slug}-reader and @both")
        lab.comment("writer", f"veiled{lab.slug} @{lab.slug}-reader @both", hidden=timezone.now())
        lab.comment(both, f"shared{lab.slug}")
        gone = lab.push(lab.people["writer"], f"gone{lab.slug}")
        lab.comment("writer", f"gone{lab.slug} @both", gone)
        HubRun.objects.filter(pk=gone.pk).update(deleted=timezone.now())
        erased = lab.comment("reader", f"erased{lab.slug}")
        signed_in(lab.people["reader"]).post(f"{lab.page}/comments/{erased.number}/delete")
    red.comment(left, "openred says who left")
    left.memberships.all().delete()
    everybody = [*Person.objects.filter(username__regex="^(red|blue)-|^(both|left)$")]
    for person in everybody:  # all that could be followed, also where it has no effect
        Follow.objects.bulk_create(Follow(follower=person, person=other) for other in everybody if other != person)
        Follow.objects.bulk_create(Follow(follower=person, project=lab.project) for lab in (red, blue))
    return {"red": red, "blue": blue}


ROLES = [(slug, role) for slug in ("red", "blue") for role in ("owner", "writer", "reader")]


@pytest.mark.slow
@pytest.mark.parametrize("who", [*(f"{slug}-{role}" for slug, role in ROLES), "both", "left"])
def test_every_listing_shows_what_lies_in_ones_own_projects(labs, who):
    from shoestring_hub.server.models import Member, Person, Role

    person = Person.objects.get(username=who)
    roles = dict(Member.objects.filter(person=person).values_list("project__slug", "role"))
    client = signed_in(person)
    names = [f"{slug}-{role}" for slug, role in ROLES]
    addresses = ["/feed", "/following", "/search?q=re", "/search?q=ve", "/search?q=of", "/search?q=sha", "/search?q=go"]
    addresses += ["/search?q=erased", "/search?q=red", "/search?q=blue"]
    pages = {address: text_at(client, address) for address in [*addresses, "/search?q=open", "/search?q=veiled"]}
    for name in names:
        answer = client.get(f"/@{name}")
        assert answer.status_code == (200 if name.partition("-")[0] in roles else 404), name
        pages[f"/@{name}"] = answer.content.decode()
    shown = " ".join(re.sub(r' value="[^"]*"', "", text) for text in pages.values())
    for slug in ("red", "blue"):
        role = roles.get(slug, 0)
        assert (f"open{slug}" in shown) == bool(role)
        assert (f"/{slug}/" in shown) == (f"{slug}-" in shown) == (f">{slug}<" in shown) == bool(role)
        assert (f"veiled{slug}" in shown) == (role == Role.OWNER or who == f"{slug}-writer")
        assert f"gone{slug}" not in shown and f"erased{slug}" not in shown
    expected = sum(slug in roles for slug in ("red", "blue"))
    assert len(rows(pages["/search?q=open"])) == (expected + ("red" in roles))


@pytest.mark.parametrize("slug", ["red", "blue"])
@pytest.mark.parametrize("role", ["owner", "writer", "reader", "other project", "nobody", "deactivated"])
def test_who_may_comment_edit_delete_and_hide(labs, role, slug):
    from django.test import Client

    from shoestring_hub.server.models import Comment, Person

    lab, other = labs[slug], labs["blue" if slug == "red" else "red"]
    if role == "deactivated":
        person, _ = Person.objects.get_or_create(username=f"{slug}-gone", defaults={"is_active": False})
        client = signed_in(person)
    else:
        person = other.people["owner"] if role == "other project" else lab.people.get(role)
        client = signed_in(person) if person else Client()
    here = role in lab.people
    refused = {"other project": 404}.get(role, 302)
    before = Comment.objects.filter(run=lab.run).count()
    answer = client.post(f"{lab.page}/comments", {"text": f"by {role}"})
    assert answer.status_code == (302 if here else refused)
    assert Comment.objects.filter(run=lab.run).count() == before + here
    if not here:
        assert "comment" not in answer.headers.get("Location", "").partition("?")[0]
    own = answer["Location"].partition("#comment-")[2] if here else "1"
    edited = client.post(f"{lab.page}/comments/{own}/edit", {"text": "edited"})
    assert edited.status_code == (302 if here else refused)
    left = Person.objects.get(username="left")
    others = Comment.objects.create(run=lab.run, number=1000 + before, person=left, text="x")
    for act in ("edit", "delete"):
        answer = client.post(f"{lab.page}/comments/{others.number}/{act}", {"text": "forged"})
        assert answer.status_code == (404 if here else refused)
    hidden = client.post(f"{lab.page}/comments/{others.number}/hide", {"hidden": "yes"})
    assert hidden.status_code == ({"owner": 302}.get(role, 403) if here else refused)
    others.refresh_from_db()
    assert (others.text, others.hidden is not None) == ("x", role == "owner")
    if here:
        assert client.post(f"{lab.page}/comments/{own}/delete").status_code == 302
        assert Comment.objects.get(run=lab.run, number=own).text == ""
        assert client.post(f"{lab.page}/comments/{own}/edit", {"text": "back"}).status_code == 404
    others.delete()


def test_a_follower_is_shown_only_where_all_three_share_a_project(configured):
    from shoestring_hub.server.models import Follow

    hidden, first, second = Lab("hidden-one", "owner"), Lab("first-one", "owner"), Lab("second-one", "owner")
    followed, follower = hidden.people["owner"], hidden.add("follower", "reader")
    viewer = first.people["owner"]
    first.add(followed.username, "reader")
    second.add(viewer.username, "reader")
    second.add("follower", "reader")
    Follow.objects.create(follower=follower, person=followed)
    assert "follower" not in text_at(signed_in(viewer), f"/@{followed.username}")
    assert "follower</a>" in text_at(signed_in(viewer), "/following")  # they share a project, but not with the third
    assert "follower</a>" in text_at(signed_in(followed), f"/@{followed.username}")
    first.add("follower", "reader")
    assert "follower</a>" in text_at(signed_in(viewer), f"/@{followed.username}")


def test_nobody_learns_whether_a_person_or_a_comment_exists(labs):
    from shoestring_hub.server.models import Mention

    red, blue = labs["red"], labs["blue"]
    client = signed_in(red.people["owner"])
    answers = [client.get(f"/@{name}") for name in ("blue-owner", "nobody-at-all", "%00", "a%2Fb")]
    assert [answer.status_code for answer in answers] == [404] * 4
    told = [re.sub(rb' value="[^"]*"', b"", answer.content) for answer in answers[:2]]  # without tokens of forms
    assert told[0] == told[1]
    assert client.post("/@blue-owner/follow", {"follow": "yes"}).status_code == 404
    text = "@blue-owner @nobody-at-all @red-reader"
    client.post(f"{red.page}/comments", {"text": text})
    page = text_at(client, red.page)
    assert '<a href="/@red-reader" rel="noopener noreferrer nofollow">@red-reader</a>' in page
    assert "<p>@blue-owner @nobody-at-all " in page
    assert not Mention.objects.filter(person=blue.people["owner"]).exists()
    numbers = list(red.run.comments.order_by("number").values_list("number", flat=True))
    assert numbers == sorted(set(numbers)) and numbers[0] == 1  # numbers count the comments of the run alone


# -- the feed ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_feed(configured, request):
    """A project with 70 comments and 5 runs, many of them at the same time; somebody follows it."""
    from django.utils import timezone

    from shoestring_hub.server.models import Follow, HubRun

    lab = Lab(f"long-{abs(hash(request.node.name)) % 10**9}")
    start = timezone.now() - timedelta(hours=1)
    for number in range(5):
        run = lab.push(lab.people["writer"], f"run {number}")
        HubRun.objects.filter(pk=run.pk).update(created=start + timedelta(microseconds=number // 2))
    for number in range(70):
        lab.comment("writer", f"text {number}", created=start)
    Follow.objects.create(follower=lab.people["reader"], project=lab.project)
    return lab


def walk(client, address="/feed"):
    """The rows of all pages of a listing, page by page."""
    path = address
    for page in count():
        if not path:
            break
        assert page < 10
        text = text_at(client, path)
        yield rows(text)
        place = re.search(r'href="\?((?:[^"]*&amp;)?before=[\d.]+)"', text)
        path = f"{address.partition('?')[0]}?{place[1].replace('&amp;', '&')}" if place else ""


@pytest.mark.slow
def test_the_feed_is_newest_first_and_its_pages_neither_repeat_nor_miss_a_row(long_feed):
    from shoestring_hub.server.models import Comment, HubRun

    expected = [(run.created, 1, run.pk, (run.number, 0)) for run in HubRun.objects.filter(project=long_feed.project)]
    comments = Comment.objects.filter(run__project=long_feed.project).select_related("run")
    expected += [(one.created, 0, one.pk, (one.run.number, one.number)) for one in comments]
    ordered = [row[-1] for row in sorted(expected, reverse=True)]
    client = signed_in(long_feed.people["reader"])
    pages = list(walk(client))
    assert [len(page) for page in pages] == [30, 30, 16]
    assert [row[1:] for page in pages for row in page] == ordered
    on_page = [row for page in walk(client, f"/@{long_feed.slug}-writer") for row in page]
    assert len(on_page) == len(set(on_page)) == 75
    searched = [row for page in walk(client, f"/search?q=text&project={long_feed.slug}") for row in page]
    assert len(searched) == len(set(searched)) == 70


def test_what_arrives_while_one_reads_on_moves_nothing(long_feed):
    soon_gone = long_feed.comment("writer", "soon gone")
    pages = walk(signed_in(long_feed.people["reader"]))
    first = next(pages)
    long_feed.comment("writer", "the newest of all")
    client = signed_in(long_feed.people["writer"])
    assert client.post(f"{long_feed.page}/comments/{soon_gone.number}/delete").status_code == 302
    later = [row for page in pages for row in page]
    assert len(first) + len(later) == 77 and not {*first} & {*later}


def test_the_feed_says_what_one_follows_and_who_mentions_one(configured):
    lab = Lab("followed")
    owner, writer, reader = lab.people.values()
    client = signed_in(reader)
    assert rows(text_at(client, "/feed")) == [] and "You follow nobody" in text_at(client, "/feed")
    lab.comment("writer", "to @followed-reader.")
    assert rows(text_at(client, "/feed")) == [("followed", 1, 1)] and "mentions you" in text_at(client, "/feed")
    lab.comment("writer", "to nobody")
    client.post("/@followed-writer/follow", {"follow": "yes"})
    assert rows(text_at(client, "/feed")) == [("followed", 1, 2), ("followed", 1, 1)]
    assert 'href="/@followed-reader">' in text_at(client, "/@followed-writer")
    client.post("/followed/follow", {"follow": "yes"})
    lab.comment("reader", "one's own is no news")
    assert rows(text_at(client, "/feed")) == [("followed", 1, 2), ("followed", 1, 1), ("followed", 1, 0)]
    for address in ("/@followed-writer/follow", "/followed/follow"):
        client.post(address, {"follow": "no"})
    assert rows(text_at(client, "/feed")) == [("followed", 1, 1)]
    assert client.post("/@followed-reader/follow", {"follow": "yes"}).status_code == 404  # oneself
    signed_in(writer).post(f"{lab.page}/comments/1/edit", {"text": "to @followed-owner"})
    assert rows(text_at(client, "/feed")) == [] and rows(text_at(signed_in(owner), "/feed")) == [("followed", 1, 1)]


def test_losing_a_role_empties_the_feed_at_once_and_gaining_it_brings_it_back(configured):
    lab = Lab("lost")
    client = signed_in(lab.people["reader"])
    client.post("/lost/follow", {"follow": "yes"})
    assert rows(text_at(client, "/feed"))
    signed_in(lab.people["owner"]).post(f"/lost/people/{lab.people['reader'].pk}", {"role": ""})
    assert rows(text_at(client, "/feed")) == []
    assert "lost" not in text_at(client, "/following").replace("lost-reader", "")
    lab.add("lost-reader", "reader")
    assert rows(text_at(client, "/feed"))


# -- search -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40) | st.text("\"'*():^-+{}NEARANDORNOT \\&|!<>@%_", max_size=12))
def test_no_query_and_no_place_fails(labs, text):
    from shoestring_hub.server.pages.listing import list_newest
    from shoestring_hub.server.sight import Sight
    from shoestring_hub.server.text_search import excerpt, matching, words_of

    sight, words = Sight(labs["red"].people["reader"]), words_of(text)
    if words:
        rows = (matching(rows, words) for rows in (sight.runs(), sight.clips(), sight.comments()))
        list_newest(*rows, text, words)
        assert "".join(piece for piece, _ in excerpt(text, words)) == text


@pytest.mark.parametrize("text", ["\0", "'", "99999999999999999.9999", "0.0", "1.1", "9" * 5000, "-1", "🎉 \u0665"])
def test_no_address_fails(labs, text):
    client = signed_in(labs["red"].people["reader"])
    names = {"q": text, "before": text, "project": text, "comment": text, "comments": text}
    for address in ("/search", "/feed", "/@red-writer", labs["red"].page):
        assert client.get(address, names).status_code == 200


def test_the_index_follows_every_change_and_removal(configured):
    from django.db import connection

    from shoestring_hub.server.models import Comment, HubRun
    from shoestring_hub.server.text_search import matching

    lab = Lab("indexed")
    finds = lambda rows, *words: matching(rows, words).count()  # noqa: E731
    HubRun.objects.filter(pk=lab.run.pk).update(name="quixotic", notes="mellifluous")
    comment = lab.comment("writer", "sesquipedalian")
    assert finds(HubRun.objects, "quixotic", "mellif") == 1 == finds(Comment.objects, "sesqui")
    HubRun.objects.filter(pk=lab.run.pk).update(size=5)
    HubRun.objects.filter(pk=lab.run.pk).update(name="plain")
    assert finds(HubRun.objects, "quixotic") == 0 and finds(HubRun.objects, "mellifluous") == 1
    Comment.objects.filter(pk=comment.pk).delete()
    HubRun.objects.filter(pk=lab.run.pk).delete()
    assert finds(HubRun.objects, "mellifluous") == 0 == finds(Comment.objects, "sesqui")
    with connection.cursor() as cursor:
        for table in ("hub_hubrun", "hub_comment", "hub_project", "hub_hubclip"):
            cursor.execute(f"INSERT INTO {table}_words({table}_words, rank) VALUES ('integrity-check', 1)")


@pytest.mark.slow
def test_what_a_hub_had_before_the_search_is_found_as_well(tmp_path):
    from tests.rigs.hub.people import upgraded

    assert upgraded(tmp_path / "hub") == "1 1 2 1\n"


@pytest.mark.slow
def test_search_and_feed_at_a_hub(server, ada, project, tmp_path):
    from shoestring_hub.client.push import push
    from tests.rigs.hub.folders import write_run
    from tests.rigs.hub.people import check_feed, check_search, newcomer

    for number in range(2):
        push(write_run(tmp_path / f"{number}", name=f"run {number}", files=0))
    grace = newcomer(server, ada, project, 1)
    check_search(ada, grace, project)
    check_feed(ada, grace, project)


def test_listings_take_their_rows_from_the_sight_of_the_person():
    """Modules of listings ask no table but through `sight_of`, except for what is about the person alone."""
    from importlib import resources

    pages = resources.files("shoestring_hub.server.pages")
    for name in ("listing", "search", "feed"):
        asked = re.findall(r"(\w+)\.objects", (pages / f"{name}.py").read_text())
        assert set(asked) <= {"Follow", "Mention"}, name
