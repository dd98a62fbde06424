"""Clips: who sees them, in which ranges, by which links, and what is taken in."""

import json
import time

import pytest
from django.test import Client, override_settings

from shoestring_hub.protocol import CHUNK, digest
from tests.rigs.hub.lab import Lab, rows, signed_in, text_at

pytestmark = pytest.mark.usefixtures("configured")
DATA = bytes(range(256)) * 4
HEAD = b"\0\0\0\x18ftypisom\0\0\0\0"


@pytest.fixture(scope="module")
def lab(configured):
    return Lab("filmed")


@pytest.fixture(scope="module")
def clip(lab):
    return lab.clip(run=lab.run, data=DATA, name="a rocket")


def whole(answer):
    return b"".join(answer.streaming_content) if answer.streaming else answer.content


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("range_", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=0-99", 0, 99),
        ("bytes=1000-5000", 1000, 1023),
        ("bytes=1023-1023", 1023, 1023),
        ("bytes=-24", 1000, 1023),
        ("bytes=-99999", 0, 1023),
        ("BYTES = 0-1", None, None),
        ("bytes=0-", 0, 299),
        ("bytes=900-", 900, 1023),
        ("Bytes= 5 - 6 ", 5, 6),
        ("bytes=9-5", None, None),
        ("bytes=-", None, None),
        ("bytes=x-y", None, None),
        ("bytes=1", None, None),
        ("bytes=٣-٤", None, None),
        ("bytes=" + "9" * 30 + "-", None, None),
        ("seconds=0-9", None, None),
        ("", None, None),
        ("bytes=1024-", "refused", None),
        ("bytes=5000-6000", "refused", None),
        ("bytes=-0", "refused", None),
        ("bytes=0-1,5-6", "refused", None),
        ("bytes=0-1,", "refused", None),
    ],
)
def test_a_range_is_sent_as_it_was_asked_for(lab, clip, monkeypatch, range_, first, last):
    from shoestring_hub.server import ranges

    monkeypatch.setattr(ranges, "WINDOW", 300)  # of which a range without an end gets at most so much
    client = signed_in(lab.people["reader"])
    answer = client.get(f"{clip.address}/video.mp4", headers={"Range": range_})
    head = client.head(f"{clip.address}/video.mp4", headers={"Range": range_})
    assert head.status_code == 200 and head["Content-Length"] == "1024" and head["Accept-Ranges"] == "bytes"
    if first == "refused":
        assert answer.status_code == 416 and answer["Content-Range"] == "bytes */1024" and whole(answer) == b""
    elif first is None:
        assert answer.status_code == 200 and whole(answer) == DATA and answer["Content-Length"] == "1024"
    else:
        assert answer.status_code == 206 and answer["Content-Range"] == f"bytes {first}-{last}/1024"
        assert whole(answer) == DATA[first : last + 1] and answer["Content-Length"] == str(last + 1 - first)
    assert answer["Content-Type"] == ("text/plain" if first == "refused" else "video/mp4")


def test_ranges_of_another_state_of_the_file_are_not_mixed(lab, clip):
    client, address = signed_in(lab.people["reader"]), f"{clip.address}/video.mp4"
    etag = client.get(address)["ETag"]
    ask = lambda **headers: client.get(address, headers={"Range": "bytes=0-9"} | headers)  # noqa: E731
    assert ask(**{"If-Range": etag}).status_code == 206
    for other in ('"other"', f"W/{etag}", "Wed, 21 Oct 2015 07:28:00 GMT", ""):
        answer = ask(**{"If-Range": other})
        assert answer.status_code == 200 and whole(answer) == DATA, other
    assert ask(**{"If-None-Match": etag}).status_code == 304
    assert ask(**{"If-None-Match": '"x"'}).status_code == 206
    assert client.post(address).status_code == 405


def test_a_large_file_is_not_read_into_memory(lab, monkeypatch):
    from shoestring_hub.server import clip_files, ranges

    large = lab.clip(video="f" * 64)
    path = clip_files.path_of(lab.project.pk, "f" * 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 36)  # 64 GiB, of which the disk has nothing
        file.seek((1 << 36) - 3)
        file.write(b"end")
    client = signed_in(lab.people["reader"])
    answer = client.get(f"{large.address}/video.mp4")
    assert answer["Content-Length"] == str(1 << 36) and len(next(iter(answer.streaming_content))) == ranges.BLOCK
    answer.close()
    end = client.get(f"{large.address}/video.mp4", headers={"Range": "bytes=-3"})
    assert end.status_code == 206 and whole(end) == b"end"
    path.unlink()
    assert client.get(f"{large.address}/video.mp4").status_code == 404
    large.delete()


def test_behind_a_proxy_that_sends_files_the_answer_names_the_file_only_to_whoever_may_see_it(lab, clip):
    from shoestring_hub.server.configure import ClipService

    with override_settings(HUB_CLIPS=ClipService(accel="/sent/")):
        answer = signed_in(lab.people["reader"]).get(f"{clip.address}/video.mp4")
        name = digest(DATA)
        assert answer["X-Accel-Redirect"] == f"/sent/{lab.project.pk}/{name[:2]}/{name}" and answer.content == b""
        assert "X-Accel-Redirect" not in Client().get(f"{clip.address}/video.mp4")


# -- rights -----------------------------------------------------------------------------------------------------------


def statuses(clip, *people):
    """The answers to each of some people at the clip's page and files."""
    clients = [signed_in(person) if person else Client() for person in people]
    paths = ("", "/video.mp4", "/poster.jpg", "/state")
    ask = lambda client, path: client.get(clip.address + path, headers={"Range": "bytes=0-9"}).status_code  # noqa: E731
    answers = [[ask(client, path) for path in paths] for client in clients]
    assert all(len({status in (200, 206) for status in answer}) == 1 for answer in answers), answers
    return [answer[1] for answer in answers]


@pytest.mark.slow
def test_rights_are_checked_at_each_request(lab):
    from django.utils import timezone

    from shoestring_hub.server.models import HubClip, HubRun, Member, Person

    other = Lab("filmed-elsewhere").people["owner"]
    owner, writer, reader = (lab.people[role] for role in ("owner", "writer", "reader"))
    sender = lab.add("sender", "reader")
    run = lab.push(owner, "a run with a clip")
    clip = lab.clip(sender, run=run, data=DATA)
    people = (owner, writer, reader, sender, other, None)
    change = HubClip.objects.filter(pk=clip.pk).update
    assert statuses(clip, *people) == [206, 206, 206, 206, 404, 302]
    change(hidden=timezone.now())
    assert statuses(clip, *people) == [206, 404, 404, 206, 404, 302]
    change(hidden=None, deleted=timezone.now())
    assert statuses(clip, *people) == [206, 206, 404, 404, 404, 302]
    change(deleted=None)
    HubRun.objects.filter(pk=run.pk).update(deleted=timezone.now())
    assert statuses(clip, *people) == [206, 206, 404, 404, 404, 302]
    HubRun.objects.filter(pk=run.pk).update(deleted=None)
    client = signed_in(reader)
    assert client.get(f"{clip.address}/video.mp4").status_code == 200
    Person.objects.filter(pk=reader.pk).update(is_active=False)
    assert client.get(f"{clip.address}/video.mp4").status_code == 302
    Person.objects.filter(pk=reader.pk).update(is_active=True)
    Member.objects.filter(project=lab.project, person=sender).delete()
    assert statuses(clip, sender) == [404]


def test_a_link_shows_one_clip_until_it_ends(lab, clip, monkeypatch):
    from django.core import signing
    from django.utils import timezone

    from shoestring_hub.server.models import ClipShare, HubClip, Member, Person, Role

    owner, anybody = lab.people["owner"], Client()
    maker = lab.add("link-maker", "owner")

    def link(person=maker, days=7):
        text = signed_in(person).post(f"{clip.address}/share", {"days": days}).content.decode()
        return text.partition("<code>http://testserver")[2].partition("<")[0]

    for person in (lab.people["writer"], lab.people["reader"]):
        assert signed_in(person).post(f"{clip.address}/share", {"days": 7}).status_code == 403
    address = link()
    page = text_at(anybody, address)
    assert "a rocket" in page and f"/{lab.slug}/" not in page and lab.slug not in page and maker.username not in page
    part = anybody.get(f"{address}/video.mp4", headers={"Range": "bytes=0-9"})
    assert part.status_code == 206 and whole(part) == DATA[:10] and part["Cache-Control"] == "private, no-store"
    assert anybody.get(f"{address}/poster.jpg").status_code == 200
    files = ("", "/video.mp4", "/poster.jpg")
    works = lambda at=address: {anybody.get(at + path).status_code for path in files}  # noqa: E731
    for forged in (address[:-1], address.replace("_", "-", 1), address + "x", "/~clip/x", "/~clip/::", "/~clip/%00"):
        assert works(forged) <= {404}, forged
    refused = {404}
    for change in ("hidden", "deleted"):
        HubClip.objects.filter(pk=clip.pk).update(**{change: timezone.now()})
        assert works() == refused
        HubClip.objects.filter(pk=clip.pk).update(**{change: None})
    Member.objects.filter(person=maker).update(role=Role.WRITER)
    assert works() == refused
    Member.objects.filter(person=maker).update(role=Role.OWNER)
    Person.objects.filter(pk=maker.pk).update(is_active=False)
    assert works() == refused
    Person.objects.filter(pk=maker.pk).update(is_active=True)
    assert works() == {200}
    now, short = time.time(), link(owner, days=1)
    monkeypatch.setattr(signing.time, "time", lambda: now + 86400 * 2)
    assert works(short) == refused and works() == {200}
    monkeypatch.setattr(signing.time, "time", lambda: now + 86400 * 8)
    assert works() == refused
    monkeypatch.undo()
    share = ClipShare.objects.get(made_by=maker)
    assert signed_in(lab.people["writer"]).post(f"{clip.address}/shares/{share.pk}/revoke").status_code == 403
    signed_in(owner).post(f"{clip.address}/shares/{share.pk}/revoke")
    assert works() == refused and works(short) == {200}


def test_a_forged_form_sends_nothing(lab):
    client = Client(enforce_csrf_checks=True)
    client.force_login(lab.people["owner"])
    assert client.put(f"/{lab.slug}/clips/chunks/{digest(HEAD)}", HEAD).status_code == 403
    assert client.post(f"/{lab.slug}/clips/send", "{}", content_type="application/json").status_code == 403


# -- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clips_are_on_pages_in_the_feed_and_found_with_their_comments(configured):
    from django.utils import timezone

    from shoestring_hub.server.models import Follow, HubClip

    lab = Lab("watched")
    reader = lab.people["reader"]
    follower, owner = signed_in(reader), signed_in(lab.people["owner"])
    Follow.objects.create(follower=reader, project=lab.project)
    shown = lab.clip(run=lab.run, data=DATA, name="of a pendulum", notes="swings **twice**")
    unfinished = lab.clip(state="failed", name="of a broken pendulum")
    veiled = lab.clip(data=DATA + b"x", name="of a veiled pendulum", hidden=timezone.now())
    for target in (shown, veiled):
        assert owner.post(f"{target.address}/comments", {"text": "gyroscopic @watched-reader"}).status_code == 302
    comment = f'{shown.address}?comment=1#comment-1"'
    for address in ("/feed", "/search?q=pendulum+of", "/@watched-writer"):
        text = text_at(follower, address)
        assert f'href="{shown.address}"' in text and "veiled" not in text and "broken" not in text, address
    for address in ("/feed", "/search?q=gyros", "/search?q=gyros&project=watched", "/@watched-owner"):
        assert comment in text_at(follower, address) and veiled.address not in text_at(follower, address), address
    assert "mentions you" in text_at(follower, "/feed")
    assert f'href="{shown.address}"' in text_at(follower, "/search?q=swings")
    page = text_at(follower, shown.address)
    assert "<strong>twice</strong>" in page and "gyroscopic" in page and f"{shown.address}/video.mp4" in page
    assert 'id="upload"' not in text_at(follower, f"/{lab.slug}/clips") and "Edit</h2>" not in page
    for address in (f"/{lab.slug}/clips", lab.page):
        text = text_at(owner, address)
        assert f"{shown.address}/poster.jpg" in text and 'id="upload"' in text, address
    assert "of a broken pendulum" in text_at(owner, f"/{lab.slug}/clips")
    assert "failed" in text_at(owner, unfinished.address)
    owner.post(f"{shown.address}/edit", {"name": "of a metronome", "notes": "ticks"})
    assert f'href="{shown.address}"' not in text_at(follower, "/search?q=pendulum")
    assert f'href="{shown.address}"' in text_at(follower, "/search?q=metronome+ticks")
    owner.post(f"{shown.address}/hide", {"hidden": "yes"})
    assert shown.address not in text_at(follower, "/feed") + text_at(follower, f"/{lab.slug}/clips")
    owner.post(f"{shown.address}/hide", {"hidden": "no"})
    owner.post(f"{shown.address}/delete", {"deleted": "yes"})
    assert shown.address not in text_at(owner, f"/{lab.slug}/clips") + text_at(owner, "/search?q=metronome")
    assert shown.address in text_at(owner, f"/{lab.slug}/clips?which=deleted")
    assert comment not in text_at(follower, "/search?q=gyros")
    owner.post(f"{shown.address}/delete", {"deleted": "no"})
    assert HubClip.objects.get(pk=shown.pk).deleted is None and rows(text_at(follower, "/feed"))


def test_clean_and_quota_count_what_is_stored(configured):
    from datetime import timedelta

    from django.utils import timezone

    from shoestring_hub.server import chunks, clip_files
    from shoestring_hub.server.models import GRACE, HubClip

    lab = Lab("cleaned")
    clip = lab.clip(data=DATA)
    part = HEAD + b"unconverted"
    chunks.put(lab.project.pk, digest(part), part)
    waiting = lab.clip(state="waiting", chunks=[digest(part)])
    left = clip_files.settings.HUB.work / "1-killed"
    left.mkdir(parents=True)
    paths = clip_files.path_of(lab.project.pk, digest(DATA)), chunks.path_of(lab.project.pk, digest(part))
    later = time.time() + 2 * chunks.UNUSED_FOR
    chunks.remove_unused(later), clip_files.remove_unused(later)
    assert all(path.exists() for path in paths) and not left.exists()
    HubClip.objects.filter(pk__in=(clip.pk, waiting.pk)).update(deleted=timezone.now() - GRACE - timedelta(days=1))
    HubClip.objects.filter(deleted__lt=timezone.now() - GRACE).delete()
    chunks.remove_unused(), clip_files.remove_unused()
    assert all(path.exists() for path in paths)  # for a day, in which a backup may be copying them
    chunks.remove_unused(later), clip_files.remove_unused(later)
    assert not any(path.exists() for path in paths)


# -- what is taken in -------------------------------------------------------------------------------------------------


def send(client, slug, data, **fields):
    """What a page does: say which chunks there are, send those that are missing, and say it again."""
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    facts = {"name": "sent", "size": len(data), "chunks": [digest(part) for part in parts]} | fields
    ask = lambda: client.post(f"/{slug}/clips/send", json.dumps(facts), content_type="application/json")  # noqa: E731
    answer = ask()
    if answer.status_code == 409:
        for part in parts:
            if digest(part) in answer.json()["missing"]:
                taken = client.put(f"/{slug}/clips/chunks/{digest(part)}", part)
                if taken.status_code != 200:
                    return taken
        answer = ask()
    return answer


def test_a_clip_is_sent_once_however_often_it_is_said(configured):
    from shoestring_hub.server.models import ClipJob, HubClip

    lab = Lab("sending")
    writer = signed_in(lab.people["writer"])
    answer = send(writer, lab.slug, HEAD + b"one", run=lab.run.number)
    assert answer.status_code == 200, answer.content
    clip = HubClip.objects.get(project=lab.project)
    assert answer.json() == {"page": clip.address} and clip.run == lab.run and clip.job.state == ClipJob.WAITING
    assert send(writer, lab.slug, HEAD + b"one", run=lab.run.number).json() == {"page": clip.address}
    assert send(writer, lab.slug, HEAD + b"one").json() != {"page": clip.address}  # of the project, not of the run
    assert HubClip.objects.filter(project=lab.project).count() == 2
    for role, status in (("reader", 403), ("owner", 200)):
        assert send(signed_in(lab.people[role]), lab.slug, HEAD + role.encode()).status_code == status
    assert send(signed_in(Lab("not-sending").people["owner"]), lab.slug, HEAD).status_code == 404
    writer.post(f"{clip.address}/delete", {"deleted": "yes"})
    assert send(writer, lab.slug, HEAD + b"one", run=lab.run.number).status_code == 410


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"size": 0}, 400, "size"),
        ({"size": -5}, 400, "size"),
        ({"size": 1 << 40}, 413, "at most"),
        ({"size": 1 << 70}, 400, "size"),
        ({"size": 5}, 400, "add up"),
        ({"chunks": []}, 400, "malformed"),
        ({"chunks": ["../../secret.key"]}, 400, "malformed"),
        ({"chunks": "x"}, 400, "chunks"),
        ({"run": 99}, 404, "no such run"),
        ({"run": -1}, 400, "run"),
        ({"name": "\ud800"}, 400, "name"),
    ],
)
def test_what_is_said_wrongly_is_refused(lab, fields, status, reason):
    answer = send(signed_in(lab.people["writer"]), lab.slug, HEAD + b"wrong", **fields)
    assert answer.status_code == status and reason in answer.json()["error"]


@pytest.mark.parametrize("data", [b"#EXTM3U\nfile:///etc/passwd\n", b"<svg>", b"\0", b"RIFF\0\0\0\0WAVEfmt ", b"ID3\4"])
def test_what_begins_like_no_clip_is_refused_before_ffmpeg_sees_it(lab, data):
    answer = send(signed_in(lab.people["writer"]), lab.slug, data)
    assert answer.status_code == 415 and "MP4 or QuickTime" in answer.json()["error"]


def test_limits_and_a_hub_without_clips(lab, monkeypatch):
    from shoestring_hub.server import clips
    from shoestring_hub.server.configure import ClipService

    client = signed_in(lab.people["writer"])
    with override_settings(HUB_CLIPS=ClipService(quota=1e-6)):
        assert "no space" in send(client, lab.slug, HEAD + bytes(2000)).json()["error"]
        assert client.put(f"/{lab.slug}/clips/chunks/{digest(HEAD)}", HEAD).status_code == 413
    with override_settings(HUB_CLIPS=ClipService(off="no sandbox here")):
        refused = send(client, lab.slug, HEAD + b"off")
        assert refused.status_code == 403 and "no sandbox here" in refused.json()["error"]
        assert Client().get("/health").content == b"well\nclips are off\n"
        assert client.put(f"/{lab.slug}/clips/chunks/{digest(HEAD)}", HEAD).status_code == 403
        for page in (f"/{lab.slug}/clips", lab.page):
            assert "no sandbox here" in text_at(client, page) and 'id="upload"' not in text_at(client, page)
    monkeypatch.setattr(clips, "SENT", 0)
    assert send(client, lab.slug, HEAD + b"often").status_code == 429


def test_a_token_that_only_writes_learns_nothing_of_clips_of_others(configured):
    from shoestring_hub.server.models import HubClip, Token, digest_of

    lab = Lab("told")
    data = HEAD + b"known"
    assert send(signed_in(lab.people["owner"]), lab.slug, data).status_code == 200
    Token.objects.create(
        project=lab.project, person=lab.people["writer"], machine="m", digest=digest_of("secret"), write_only=True
    )
    headers = {"Authorization": "Bearer secret"}
    facts = {"name": "x", "size": len(data), "chunks": [digest(data)]}
    ask = lambda: Client().post("/api/clips", facts, content_type="application/json", headers=headers)  # noqa: E731
    assert ask().status_code == 409 and ask().json()["missing"] == [digest(data)]
    assert Client().put(f"/api/chunks/{digest(data)}", data, headers=headers).status_code == 200
    assert ask().status_code == 200 and HubClip.objects.filter(project=lab.project).count() == 2
