"""What an administrator does, by one command each, and the settings that the hub is deployed with."""

import shutil
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from shoestring.cli import main
from shoestring.core.errors import ShoestringError
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from tests.hub.conftest import add_person
from tests.rigs.hub.folders import contents, write_run
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import PASSWORD, Visitor


def hub(*words):
    command = [sys.executable, "-m", "shoestring", "hub", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_django_objects_to_nothing_where_the_hub_has_a_name(tmp_path):
    done = hub("check", tmp_path / "hub", "--name", "hub.example.org")
    assert done.returncode == 0 and done.stdout == "nothing to object\n"
    assert "security.W" in hub("check", tmp_path / "other").stdout  # without TLS, on loopback


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_hub_with_a_certificate_is_reached_by_tls_alone(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = ["--name", "localhost", "--certificate", str(certificate), "--key", str(key)]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with HubServer(tmp_path / "hub", *tls) as server:
        folder = write_run(tmp_path / "run")
        secret = _token_without_pages(server.folder)
        with pytest.raises(ShoestringError, match="CERTIFICATE_VERIFY_FAILED"):
            log_in(f"https://localhost:{server.port}", secret)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        log_in(f"https://localhost:{server.port}", secret)
        assert not push(folder, checkpoints=True).left_out
        pull(1, tmp_path / "copy")
        assert contents(tmp_path / "copy") == contents(folder)


def _token_without_pages(folder):
    """A token, made in a process that has the hub's tables."""
    code = """
import sys; from pathlib import Path
from shoestring_hub.server.configure import Place, configure
configure(Place(Path(sys.argv[1])))
from shoestring_hub.server.models import Member, Person, Project, Token, digest_of, draw_secret
project, person, secret = Project.objects.create(slug="tls"), Person.objects.create_user("tls"), draw_secret("hub")
Member.objects.create(project=project, person=person, role=3)
Token.objects.create(project=project, person=person, machine="m", digest=digest_of(secret))
print(secret)
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "without TLS on loopback only"),
        (["--host", "0.0.0.0", "--certificate", "c.pem"], "without TLS on loopback only"),
        (["--host", "0.0.0.0", "--certificate", "c.pem", "--key", "k.pem"], "--name is missing"),
    ],
)
def test_a_hub_is_not_served_to_others_without_tls(tmp_path, capsys, options, said):
    assert main(["hub", "serve", str(tmp_path / "hub"), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_link_of_an_administrator_works_once_and_again_for_a_forgotten_password(server):
    grace = Visitor(server.port)
    link = add_person(server.folder, "grace")
    grace.set_password(link, "grace")
    assert "was used already" in Visitor(server.port).get(urlsplit(link).path).text
    again = Visitor(server.port)
    again.set_password(add_person(server.folder, "grace"), "grace")
    assert grace.get("/account").text.count("Sign in") > 0  # the new password has ended the other session


@pytest.mark.slow
def test_a_deactivated_person_is_signed_out_and_cannot_sign_in(server):
    joan = Visitor(server.port)
    joan.set_password(add_person(server.folder, "joan"), "joan")
    assert hub("deactivate", server.folder, "--person", "joan").returncode == 0
    assert "<h1>Sign in</h1>" in joan.get("/").text
    assert "<h1>Sign in</h1>" in joan.send("/sign-in", username="joan", password=PASSWORD).text
    assert "there is no person `nobody`" in hub("deactivate", server.folder, "--person", "nobody").stderr


@pytest.mark.slow
def test_a_name_that_fails_to_sign_in_has_to_wait(configured, monkeypatch):
    from django.test import Client

    from shoestring_hub.server.models import Person
    from shoestring_hub.server.pages import accounts

    monkeypatch.setattr(accounts, "TRIES", 3)
    Person.objects.create_user("ken", password=PASSWORD)
    sign_in = lambda name, word: Client().post("/sign-in", {"username": name, "password": word}).status_code  # noqa: E731
    assert [sign_in("ken", str(number)) for number in range(4)] == [200, 200, 200, 429]
    assert sign_in("ken", PASSWORD) == 429
    assert sign_in("somebody else", "x") == 200


def test_owners_see_what_was_done_in_their_project(ada, project):
    ada.invite(project, 1)
    text = ada.get(f"/{project}/people").text
    assert "<td>invite</td>" in text and "<td>ada</td>" in text


@pytest.mark.slow
def test_a_name_that_cannot_be_is_refused(tmp_path):
    done = hub("person", tmp_path / "hub", "--person", "a b\n")
    assert done.returncode == 2 and "cannot be a name" in done.stderr


def test_clean_removes_what_nobody_needs_and_nothing_else(configured):
    import os

    from django.utils import timezone

    from shoestring_hub.protocol import digest
    from shoestring_hub.server import chunks, runs
    from shoestring_hub.server.access import Access
    from shoestring_hub.server.models import GRACE, HubRun, Person, Project, Role

    access = Access(Person.objects.create_user("cleaner"), Project.objects.create(slug="clean"), Role.OWNER)
    run, other = (runs.open_run(access, key * 32, "run") for key in "ab")
    names = []
    for text in (b"named", b"unused", b"fresh", b"of a deleted run"):
        names.append(digest(text))
        chunks.put(access.project.pk, names[-1], text)
    for one, text, name in ((run, b"named", names[0]), (other, b"of a deleted run", names[3])):
        assert not runs.commit(one, [{"path": "f", "size": len(text), "chunks": [name]}])
    paths = [chunks.path_of(access.project.pk, name) for name in names]
    for path in (paths[0], paths[1], paths[3]):
        os.utime(path, (0, 0))
    assert chunks.remove_unused() == 1 and [path.exists() for path in paths] == [True, False, True, True]
    HubRun.objects.filter(pk=other.pk).update(deleted=timezone.now() - GRACE * 2)
    HubRun.objects.filter(deleted__lt=timezone.now() - GRACE).delete()
    assert chunks.remove_unused() == 1 and [path.exists() for path in paths] == [True, False, True, False]


@pytest.mark.parametrize("verb", ["clean", "figures", "deactivate --person ada", "backup --to"])
def test_a_folder_without_a_hub_is_refused_and_stays_as_it_is(verb, tmp_path, capsys):
    name, *rest = verb.split()
    words = [str(tmp_path / "backup")] if name == "backup" else []
    assert main(["hub", name, str(tmp_path / "mistyped"), *rest, *words]) == 2
    assert "there is no hub in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
