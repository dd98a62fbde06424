"""Projects with people of each role, in the process of the test; Django must be configured."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

LINE = re.compile(r'href="/([\w-]+)/runs/(\d+)(?:\?comment=(\d+)#comment-\d+)?">')
_numbers = count()


class Lab:
    """A project of one run, with people of each role, named after the project."""

    def __init__(self, slug: str, *roles: str) -> None:
        from shoestring_hub.server.models import Project

        self.slug = slug
        self.project = Project.objects.create(slug=slug)
        self.people = {role: self.add(f"{slug}-{role}", role) for role in roles or ("owner", "writer", "reader")}
        self.access = self.access_of(next(iter(self.people.values())))
        self.run = self.push(self.access.person, f"run of {slug}")

    def add(self, name: str, role: str) -> Any:
        """Give a person, who may be new, a role in the project."""
        from shoestring_hub.server.models import Member, Person, Role

        person, _ = Person.objects.get_or_create(username=name)
        Member.objects.create(project=self.project, person=person, role=getattr(Role, role.upper()))
        return person

    def access_of(self, person: Any) -> Any:
        from shoestring_hub.server.access import Access
        from shoestring_hub.server.models import Member, Role

        return Access(person, self.project, Role(Member.objects.get(project=self.project, person=person).role))

    def push(self, person: Any, name: str) -> Any:
        from shoestring_hub.server import runs

        return runs.open_run(self.access_of(person), f"{next(_numbers):032x}", name)

    def clip(self, role: Any = "writer", run: Any = None, data: bytes = b"", state: str = "done", **fields: Any) -> Any:
        """A clip that a person, or the one of a role, has sent; `data` are stored as its video and poster."""
        from shoestring_hub.protocol import digest
        from shoestring_hub.server import clip_files
        from shoestring_hub.server.models import ClipJob, HubClip

        person = self.people[role] if isinstance(role, str) else role
        number = next(_numbers) + 1
        if data:
            path = clip_files.path_of(self.project.pk, digest(data))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            fields = {"video": digest(data), "poster": digest(data), "width": 64, "height": 48, "seconds": 2} | fields
        values = {"key": f"{number:064}", "name": f"clip {number}", "size": max(1, len(data)), "run": run} | fields
        clip = HubClip.objects.create(project=self.project, number=number, person=person, **values)
        ClipJob.objects.create(clip=clip, state=state)
        return clip

    def comment(self, role: Any, text: str, run: Any = None, **fields: Any) -> Any:
        """Comment as a person, or as the one of a role; `fields` are set afterwards."""
        from shoestring_hub.server import comments
        from shoestring_hub.server.models import Comment

        person = self.people[role] if isinstance(role, str) else role
        comment = comments.post(self.access_of(person), run or self.run, text)
        assert comment is not None
        Comment.objects.filter(pk=comment.pk).update(**fields)
        return comment

    @property
    def page(self) -> str:
        """The path of the page of the project's first run."""
        return f"/{self.slug}/runs/{self.run.number}"


def signed_in(person: Any) -> Any:
    """A client with a session of a person."""
    from django.test import Client

    client = Client()
    client.force_login(person)
    return client


def text_at(client: Any, address: str) -> str:
    """The HTML at an address, which must exist."""
    answer = client.get(address)
    assert answer.status_code == 200, (address, answer.status_code)
    return answer.content.decode()


def rows(text: str) -> list[tuple[str, int, int]]:
    """Project, run and comment of each row of a listing."""
    return [(slug, int(run), int(comment or 0)) for slug, run, comment in LINE.findall(text)]
