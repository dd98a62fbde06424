"""A hub on a PostgreSQL that the test starts and ends itself; skipped where it is not installed."""

import shutil

import pytest

from benchmarks.tune.postgresql import PostgresServer, programs
from shoestring_hub.client.clip import send_clip
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from tests.hub.conftest import add_person
from tests.rigs.hub.backups import back_up_while_others_work, restored
from tests.rigs.hub.clips import make_clip, missing
from tests.rigs.hub.folders import contents, write_run
from tests.rigs.hub.people import check_feed, check_search, newcomer, upgraded
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.storms import storm
from tests.rigs.hub.visitor import Visitor
from tests.shares import share
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")]


@pytest.fixture(scope="module")
def database():
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def url(database):
    return f"postgresql://tune@/postgres?host={database.folder}"


@pytest.fixture(scope="module")
def hub(url, tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub") / "hub", "--database", url) as server:
        visitor = Visitor(server.port)
        visitor.set_password(add_person(server.folder, "ada", "--database", url), "ada")
        yield server, visitor


@pytest.fixture
def lab(hub, request, monkeypatch, tmp_path):
    server, visitor = hub
    slug = f"p-{abs(hash(request.node.name)) % 10**9}"
    visitor.make_project(slug)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log_in(server.address, visitor.make_token(slug))
    return server, visitor, slug


def test_runs_arrive_and_are_read(lab, tmp_path):
    _, visitor, slug = lab
    folder = write_run(tmp_path / "run", name="on postgres \x7f", steps=300)
    push(folder, checkpoints=True)
    pull(1, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": NaN, "a\\u0000b": 1}\n{"step": 2, "loss": Infinity, "big": 1e308}\n'
    )
    push(folder)
    for address in (
        "?sort=metric.loss&where=metric.loss<3,setting.run.steps=300",
        "?sort=-setting.optim.adamw.lr&where=name~on,number>0,metric.big>1&column=metric.loss",
        "?where=number%20%3D%2099999999999999999999,metric.loss%3C1e999&tag=%00&sort=%00",
        "runs/1",
        "runs/1/files/%00",
        "runs/1/export.zip",
        "runs.csv?column=metric.loss",
        "compare?run=1",
    ):
        assert visitor.get(f"/{slug}/{address}").status in (200, 404), address
    assert ">∞<" in visitor.get(f"/{slug}/?column=metric.loss").text


@pytest.mark.parametrize("seed", range(share(4, 2)))
def test_the_hubs_copy_equals_the_folder(lab, tmp_path, seed):
    assert storm(lab[0], tmp_path, seed, kill_server=True) == ""


def test_comments_are_searched_and_the_feed_is_in_order(lab, tmp_path):
    server, visitor, slug = lab
    for number in range(2):
        push(write_run(tmp_path / f"{number}", name=f"run {number}", files=0))
    grace = newcomer(server, visitor, slug, 1)
    check_search(visitor, grace, slug)
    check_feed(visitor, grace, slug)


@pytest.mark.skipif(bool(missing()), reason="clips cannot be converted here")
def test_clips_are_converted_and_found(lab, tmp_path):
    _, visitor, slug = lab
    push(write_run(tmp_path / "run", files=0))
    send_clip(make_clip(tmp_path / "clip.mp4"), run=tmp_path / "run", title="a pendulum")
    send_clip(make_clip(tmp_path / "other.mp4", seconds=0.5))
    for number in (1, 2):
        until(lambda number=number: visitor.get(f"/{slug}/clips/{number}/video.mp4").status == 200)
    commented_on = f"/{slug}/clips/1/comments"
    visitor.get(f"/{slug}/clips/1")
    assert visitor.post(commented_on, text="isochronous").status == 200
    assert f'href="/{slug}/clips/1"' in visitor.get("/search?q=pendulum").text
    assert f"/{slug}/clips/1?comment=1" in visitor.get("/search?q=isochron").text


def test_what_a_hub_had_before_the_search_is_found_as_well(database, tmp_path):
    import psycopg

    with psycopg.connect(f"host={database.folder} user=tune dbname=postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE upgraded")
    assert upgraded(tmp_path / "hub", f"postgresql://tune@/upgraded?host={database.folder}") == "1 1 2 1\n"


def test_a_database_that_crashes_and_comes_back_loses_nothing(lab, database, tmp_path):
    folder = write_run(tmp_path / "run", steps=500)
    push(folder)
    database.stop()
    database.start()
    push(folder, patience=30.0)
    pull(1, tmp_path / "copy", patience=30.0)
    shutil.rmtree(folder / "checkpoints")
    assert contents(tmp_path / "copy") == contents(folder)


def test_a_wrong_database_is_one_line(tmp_path, capsys):
    from shoestring.cli import main

    assert main(["hub", "serve", str(tmp_path / "hub"), "--database", "mysql://x/y"]) == 2
    assert "is not the URL of a PostgreSQL database" in capsys.readouterr().err


def test_a_backup_is_of_one_moment(lab, url, tmp_path):
    """Without a snapshot, the backup has files of a run that it does not have."""
    server, visitor, slug = lab
    said = back_up_while_others_work(server, tmp_path / "backup", write_run(tmp_path / "run", name="late"), url)
    assert "a backup of this hub is being made" in said
    assert ">late<" in visitor.get(f"/{slug}/").text
    restored(tmp_path / "restored", tmp_path / "backup")
