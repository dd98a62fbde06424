"""Clips are converted once, in a sandbox, whatever is in them and whoever is killed meanwhile."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.rigs.hub import clips as rig
from tests.rigs.hub.lab import Lab, signed_in, text_at
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(scope="module")
def lab(configured):
    if reason := rig.missing():
        pytest.skip(reason)
    return Lab("converting")


@pytest.fixture(scope="module")
def small(lab, tmp_path_factory):
    """A clip with sound, as bytes."""
    return rig.make_clip(tmp_path_factory.mktemp("clip") / "small.mp4", "98x54", 2.0, sound=True).read_bytes()


@pytest.fixture(autouse=True)
def empty_queue(configured):
    """What other tests have left waiting."""
    from shoestring_hub.server.models import ClipJob

    ClipJob.objects.filter(state__in=(ClipJob.WAITING, ClipJob.HELD)).delete()


def probed(path):
    entries = "stream=codec_name,pix_fmt,width,height:format=duration"
    command = ["ffprobe", "-v", "error", "-show_entries", entries, "-of", "csv=p=0", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


# -- the queue --------------------------------------------------------------------------------------------------------


def test_a_result_of_an_old_epoch_is_refused(configured):
    from django.utils import timezone

    from shoestring_hub.server import clip_queue
    from shoestring_hub.server.models import ClipJob, HubClip

    clip = Lab("leased").clip(state="waiting", chunks=["a" * 64])
    due = ClipJob.objects.filter(clip=clip).update
    first = clip_queue.claim()
    assert first is not None and (first.epoch, first.tries) == (1, 1) and clip_queue.claim() is None
    assert clip_queue.renew(first, 0.5) and rig.job_of(clip).progress == 0.5
    due(due=timezone.now() - timedelta(seconds=1))  # its lease has ended
    second = clip_queue.claim()
    assert second is not None and second.epoch == 2
    assert not clip_queue.renew(first, 0.9) and not clip_queue.fail(first, "late", final=True)
    assert not clip_queue.finish(first, video="b" * 64) and not clip_queue.give_back(first)
    assert HubClip.objects.get(pk=clip.pk).video == "" and rig.job_of(clip).state == ClipJob.HELD
    assert clip_queue.give_back(second) and rig.job_of(clip).tries == 1
    third = clip_queue.claim()
    assert third is not None and clip_queue.fail(third, "no luck", final=False) and clip_queue.claim() is None
    assert rig.job_of(clip).state == ClipJob.WAITING and rig.job_of(clip).due > timezone.now() + clip_queue.PAUSE
    due(due=timezone.now() + timedelta(hours=1))  # the clock has gone back since
    fourth = clip_queue.claim()
    assert fourth is not None and clip_queue.finish(fourth, video="c" * 64)
    assert not clip_queue.finish(fourth, video="d" * 64) and not clip_queue.retry(clip)
    clip.refresh_from_db()
    assert (clip.video, clip.chunks, rig.job_of(clip).state) == ("c" * 64, [], ClipJob.DONE)


def test_a_job_whose_workers_all_die_fails_and_may_be_tried_again(configured):
    from django.utils import timezone

    from shoestring_hub.server import clip_queue
    from shoestring_hub.server.models import ClipJob

    lab, before = Lab("deadly"), clip_queue.figures()
    clip = lab.clip(state="waiting", chunks=["a" * 64])
    for _ in range(clip_queue.TRIES):
        assert clip_queue.claim() is not None
        ClipJob.objects.filter(clip=clip).update(due=timezone.now() - timedelta(seconds=1))
    assert clip_queue.claim() is None and rig.job_of(clip).state == ClipJob.FAILED
    client = signed_in(lab.people["writer"])
    assert "each attempt to convert it was interrupted" in text_at(client, clip.address)
    assert clip_queue.figures() == before | {"clips_failed": before["clips_failed"] + 1}
    assert before["clips_waiting"] == before["clips_oldest_waiting_seconds"] == 0
    client.post(f"{clip.address}/retry")
    job = clip_queue.claim()
    assert job is not None and job.tries == 1
    job.delete()


# -- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clip_becomes_an_mp4_that_every_browser_plays(lab, small):
    from shoestring_hub.server import clip_files, clip_worker
    from shoestring_hub.server.models import ClipJob, HubClip

    clip = rig.store(lab, small)
    client = signed_in(lab.people["reader"])
    assert "waiting to be converted" in text_at(client, clip.address)
    assert clip_worker.work_once() and not clip_worker.work_once()
    clip = HubClip.objects.get(pk=clip.pk)
    assert (clip.width, clip.height, round(clip.seconds)) == (98, 54, 2) and clip.chunks == []
    path = clip_files.path_of(lab.project.pk, clip.video)
    assert probed(path)[:2] == ["h264,98,54,yuv420p", "aac"] and path.stat().st_size < clip.size
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")  # plays before all of it has arrived
    assert client.get(f"{clip.address}/poster.jpg", headers={"Range": "bytes=0-2"}).getvalue() == b"\xff\xd8\xff"
    assert rig.job_of(clip).state == ClipJob.DONE and f"{clip.address}/video.mp4" in text_at(client, clip.address)
    assert client.get(f"{clip.address}/state").json()["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("a.webm", "64x48", "64,48"),
        ("a.mkv", "64x48", "64,48"),
        ("a.avi", "64x48", "64,48"),
        ("a.gif", "64x48", "64,48"),
        ("a.mov", "64x48", "64,48"),
        ("wide.mp4", "3840x1000", "1920,500"),
        ("tall.mp4", "1200x2400", "960,1920"),
        ("odd.gif", "80x60", "64,48"),
    ],
)
def test_every_format_and_shape(lab, tmp_path, name, size, expected):
    from shoestring_hub.server import clip_files, clip_worker
    from shoestring_hub.server.models import HubClip

    options = ("-vf", "format=rgb24,crop=65:49") if name == "odd.gif" else ()
    clip = rig.store(lab, rig.make_clip(tmp_path / name, size, 0.5, *options).read_bytes())
    assert clip_worker.work_once()
    clip = HubClip.objects.get(pk=clip.pk)
    assert rig.job_of(clip).reason == ""
    assert probed(clip_files.path_of(lab.project.pk, clip.video))[0] == f"h264,{expected},yuv420p"


# -- hostile media ----------------------------------------------------------------------------------------------------


def outcome(data, lab):
    """How a clip ends that nobody has looked at before: its state, and the reason."""
    from shoestring_hub.server import clip_worker

    clip = rig.queue(lab, data)
    assert clip_worker.work_once()
    job = rig.job_of(clip)
    assert not list(clip_worker.settings.HUB.work.iterdir()), "something is left of it"
    return job.state, job.reason


@pytest.mark.slow
def test_hostile_media_are_refused_with_a_reason(lab, small, tmp_path):
    from shoestring_hub.server import media

    whole = rig.make_clip(tmp_path / "long.mp4", "64x48", 6.0, "-movflags", "+faststart").read_bytes()
    cases = {
        "playlist": (rig.playlist(tmp_path / "long.mp4"), "the file is none of"),
        "bomb": (rig.gif(65535), "pixels"),
        "point": (rig.gif(1), "pixels"),
        "another format": (small[:32] + b"\x1a\x45\xdf\xa3" * 100, "ffmpeg cannot read it"),
        "without its end": (whole[: len(whole) * 6 // 10], "damaged"),
        "without its head": (small[:16] + bytes(3000), "ffmpeg cannot read it"),
    }
    for name, (data, reason) in cases.items():
        state, told = outcome(data, lab)
        assert state == "failed" and reason in told, (name, told)
    facts = media.ClipFacts(width=1920, height=1080, seconds=60, frames=1800, audio=False)
    media.check(facts)
    for change in ({"width": 7680, "height": 4320}, {"seconds": 1e5}, {"frames": 10**7}, {"width": 9000, "height": 16}):
        with pytest.raises(media.RejectedError):
            media.check(media.ClipFacts(**(vars(facts) | change)))
    with pytest.raises(media.RejectedError):
        media.check(media.ClipFacts(4096, 2304, 3000, 3000 * 60, audio=False))


def test_a_playlist_reaches_no_other_file_even_if_ffmpeg_reads_it(lab, tmp_path, monkeypatch):
    """Each guard alone: the forced format, and the file system that holds this clip only."""
    from shoestring_hub.server import media

    secret = rig.make_clip(tmp_path / "secret.ts", "64x48", 1.0)
    monkeypatch.setattr(media, "format_of", lambda head: "mov")
    assert "ffmpeg cannot read it" in outcome(rig.playlist(secret) + b"\n", lab)[1]
    monkeypatch.setattr(media, "format_of", lambda head: "hls")
    monkeypatch.setattr(media, "DECODERS", "h264,mpeg1video,mpeg2video,aac,mp2")
    state, reason = outcome(rig.playlist(secret), lab)
    assert state == "failed" and "ffmpeg cannot read it" in reason


def test_the_sandbox_holds_the_clip_and_no_network(lab, tmp_path):
    from shoestring_hub.server.sandbox import ENVIRONMENT, SandboxLimits, command

    for name in ("root", "clip"):
        (tmp_path / name).mkdir()
    (tmp_path / "clip" / "source").write_text("its own\n")
    (tmp_path / "secret").write_text("of another")
    script = f"""
cat /clip/source; ls /; ls /proc /dev /home /root {tmp_path} > /clip/listed 2> /clip/log
touch /usr/x 2> /clip/log && echo wrote; mount -t tmpfs x /clip 2> /clip/log && echo mounted
echo out > /clip/out; ffmpeg -v error -i http://127.0.0.1:1/ 2>&1 | tail -1
ulimit -v; ulimit -t; head -c 3000 /usr/bin/ffmpeg > /clip/large 2> /clip/log; wc -c < /clip/large
"""
    limits = SandboxLimits(memory=1 << 30, seconds=7, file_size=2000)
    run = command(tmp_path, ["sh", "-c", script], limits)
    done = subprocess.run(run, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=30)
    words = done.stdout.split()
    assert words[:3] == ["its", "own", "bin"], done
    assert "wrote" not in words and "mounted" not in words and "secret" not in done.stdout
    assert "unreachable" in done.stdout and words[-3:] == ["1048576", "7", "2000"], done
    assert (tmp_path / "clip" / "out").read_text() == "out\n" and (tmp_path / "clip" / "listed").read_text() == ""


def test_a_machine_that_allows_no_sandbox_says_so(lab, monkeypatch):
    from shoestring_hub.server import sandbox

    assert sandbox.fault() == ""
    monkeypatch.setattr(sandbox, "_ENTER", "echo mount: permission denied >&2; exit 32")
    assert sandbox.fault() == "this machine does not allow a sandbox for ffmpeg: mount: permission denied"
    monkeypatch.setitem(sandbox.ENVIRONMENT, "PATH", "/nowhere")
    assert "lacks ffmpeg, ffprobe" in sandbox.fault()


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def longer(lab, tmp_path_factory):
    """A clip of four seconds."""
    return rig.make_clip(tmp_path_factory.mktemp("clip") / "longer.mp4", "64x48", 4.0).read_bytes()


@pytest.fixture
def slowly(monkeypatch):
    """ffmpeg reads clips no faster than they play, so that there is time to interrupt it."""
    from shoestring_hub.server import media

    read = media._input
    monkeypatch.setattr(media, "_input", lambda reader, name: ["-re", *read(reader, name)])


@pytest.mark.slow
def test_a_killed_worker_takes_its_ffmpeg_with_it_and_another_one_converts(lab, longer, slowly):
    from django.utils import timezone

    from shoestring_hub.server import clip_worker
    from shoestring_hub.server.models import ClipJob

    clip = rig.store(lab, longer, "killed")
    worker = rig.fork(clip_worker.work_once)
    ffmpeg = rig.ffmpeg_of(worker)
    os.kill(ffmpeg, signal.SIGSTOP)  # even one that is stopped
    rig.end(worker)
    until(lambda: not rig.is_alive(ffmpeg), seconds=10)
    assert rig.job_of(clip).state == ClipJob.HELD and not clip_worker.work_once()  # its lease has not ended
    ClipJob.objects.filter(clip=clip).update(due=timezone.now() - timedelta(seconds=1))
    assert clip_worker.work_once()
    job = rig.job_of(clip)
    assert (job.state, job.epoch, job.clip.video != "") == (ClipJob.DONE, 2, True)
    assert not list(clip_worker.settings.HUB.work.iterdir())


@pytest.mark.slow
def test_an_ffmpeg_that_is_stopped_is_ended_and_tried_again(lab, longer, slowly, monkeypatch):
    from shoestring_hub.server import clip_queue, clip_worker, media
    from shoestring_hub.server.models import ClipJob

    monkeypatch.setattr(media, "STALL", 2.0)
    monkeypatch.setattr(clip_queue, "PAUSE", timedelta(0))
    clip = rig.store(lab, longer + b" ", "stopped")
    worker = rig.fork(clip_worker.work_once)
    ffmpeg = rig.ffmpeg_of(worker)
    os.kill(ffmpeg, signal.SIGSTOP)
    os.waitpid(worker, 0)
    until(lambda: not rig.is_alive(ffmpeg), seconds=10)
    assert "no progress for" in rig.job_of(clip).reason and rig.job_of(clip).state == ClipJob.WAITING
    assert clip_worker.work_once() and rig.job_of(clip).state == ClipJob.DONE


def converted(folder):
    """What ffmpeg leaves, in place of ffmpeg."""
    from shoestring_hub.server import media

    (folder / "clip" / "out").mkdir()
    for name in ("video.mp4", "poster.jpg"):
        (folder / "clip" / "out" / name).write_bytes(name.encode())
    return media.ClipFacts(64, 48, 1.0, 10, audio=False)


def test_a_worker_that_slept_through_its_lease_stores_nothing(lab, small, monkeypatch):
    from django.utils import timezone

    from shoestring_hub.server import clip_queue, clip_worker, media
    from shoestring_hub.server.models import ClipJob, HubClip

    clip = rig.store(lab, small + b" ", "slept")

    def sleep(folder, tick):
        facts = converted(folder)
        ClipJob.objects.filter(clip=clip).update(due=timezone.now() - timedelta(seconds=1))
        assert clip_queue.claim().epoch == 2  # by another one
        return facts

    monkeypatch.setattr(media, "convert", sleep)
    assert clip_worker.work_once()
    assert HubClip.objects.get(pk=clip.pk).video == "" and rig.job_of(clip).state == ClipJob.HELD
    ClipJob.objects.filter(clip=clip).delete()


def test_a_link_that_ffmpeg_was_made_to_leave_is_not_followed(lab, small, tmp_path, monkeypatch):
    from shoestring_hub.server import clip_worker, media
    from shoestring_hub.server.models import ClipJob

    secret = clip_worker.settings.HUB.folder / "secret.key"

    def plant(folder, tick):
        facts = converted(folder)
        out = folder / "clip" / "out"
        if way == "file":
            (out / "video.mp4").unlink()
            (out / "video.mp4").symlink_to(secret)
        else:
            (tmp_path / "video.mp4").write_bytes(secret.read_bytes())
            out.rename(folder / "clip" / "other")
            out.symlink_to(tmp_path)
        return facts

    monkeypatch.setattr(media, "convert", plant)
    for way in ("file", "folder"):
        clip = rig.store(lab, small + way.encode(), way)
        assert clip_worker.work_once()
        job = rig.job_of(clip)
        assert job.state == ClipJob.WAITING and "link" in job.reason and job.clip.video == ""
        job.delete()


@pytest.mark.slow
def test_a_hub_starts_workers_again_that_were_killed_and_ends_them_with_itself(lab, longer, tmp_path):
    from tests.rigs.hub.server import HubServer

    with HubServer(tmp_path / "hub", "--clip-workers", "2") as server:
        until(lambda: len(descendants(server.pid)) >= 4)  # a server process, the supervisor and two workers
        before = descendants(server.pid)
        supervisor = next(process for process in before if len(descendants(process)) == 2)
        workers = descendants(supervisor)
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len(set(descendants(supervisor)) - {workers[0]}) == 2)
        everything = [server.pid, *descendants(server.pid)]
        os.kill(server.pid, signal.SIGKILL)  # the server alone: the others have to notice
        until(lambda: not any(rig.is_alive(process) for process in everything), seconds=30)
        server._process.wait(10)
        server._process = None


def descendants(process):
    own = []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z" and int(parent) in {process, *own}:
            own.append(int(path.name))
    return own


@pytest.mark.slow
def test_every_clip_has_one_result_under_kills_and_stops(lab, longer, slowly, monkeypatch):
    """As the benchmark has it, for fewer clips: whoever works is killed or stopped at random."""
    import random

    from shoestring_hub.server import clip_files, clip_queue, clip_worker, media
    from shoestring_hub.server.models import ClipJob, HubClip

    for module, name, value in (
        (media, "STALL", 2.0),
        (clip_queue, "LEASE", timedelta(seconds=3)),
        (clip_queue, "PAUSE", timedelta(0)),
        (clip_queue, "TRIES", 20),
        (clip_worker, "RENEW", 0.3),
        (clip_worker, "POLL", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    clips = [rig.store(lab, longer + bytes([number]), "stormy") for number in range(8)]
    draw, workers, limit, acts = random.Random(0), [], time.monotonic() + 55, 0
    done = ClipJob.objects.filter(clip__in=clips, state=ClipJob.DONE)
    try:
        while done.count() < len(clips):
            assert time.monotonic() < limit, list(ClipJob.objects.filter(clip__in=clips).values())
            while len(workers) < 2:
                workers.append(rig.fork(clip_worker.work))
            time.sleep(draw.random() * 0.5)
            victim = draw.choice(workers)
            running = rig.children(victim)
            if running and acts < 8:
                acts += 1
                if acts % 2:
                    workers.remove(victim)
                    rig.end(victim)
                else:
                    os.kill(running[0], signal.SIGSTOP)
    finally:
        for worker in workers:
            rig.end(worker)
    for clip in HubClip.objects.filter(pk__in=[clip.pk for clip in clips]):
        assert clip_files.path_of(lab.project.pk, clip.video).is_file() and round(clip.seconds) == 4
    assert acts == 8
