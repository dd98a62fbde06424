"""Pages in parts: what is put together equals the whole page, and nobody is sent what is not theirs."""

import json
import re
import zlib

import pytest
from django.test import Client, override_settings
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("configured")
CONTROLS = "\x02\x03 -1\x03 \u2028 <tr> 37,</script> \U0001f600 é"


@pytest.fixture(scope="module")
def sides(configured):
    from shoestring_hub.server.models import HubRun
    from tests.rigs.hub.leaks import Side

    sides = Side("opening").seed(), Side("closed").seed()
    HubRun.objects.filter(project=sides[0].project, number=1).update(name=f"a {CONTROLS}")
    return sides


@pytest.fixture
def owner(sides):
    client = Client()
    client.force_login(sides[0].people["owner"])
    return client


def paths(side):
    """An address of each route whose page is taken apart."""
    from shoestring_hub.server.opening import PAGES
    from shoestring_hub.server.urls import urlpatterns
    from tests.rigs.hub import leaks

    pages = [pattern for pattern in urlpatterns if pattern.name in PAGES]
    assert {pattern.name for pattern in pages} == PAGES
    addresses = [next(leaks.paths(pattern, side, side)) for pattern in pages]
    return [f"{address}?run={side.run.number}" if "compare" in address else address for address in addresses]


def ask(client, path, **headers):
    from shoestring_hub.server.opening import version

    return client.get(path, headers={"Hub-Parts": version()} | {k.replace("_", "-"): v for k, v in headers.items()})


def put_together(body, have=()):
    """The lines of an answer, as the worker reads them."""
    lines = []
    for line in body.split("\n"):
        if line.startswith("="):
            first, count = map(int, line[1:].split(","))
            assert count and first + count <= len(have)
            lines += have[first : first + count]
        else:
            lines.append(line)
    return lines


def sums(lines):
    return "".join(f"{zlib.crc32(line.encode()):08x}" for line in lines)


def page_of(lines, token, texts):
    items = [item for line in lines for item in json.loads(line)]
    return "".join(item if isinstance(item, str) else token if item < 0 else texts[item] for item in items)


@pytest.mark.slow
@pytest.mark.parametrize("numbered", [True, False])
def test_what_is_put_together_is_the_page(sides, owner, numbered):
    from shoestring_hub.server.configure import Opening
    from shoestring_hub.server.opening import version

    with override_settings(HUB_OPENING=Opening(keep_templates=numbered)):
        texts = Client().get(f"/texts.json?{version()}").json()
        assert len(texts) > 100 if numbered else texts == []
        for path in paths(sides[0]):
            answer, whole = ask(owner, path), owner.get(path)
            assert answer["Content-Type"] == "application/x-hub-page" and whole["Content-Type"].startswith("text/html")
            token = re.search(r'csrfmiddlewaretoken" value="(\w+)"', whole.content.decode())
            lines = put_together(answer.content.decode())
            assert page_of(lines, token[1], texts) == whole.content.decode(), path
            assert len(answer["Hub-Form-Token"]) == len(token[1])
            for header in ("Content-Security-Policy", "Cache-Control", "X-Frame-Options", "Referrer-Policy"):
                assert answer[header] == whole[header]
        assert len(answer.content) < len(whole.content) or not numbered


def test_only_what_has_changed_is_sent(sides, owner):
    from shoestring_hub.server.models import HubRun
    from shoestring_hub.server.parts import SHORTEST, etag_of

    side = sides[0]
    path = f"/{side.slug}/"
    first = ask(owner, path)
    lines = put_together(first.content.decode())
    assert first["ETag"] == etag_of(lines)
    same = ask(owner, path, If_None_Match=first["ETag"])
    assert same.status_code == 304 and not same.content and same["Cache-Control"] == "private, no-store"
    HubRun.objects.filter(pk=side.run.pk).update(name="another name")
    have = [line for line in lines if len(line) >= SHORTEST]
    changed = ask(owner, path, If_None_Match=first["ETag"], Hub_Have=sums(have))
    assert changed.status_code == 200 and b"another name" in changed.content
    assert len(changed.content) < len(first.content) / 3
    now = put_together(changed.content.decode(), have)
    assert changed["ETag"] == etag_of(now) and now == put_together(ask(owner, path).content.decode())
    malformed = ask(owner, path, Hub_Have="x" * 16)
    assert put_together(malformed.content.decode()) == now
    HubRun.objects.filter(pk=side.run.pk).update(name=side.run.name)


def test_what_is_switched_off_is_not_used(sides, owner):
    from shoestring_hub.server.configure import Opening

    path = f"/{sides[0].slug}/"
    page = owner.get(path)
    assert 'data-worker="/worker.js?' in page.content.decode() and "data-ahead" in page.content.decode()
    assert page["Speculation-Rules"].startswith('"/rules.json?')
    with override_settings(HUB_OPENING=Opening(send_differences=False)):
        lines = put_together(ask(owner, path).content.decode())
        assert not any(line.startswith("=") for line in ask(owner, path, Hub_Have=sums(lines)).content.decode().split())
    with override_settings(HUB_OPENING=Opening(fetch_ahead=False)):
        page = owner.get(path)
        assert "data-ahead" not in page.content.decode() and "Speculation-Rules" not in page
        assert ask(owner, path, Hub_Ahead="99999").status_code == 503
        assert owner.get(path, headers={"Sec-Purpose": "prefetch"}).status_code == 503
    with override_settings(HUB_OPENING=Opening(keep_templates=False, send_differences=False)):
        assert 'data-worker=""' in owner.get(path).content.decode()
        assert ask(owner, path)["Content-Type"].startswith("text/html")


ITEMS = st.lists(st.integers(-1, 9) | st.text(max_size=30) | st.just("37,1.5,<tr>" * 400), max_size=20)


@pytest.mark.slow
@settings(max_examples=40)
@given(ITEMS, ITEMS, st.randoms())
def test_any_page_is_put_together_from_any_other(items, before, random):
    from shoestring_hub.server import parts

    lines, old = parts.lines_of(items, {1, 2}), parts.lines_of(before, {1, 2})
    have = [line for line in [*old, *lines[::2], *lines[1::3]] if len(line) >= parts.SHORTEST]
    random.shuffle(have)
    body = parts.difference(lines, parts.positions_of(sums(have)))
    assert put_together(body, have) == lines or not lines
    assert [item for line in lines for item in json.loads(line) if isinstance(item, int)] == [
        item for item in items if isinstance(item, int)
    ]
    assert page_of(lines, "token", "0123456789") == page_of([json.dumps(items)], "token", "0123456789")


def test_a_number_that_is_appended_moves_few_lines():
    """What is appended to each of several lists changes the end of each, not the rest."""
    from shoestring_hub.server import parts

    lists = lambda count: json.dumps([[n * 7 % 1009 for n in range(count)]] * 4)  # noqa: E731
    before, after = (parts.lines_of([lists(count)], ()) for count in (3000, 3003))
    assert len(parts.difference(after, parts.positions_of(sums(before)))) < sum(map(len, after)) / 10


# -- rights -----------------------------------------------------------------------------------------------------------


def test_who_may_not_see_a_page_gets_no_part_of_it_even_with_its_tag(sides, owner):
    from shoestring_hub.server.models import Member, Person, Role

    for path in paths(sides[0])[1:]:
        if sides[0].slug not in path:
            continue
        tag = ask(owner, path)["ETag"]
        reader = sides[0].people["reader"]
        client = Client()
        client.force_login(reader)
        Member.objects.filter(project=sides[0].project, person=reader).delete()
        for headers in ({}, {"Hub_Ahead": "99999"}):
            answer = ask(client, path, If_None_Match=tag, **headers)
            assert answer.status_code == 404 and sides[0].word not in answer.content.decode()
            assert b"\x02" not in answer.content and b"Not found" in answer.content
        Member.objects.create(project=sides[0].project, person=reader, role=Role.READER)
        Person.objects.filter(pk=reader.pk).update(is_active=False)
        assert ask(client, path, If_None_Match=tag).status_code == 302
        Person.objects.filter(pk=reader.pk).update(is_active=True)
        assert ask(Client(), path, If_None_Match=tag).status_code == 302


def test_refusals_and_other_pages_are_whole_even_for_the_worker(sides):
    client = Client()
    client.force_login(sides[0].people["reader"])
    refused = ask(client, f"/{sides[0].slug}/people")
    assert refused.status_code == 403 and b"Not allowed" in refused.content and b"\x02" not in refused.content
    assert b"csrfmiddlewaretoken" in refused.content
    signing_in = ask(Client(), "/sign-in")
    assert signing_in["Content-Type"].startswith("text/html") and b"\x02" not in signing_in.content
    assert ask(client, f"/{sides[0].slug}/runs.csv")["Content-Type"].startswith("text/csv")


@pytest.mark.slow
def test_only_pages_are_fetched_ahead_and_they_change_nothing(sides, owner):
    from shoestring_hub.server.models import AuditEvent, Person
    from shoestring_hub.server.opening import LINK_BYTES, PAGES
    from shoestring_hub.server.urls import urlpatterns
    from tests.rigs.hub import leaks

    side = sides[0]

    def state():
        people = Person.objects.order_by("pk").values_list("password", "last_login", "is_active")
        return side.rows(), AuditEvent.objects.count(), list(people)

    before = state()
    for pattern in urlpatterns:
        path = next(leaks.paths(pattern, side, side))
        for headers in ({"Hub-Ahead": "100000"}, {"Sec-Purpose": "prefetch"}, {"Sec-Purpose": "prefetch;prerender"}):
            answer = owner.get(path, headers=headers)
            if pattern.name in PAGES:
                assert answer.status_code == 200 or pattern.name == "compare"
                assert len(answer.content) <= LINK_BYTES
                assert ("data-unchecked" in answer.content.decode()) == (
                    "Sec-Purpose" in headers and answer.status_code == 200
                )
                assert "<title>" not in answer.content.decode() or "Sec-Purpose" not in headers
            else:
                assert answer.status_code == 503 and not answer.content
            assert owner.post(path, {"notes": "x", "slug": "made-ahead"}, headers=headers).status_code == 503
    assert state() == before
    page = f"/{side.slug}/"
    size = len(ask(owner, page).content)
    assert ask(owner, page, Hub_Ahead=str(size)).status_code == 200
    for limit in (str(size - 1), "0", "-1", "x", "9" * 30):
        assert ask(owner, page, Hub_Ahead=limit).status_code == 503


def test_what_is_stored_for_long_is_the_same_for_everybody(sides, owner):
    from shoestring_hub.server.opening import version

    for path in ("/worker.js", "/texts.json", "/rules.json"):
        answers = [client.get(f"{path}?{version()}") for client in (owner, Client())]
        assert answers[0].content == answers[1].content and sides[0].slug.encode() not in answers[0].content
        assert answers[0]["Cache-Control"] == "public, max-age=31536000, immutable"
        assert owner.get(f"{path}?0")["Cache-Control"] == "private, no-store"


def test_signing_out_empties_what_the_browser_has(sides):
    client = Client()
    client.force_login(sides[0].people["writer"])
    answer = client.post("/sign-out")
    assert answer.status_code == 302 and '"cache", "storage"' in answer["Clear-Site-Data"]
    assert "cookies" not in answer["Clear-Site-Data"]  # which would end sessions of other sites of the domain


def test_colours_are_one_of_two(owner):
    owner.cookies["theme"] = "dark"
    assert 'data-theme="dark"' in owner.get("/").content.decode()
    owner.cookies["theme"] = 'x" onload=alert(1)'
    assert "data-theme" not in owner.get("/").content.decode()
