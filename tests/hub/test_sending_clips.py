"""Clips are sent from the command line and from the browser, and continue where they broke off."""

import os

import pytest

from shoestring.cli import main
from shoestring_hub.client import connection as connecting
from shoestring_hub.client.clip import send_clip
from shoestring_hub.client.connection import Connection
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.push import push
from shoestring_hub.protocol import CHUNK
from tests.browser import needs_chromium
from tests.hub.test_pages_in_browser import SIZES, findings, opened, signed_in
from tests.rigs.hub.clips import make_clip, missing
from tests.rigs.hub.folders import write_run
from tests.rigs.hub.storms import CuttingProxy
from tests.waiting import until

HEAD = b"\0\0\0\x18ftypisom\0\0\0\0"
NO_FFMPEG = missing()
needs_ffmpeg = pytest.mark.skipif(bool(NO_FFMPEG), reason=NO_FFMPEG)


@pytest.fixture
def file(tmp_path):
    """What is taken for a clip until ffmpeg has seen it, of three chunks."""
    path = tmp_path / "large.mp4"
    path.write_bytes(HEAD + os.urandom(2 * CHUNK + 5))
    return path


def test_a_clip_is_sent_by_one_command_for_a_run_or_a_project(project, ada, file, tmp_path, capsys):
    folder = write_run(tmp_path / "run", files=0)
    assert main(["hub", "clip", str(file), "--run", str(folder)]) == 2
    assert "no such run" in capsys.readouterr().err
    push(folder)
    assert main(["hub", "clip", str(file), "--run", str(folder), "--title", "a <b>rocket</b>"]) == 0
    assert f"/{project}/clips/1: 8.39 MB were sent" in capsys.readouterr().out
    assert "a &lt;b&gt;rocket&lt;/b&gt;" in ada.get(f"/{project}/runs/1").text
    assert f"/{project}/clips/1: 0 B were sent" in send_clip(file, run=folder)
    assert f"/{project}/clips/2: 0 B were sent" in send_clip(file)  # its chunks are there
    assert "large.mp4" in ada.get(f"/{project}/clips").text
    (tmp_path / "no.mp4").write_text("#EXTM3U")
    (tmp_path / "empty.mp4").write_text("")
    for name, reason in (("no.mp4", "this is no clip"), ("empty.mp4", "has 0 B"), ("gone.mp4", "cannot open")):
        assert main(["hub", "clip", str(tmp_path / name)]) == 2 and reason in capsys.readouterr().err


def test_an_upload_continues_with_the_chunks_that_are_missing(project, file, monkeypatch):
    sent, ask = [], Connection.ask

    def cut(self, method, path, body=b"", /, **query):
        if method == "PUT":
            if len(sent) == 2:
                raise KeyboardInterrupt
            sent.append(path)
        return ask(self, method, path, body, **query)

    monkeypatch.setattr(Connection, "ask", cut)
    with pytest.raises(KeyboardInterrupt):
        send_clip(file)
    first, sent[:] = list(sent), []
    assert f"/{project}/clips/1: " in send_clip(file)
    assert len(first) == 2 and len(sent) == 1 and not set(first) & set(sent)


@pytest.mark.slow
def test_an_upload_gets_through_a_network_that_cuts_connections(project, server, ada, file, monkeypatch):
    monkeypatch.setattr(connecting, "_NAPS", (0.01,))
    token = ada.make_token(project)
    with CuttingProxy(server.port, 3, 0.0) as proxy:  # which cuts the first of the connections that follow
        log_in(f"http://127.0.0.1:{proxy.port}", token)
        proxy.share = 0.6
        assert f"/{project}/clips/1: " in send_clip(file)
        assert proxy.cuts
    assert "large.mp4" in ada.get(f"/{project}/clips/1").text


@pytest.mark.slow
@needs_chromium
@needs_ffmpeg
def test_a_clip_is_sent_from_a_page_converted_and_played(project, ada, server, tmp_path):
    push(write_run(tmp_path / "run", files=0))
    path = make_clip(tmp_path / "a rocket.mp4", "320x180", 8.0, sound=True)
    with signed_in(ada) as browser:
        opened(browser, f"{server.address}/{project}/runs/1")
        browser.value("document.querySelector('#clips details').open = true")
        choose(browser, path)
        browser.value("document.querySelector('#upload button').focus()")
        browser.press("Enter")
        browser.until("location.pathname.endsWith('/clips/1')", 30)
        browser.until("document.querySelector('video')", 60)
        assert browser.value("document.querySelector('h1').textContent") == "a rocket.mp4"
        browser.value("(video = document.querySelector('video')).muted = true")
        browser.until("video.readyState >= 2 && video.videoWidth === 320")
        browser.value("video.play()")
        browser.until("video.currentTime > 0.1")
        browser.value("video.currentTime = 7")
        browser.until("!video.seeking && video.currentTime >= 7 && video.readyState >= 2")
        assert browser.value("Math.round(video.duration)") == 8
        problems = [one.get("entry", one).get("text", "") for one in browser.problems]
        assert [text for text in problems if "409 (Conflict)" not in text] == []  # with which the hub asks for chunks
        browser.call("Network.deleteCookies", name="sessionid", url=server.address)
        asked = "fetch(video.src, { redirect: 'manual' }).then((answer) => answer.type)"
        assert browser.value(asked) == "opaqueredirect"


WATCHED = """
sessionStorage.sent = ""; real = fetch;
fetch = (address, options) => {
  if (options.method !== "PUT") return real(address, options);
  sessionStorage.sent += `${address} `;
  const count = sessionStorage.sent.trim().split(" ").length;
  if (count === CUT) return Promise.reject(new TypeError("cut"));
  return count === LEFT ? new Promise(() => {}) : real(address, options);
}; true"""
"""Notes the chunks that a page sends; the request number CUT fails, and number LEFT gets no answer."""


@pytest.mark.slow
@needs_chromium
def test_an_upload_from_a_page_goes_on_after_cuts_and_after_another_visit(project, ada, server, file):
    def send(browser, path, cut=0, left=0):
        opened(browser, f"{server.address}/{project}/clips")
        browser.value(WATCHED.replace("CUT", str(cut)).replace("LEFT", str(left)))
        choose(browser, path)
        browser.value("document.querySelector('#upload').requestSubmit()")

    with signed_in(ada) as browser:
        send(browser, file, cut=1, left=3)  # the first chunk is sent twice; the second one is on its way
        browser.until("sessionStorage.sent.trim().split(' ').length === 3")
        first = browser.value("sessionStorage.sent").split()
        assert first[0] == first[1] != first[2]
        send(browser, file, cut=2)
        browser.until("location.pathname.endsWith('/clips/1')", 60)
        assert set(browser.value("sessionStorage.sent").split()) & set(first) == {first[2]}
        (no := file.with_name("no.mp4")).write_text("#EXTM3U")
        send(browser, no)
        browser.until("document.getElementById('clip-told').textContent.includes('this is no clip')")
        browser.call("Network.deleteCookies", name="sessionid", url=server.address)
        browser.value("document.querySelector('#upload').requestSubmit()")
        browser.until("document.getElementById('clip-told').textContent.includes('signed out')")


def choose(browser, path):
    """Choose a file as a person does."""
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    node = browser.call("DOM.querySelector", nodeId=root, selector="#clip-file")["nodeId"]
    browser.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)


@pytest.mark.slow
@needs_chromium
@needs_ffmpeg
@pytest.mark.parametrize("size", SIZES)
def test_pages_of_clips_fit_in_light_and_dark(project, ada, server, tmp_path, size):
    push(write_run(tmp_path / "run", files=0))
    name = "a-name-" + "of-a-clip-that-a-script-has-made-" * 5
    send_clip(make_clip(tmp_path / "wide.mp4", "640x120"), run=tmp_path / "run", title=name)
    send_clip(make_clip(tmp_path / "tall.mp4", "120x640"))
    (tmp_path / "no.mp4").write_bytes(HEAD + bytes(1000))
    send_clip(tmp_path / "no.mp4", title=name)
    for number in (1, 2):
        until(lambda number=number: ada.get(f"/{project}/clips/{number}/video.mp4").status == 200)
    until(lambda: "ffmpeg cannot read it" in ada.get(f"/{project}/clips/3").text)
    ada.post(f"/{project}/clips/1/edit", name=name, notes="# Notes\n" + "x" * 300)
    ada.post(f"/{project}/clips/1/comments", text="y" * 300)
    ada.post(f"/{project}/clips/2/hide", hidden="yes")
    shared = ada.ask("POST", f"/{project}/clips/1/share", {"days": 7}).text
    link = shared.partition(f"<code>{server.address}")[2].partition("<")[0]
    ways = ("clips", "clips?which=deleted", "clips/1", "clips/2", "clips/3", "runs/1")
    pages = [f"/{project}/{page}" for page in ways]
    with signed_in(ada, size) as browser:
        for dark in (False, True):
            browser.dark(dark)
            for path in [*pages, link]:
                opened(browser, server.address + path)
                browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true })")
                assert browser.cut() == [], path
                assert size == "phone" or findings(browser) == [], path
        assert browser.problems == []
