"""A person at a hub's pages: a browser without scripts, which keeps cookies and fills in forms."""

from __future__ import annotations

import html
import http.client
import re
import subprocess
import sys
from http.cookies import SimpleCookie
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

PASSWORD = "correct horse battery staple"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Visitor:
    """A browser at the hub that listens on `port`."""

    def __init__(self, port: int) -> None:
        self.port, self.cookies = port, dict[str, str]()

    def ask(self, method: str, path: str, fields: dict[str, object] | None = None) -> Answer:
        """Send a request with form fields, and the token against forged forms; redirects are not followed."""
        sent = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        body = None
        if fields is not None:
            body = urlencode({"csrfmiddlewaretoken": self.cookies.get("csrftoken", "")} | fields, doseq=True)
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        for name, value in response.getheaders():
            if name.lower() == "set-cookie":
                self.cookies |= {key: morsel.value for key, morsel in SimpleCookie(value).items()}
        connection.close()
        return answer

    def get(self, path: str) -> Answer:
        """The answer at a path, after redirects."""
        answer = self.ask("GET", path)
        for _ in range(5):
            if answer.status not in (301, 302):
                break
            answer = self.ask("GET", answer.headers["location"])
        return answer

    def send(self, path: str, **fields: object) -> Answer:
        """Open a page, fill in its form and send it; the answer after redirects."""
        self.get(path)
        answer = self.ask("POST", path, fields)
        return self.get(answer.headers["location"]) if answer.status in (301, 302) else answer

    def post(self, path: str, **fields: object) -> Answer:
        """Press a button whose form has another address than its page."""
        answer = self.ask("POST", path, fields)
        return self.get(answer.headers["location"]) if answer.status in (301, 302) else answer

    def set_password(self, link: str, name: str) -> None:
        """Follow the link of an administrator, and sign in."""
        path = urlsplit(link).path
        answer = self.ask("GET", path)
        form = answer.headers["location"]
        assert self.send(form, new_password1=PASSWORD, new_password2=PASSWORD).status == 200
        self.sign_in(name)

    def sign_in(self, name: str) -> None:
        answer = self.send("/sign-in", username=name, password=PASSWORD)
        assert f">{name}</a>" in answer.text, answer.text

    def make_project(self, slug: str) -> None:
        assert f"<h1>{slug}</h1>" in self.send("/", slug=slug).text

    def make_token(self, project: str, machine: str = "laptop", **options: str) -> str:
        answer = self.send(f"/{project}/tokens", machine=machine, **options)
        match = re.search(r"hub_[\w-]{43}", html.unescape(answer.text))
        assert match, answer.text
        return match[0]

    def invite(self, project: str, role: int) -> str:
        """The path of a new invitation."""
        self.get(f"/{project}/people")
        match = re.search(r"/join/[\w-]+", self.post(f"/{project}/people/invite", role=role).text)
        assert match
        return match[0]


def add_person(folder: Path, name: str, *options: str) -> str:
    """The link by which a new person of a hub sets a password."""
    command = [sys.executable, "-m", "shoestring", "hub", "person", str(folder), "--person", name, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()[-1]
