"""Comments on runs: hostile ones, hidden ones, mentions, pages and limits."""

import re

import pytest

from tests.rigs.hub.lab import Lab, rows, signed_in, text_at

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(scope="module")
def lab(configured):
    return Lab("commented")


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)> ![x](javascript:alert(1)) ![x](https://elsewhere.example/pixel.png)",
    "[x](javascript:alert(1)) [x](data:text/html,<script>) <javascript:alert(1)> [x](vbscript:x 'onclick=\"')",
    "</article></section></main><form action='https://elsewhere.example'><input name=password>",
    "<div id=main class=bad style='position:fixed'>&lt;script&gt; <!-- <iframe srcdoc='<script>'>",
    "{% csrf_token %} {{ request.user.password }} {{ run.key }}",
    '@owner<script> [@x](/sign-out) @"onmouseover=alert(1) @../../account',
    "\u202egnitirw desrever\u202c \x1b[31m \x7f \x85 \u2066\u2067",
    '[x]: <javascript:alert(1)>\n[x]\n\n```js"><script>\nalert(1)\n```',
    "".join("# " * 3 + "x\n" for _ in range(400)),
    "[" * 5000,
    "![" * 2500,
    "*_" * 2500,
    "> " * 2400 + "x",
    "- " * 2400 + "x",
    "`" * 4999,
    "a|" * 1200 + "\n" + "-|" * 1200,
    "@" * 5000,
    "@hostile-reader" * 300,
    "[a](" * 1200,
    "x" * 5000,
]


@pytest.mark.slow
def test_hostile_comments_are_text(configured):
    lab = Lab("hostile")
    client = signed_in(lab.people["writer"])
    for text in HOSTILE:
        assert client.post(f"{lab.page}/comments", {"text": text}).status_code == 302, text[:40]
    for address in (lab.page, "/search?q=x", "/search?q=script", "/@hostile-writer"):
        answer = signed_in(lab.people["reader"]).get(address)
        assert answer["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        page = answer.content.decode()
        rendered = page[page.index("<main") : page.index("</main>")]
        tags = " ".join(re.findall(r"<[^>]*>", rendered))
        assert not re.search(r"(javascript|vbscript|data):|\son\w+\s*=|srcdoc|style=|<(iframe|object|base|meta)", tags)
        scripts = [tag for tag in re.findall(r"<script[^>]*>", rendered) if 'type="application/json"' not in tag]
        assert scripts == [] and "elsewhere.example" not in "".join(re.findall(r"<form[^>]*>", rendered))
        assert page.count("</main>") == page.count("</body>") == 1
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    shown = text_at(signed_in(lab.people["reader"]), lab.page)
    assert "{{ run.key }}" in shown and "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>" in shown


@pytest.mark.parametrize("text", ["", "  \r\n ", "\x07\x1b", "\u202e", "x" * 5001, "a\0b"])
def test_what_is_no_comment_is_shown_again_with_a_reason(lab, text):
    client, before = signed_in(lab.people["writer"]), lab.run.comments.count()
    answer = client.post(f"{lab.page}/comments", {"text": text})
    assert answer.status_code == 400 and b'class="bad"' in answer.content and b'name="text"' in answer.content
    assert lab.run.comments.count() == before
    lines = "\r\n".join("x" * 2500)  # as browsers send 2,500 lines, which their limit counts as 4,999 characters
    assert client.post(f"{lab.page}/comments", {"text": lines}).status_code == 302
    lab.run.comments.order_by("-number").first().delete()


def test_mentions_are_links_outside_of_code_and_links():
    from shoestring_hub.server.markdown import mentioned, render_markdown

    people = {"ada", "grace.h", "x-y_z"}
    text = "@ada, @grace.h. (@x-y_z) `@ada` me@ada.org @adam @ada@ada [@ada](/x) **@ada**!\n\n    @ada\n"
    html = render_markdown(text, people)
    assert html.count('<a href="/@ada"') == 2 and html.count('href="/@grace.h"') == 1 == html.count('href="/@x-y_z"')
    assert "<code>@ada</code>" in html and "me@ada.org" in html and "@adam @ada@ada " in html
    assert mentioned(text, people) == people and mentioned("`@ada` ada@ada @bob", people) == set()
    assert "href" not in render_markdown("@ada")


def test_a_hidden_comment_is_seen_by_its_author_and_owners_alone(configured):
    lab = Lab("hiding")
    lab.comment("writer", "an insult")
    lab.comment("reader", "an answer")
    owner, writer, reader = (signed_in(person) for person in lab.people.values())
    owner.post(f"{lab.page}/comments/1/hide", {"hidden": "yes"})
    pages = (lab.page, "/search?q=insult", "/@hiding-writer")
    sees = lambda client: ["insult</" in text_at(client, path) for path in pages]  # noqa: E731
    assert sees(owner) == sees(writer) == [True] * 3 and sees(reader) == [False] * 3
    writer.post(f"{lab.page}/comments/1/edit", {"text": "an edited insult"})
    assert sees(reader) == [False] * 3  # editing brings it back to nobody
    owner.post(f"{lab.page}/comments/1/hide", {"hidden": "no"})
    assert sees(reader) == [True] * 3
    acts = list(lab.project.events.order_by("time").values_list("act", "person", "path"))
    path = f"/hiding/runs/{lab.run.number}/comments/1"
    assert acts == [
        ("hide_comment", "hiding-owner", f"{path}/hide"),
        ("edit_comment", "hiding-writer", f"{path}/edit"),
        ("hide_comment", "hiding-owner", f"{path}/hide"),
    ]


def test_what_people_who_are_gone_have_said_stays_with_their_names(configured):
    from shoestring_hub.server.models import Person

    lab = Lab("staying")
    lab.comment("writer", "before I go")
    owner, reader = signed_in(lab.people["owner"]), signed_in(lab.people["reader"])
    reader.post("/@staying-writer/follow", {"follow": "yes"})
    Person.objects.filter(pk=lab.people["writer"].pk).update(is_active=False)
    for address in (lab.page, "/@staying-writer"):
        text = text_at(reader, address)
        assert "before I go" in text and "deactivated" in text and "staying-writer" in text
    for address in ("/feed", "/search?q=before"):
        assert rows(text_at(reader, address))[0] == ("staying", 1, 1)
    assert owner.post("/@staying-writer/follow", {"follow": "yes"}).status_code == 404
    assert "staying-writer" not in text_at(owner, "/following")
    reader.post("/@staying-writer/follow", {"follow": "no"})
    assert "before I go" not in text_at(reader, "/feed")
    owner.post(f"/staying/people/{lab.people['writer'].pk}", {"role": ""})  # and now removed as well
    text = text_at(reader, lab.page)
    assert "before I go" in text and "staying-writer" in text and "/@staying-writer" not in text
    assert reader.get("/@staying-writer").status_code == 404


@pytest.mark.slow
def test_many_comments_have_pages_and_a_link_leads_to_the_right_one(configured):
    lab = Lab("pages")
    for number in range(1, 121):
        lab.comment("writer", f"text {number}.")
    client = signed_in(lab.people["reader"])

    def shown(query):
        return [int(number) for number in re.findall(r'id="comment-(\d+)"', text_at(client, f"{lab.page}{query}"))]

    assert shown("") == list(range(101, 121))
    assert shown("?comments=1") == list(range(1, 51)) == shown("?comments=nonsense")
    assert 60 in shown("?comment=60") and len(shown("?comment=60")) == 50
    assert shown("?comment=99999999999999999999") == shown("")


def test_too_many_changes_in_a_short_time_wait_and_the_text_is_not_lost(configured, monkeypatch):
    from shoestring_hub.server import comments

    monkeypatch.setattr(comments, "WRITES", 3)
    lab = Lab("hasty")
    client = signed_in(lab.people["reader"])
    answers = [client.post(f"{lab.page}/comments", {"text": f"number {number}"}) for number in range(4)]
    assert [answer.status_code for answer in answers] == [302, 302, 302, 429]
    assert b"number 3</pre>" in answers[3].content
    assert client.post(f"{lab.page}/comments/1/delete").status_code == 302  # deleting is always possible
    assert client.post("/hasty/follow", {"follow": "yes"}).status_code == 429
    assert client.post("/@hasty-owner/follow", {"follow": "yes"}).status_code == 429
    assert signed_in(lab.people["writer"]).post(f"{lab.page}/comments", {"text": "x"}).status_code == 302
    monkeypatch.setattr(comments, "COMMENTS", 4)
    answer = signed_in(lab.people["writer"]).post(f"{lab.page}/comments", {"text": "one more"})
    assert answer.status_code == 400 and b"at most 4 comments" in answer.content and b"one more" in answer.content


def test_comments_of_forged_forms_are_refused(lab):
    from django.test import Client

    client = Client(enforce_csrf_checks=True)
    client.force_login(lab.people["owner"])
    for address in (
        f"{lab.page}/comments",
        f"{lab.page}/comments/1/hide",
        "/@commented-reader/follow",
        "/commented/follow",
    ):
        assert client.post(address, {"text": "forged", "follow": "yes", "hidden": "yes"}).status_code == 403
