"""A hub with a person, a project and a login, for tests of the client and of pages."""

from pathlib import Path

import pytest

pytest.importorskip("django")

from shoestring_hub.client.logins import log_in
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor, add_person


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub") / "hub") as server:
        yield server


@pytest.fixture(scope="session")
def ada(server):
    """A person who is signed in."""
    visitor = Visitor(server.port)
    visitor.set_password(add_person(server.folder, "ada"), "ada")
    return visitor


@pytest.fixture
def project(ada, server, request, monkeypatch, tmp_path):
    """A new project of ada's, to which this test is logged in."""
    slug = f"p-{abs(hash(request.node.name)) % 10**12}"
    ada.make_project(slug)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log_in(server.address, ada.make_token(slug))
    return slug


@pytest.fixture(scope="session")
def configured(tmp_path_factory):
    """Django in this process, for a hub of its own: once, because Django's settings are the process's."""
    from shoestring_hub.server.configure import Place, configure

    place = Place(Path(tmp_path_factory.mktemp("configured")) / "hub")
    configure(place)
    from shoestring_hub.server.serve import prepare

    prepare()
    from django.conf import settings

    settings.ALLOWED_HOSTS.append("testserver")
    return place
