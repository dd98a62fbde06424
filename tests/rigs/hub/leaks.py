"""Tries to reach another project's runs and clips by every route of the hub, as everybody who may not.

Django must be configured. What may be seen by whom is computed from the rule of each route; that routes have the right
rules is for a test to say.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.core import serializers
from django.db.models import Q
from django.test import Client
from django.urls import URLPattern
from django.utils import timezone

from shoestring_hub.protocol import digest
from shoestring_hub.server import chunks, clip_files, comments, logs, models, runs
from shoestring_hub.server.access import Access, AccessRule
from shoestring_hub.server.models import (
    Comment,
    HubRun,
    Invitation,
    Member,
    Person,
    Project,
    Role,
    Tag,
    Token,
    digest_of,
)
from shoestring_hub.server.urls import urlpatterns

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
ROLES: dict[str, int] = {"owner": 3, "writer": 2, "reader": 1}
REFUSALS = (302, 400, 401, 403, 404, 405, 409, 410)


@dataclass
class Side:
    """A project with people, tokens and one run, every text of which holds a word that no other project has."""

    slug: str
    word: str = field(default_factory=lambda: f"canary{secrets.token_hex(8)}")
    tokens: dict[str, str] = field(default_factory=dict)
    people: dict[str, Person] = field(default_factory=dict)

    def seed(self) -> Side:
        word = self.word
        self.project = Project.objects.create(slug=self.slug, notes=f"notes {word}")
        for name, role in ROLES.items():
            self.people[name] = Person.objects.create_user(f"{self.slug}-{name}")
            Member.objects.create(project=self.project, person=self.people[name], role=role)
        self.people["removed"] = Person.objects.create_user(f"{self.slug}-removed")
        self.people["deactivated"] = Person.objects.create_user(f"{self.slug}-deactivated")
        Member.objects.create(project=self.project, person=self.people["deactivated"], role=Role.OWNER)
        for name, person in self.people.items():
            self.tokens[name] = self._token(person)
        self.tokens["write only"] = self._token(self.people["writer"], write_only=True)
        self.tokens["revoked"] = self._token(self.people["owner"])
        Token.objects.filter(digest=digest_of(self.tokens["revoked"])).delete()
        access = Access(self.people["owner"], self.project, Role.OWNER)
        for _ in range(2 if self.slug == "beta" else 5):  # so that numbers and ids of the two differ
            self.run = runs.open_run(access, secrets.token_hex(16), f"run {word}")
        self._fill()
        self.invitation = Invitation.objects.create(
            project=self.project, role=Role.OWNER, digest=digest_of(f"join_{word}"), made_by=self.people["owner"]
        )
        Person.objects.filter(pk=self.people["deactivated"].pk).update(is_active=False)
        return self

    def _token(self, person: Person, *, write_only: bool = False) -> str:
        secret = models.draw_secret("hub")
        Token.objects.create(
            project=self.project,
            person=person,
            machine=f"machine {self.word}",
            digest=digest_of(secret),
            write_only=write_only,
        )
        return secret

    def _fill(self) -> None:
        word, run = self.word, self.run
        contents = {
            "run.toml": f'[run]\nname = "run {word}"\nkey_{word} = 1\n',
            "report.html": f"<p>{word}",
            "file.txt": word,
        }
        self.digests = []
        for path, text in contents.items():
            name = digest(text.encode())
            self.digests.append(name)
            chunks.put(self.project.pk, name, text.encode())
            assert not runs.commit(run, [{"path": path, "size": len(text), "chunks": [name]}])
        rows = "".join(json.dumps({"step": step, "time": step, f"metric_{word}": 1.0}) + "\n" for step in range(1, 9))
        logs.splice(logs.begin(run), rows.encode(), at=0, have=0, attempt=1)
        HubRun.objects.filter(pk=run.pk).update(notes=f"notes {word}")
        Tag.objects.create(run=run, name=f"tag {word}")
        for name, text in (("reader", "@everybody"), ("owner", "hidden"), ("deactivated", "@")):
            access = Access(self.people[name], self.project, Role.OWNER)
            comments.post(access, run, f"{text} {word} @{self.people['writer'].username}")
        Comment.objects.filter(run=run, number=2).update(hidden=timezone.now())
        self._fill_clips()
        follow = models.Follow.objects.create
        follow(follower=self.people["writer"], person=self.people["reader"])
        follow(follower=self.people["removed"], person=self.people["reader"])
        follow(follower=self.people["writer"], project=self.project)
        self.run.refresh_from_db()

    def _fill_clips(self) -> None:
        """A converted clip of the run, and a hidden one of the project; what is stored as its video is the word."""
        names = [digest(self.word.encode())] * 2
        path = clip_files.path_of(self.project.pk, names[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.word)
        for number in range(1, 3 if self.slug == "beta" else 5):
            self.clip = models.HubClip.objects.create(
                project=self.project,
                run=self.run if number % 2 else None,
                number=number,
                key=f"{number:064}",
                name=f"clip {self.word}",
                notes=f"notes {self.word}",
                person=self.people["reader"],
                size=1,
                video=names[0],
                poster=names[1],
                hidden=None if number % 2 else timezone.now(),
            )
            models.ClipJob.objects.create(clip=self.clip, state=models.ClipJob.DONE)
            access = Access(self.people["reader"], self.project, Role.OWNER)
            comments.post(access, self.clip, f"on a clip {self.word} @{self.people['writer'].username}")
        self.clip = models.HubClip.objects.get(project=self.project, number=1)

    def names(self) -> dict[str, Any]:
        """Arguments of routes that lead to this side."""
        return {
            "project": self.slug,
            "run": self.run.number,
            "number": self.run.number,
            "key": self.run.key,
            "path": "file.txt",
            "comment": 1,
            "clip": self.clip.number,
            "share": 1,
            "signed": "guessed",
            "name": self.people["reader"].username,
            "digest_": self.digests[0],
            "person": self.people["reader"].pk,
            "invitation": self.invitation.pk,
            "token": Token.objects.get(digest=digest_of(self.tokens["owner"])).pk,
            "secret": "join_guessed",
            "uidb64": "MQ",
        }

    def signs(self) -> tuple[str, ...]:
        """Texts of which a page that tells about this side has at least one: the word, names of people, addresses."""
        names = (person.username for name, person in self.people.items() if name != "removed")
        return self.word, f"/{self.slug}/", f">{self.slug}<", *names

    def rows(self) -> str:
        """All that the database has of this side, but when tokens were used."""
        of_project = (models.Member, models.Invitation, models.HubRun, models.HubClip, models.ValueKey)
        found = [one for model in of_project for one in model.objects.filter(project=self.project)]
        of_run = (models.File, models.Segment, models.Points, models.RunValue, models.Tag, Comment)
        found += [one for model in of_run for one in model.objects.filter(run__project=self.project)]
        found += [Project.objects.get(pk=self.project.pk)]
        of_clip = (models.ClipJob, models.ClipShare, Comment)
        found += [one for model in of_clip for one in model.objects.filter(clip__project=self.project)]
        found += models.Mention.objects.filter(comment__run__project=self.project)
        found += models.Follow.objects.filter(Q(project=self.project) | Q(person__in=[*self.people.values()]))
        tokens = Token.objects.filter(project=self.project).values_list("digest", flat=True)
        return serializers.serialize("json", found) + ",".join(sorted(tokens))


@dataclass(frozen=True)
class Actor:
    """Somebody who asks: with a session, with a token, or with neither."""

    name: str
    client: Client
    token: str = ""
    role: int = 0
    """Role in the project that is attacked; 0 for none."""
    write_only: bool = False

    def may(self, rule: AccessRule) -> bool:
        """Whether a rule admits this actor to the attacked project."""
        if self.token:
            tokens = {AccessRule.TOKEN: 1, AccessRule.TOKEN_READ: 1, AccessRule.TOKEN_WRITE: 2}
            return self.role >= tokens.get(rule, 9) and not (rule is AccessRule.TOKEN_READ and self.write_only)
        return isinstance(rule.value, int) and self.role >= rule.value

    def ask(self, method: str, path: str, data: Any = None, **headers: str) -> Any:
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        kind = "application/json" if self.token else "application/x-www-form-urlencoded"
        body = json.dumps(data or {}) if self.token else data or ""
        return self.client.generic(method, path, body, content_type=kind, headers=headers)


def actors(own: Side, other: Side) -> Iterator[Actor]:
    """Everybody who might want to see `other`: its people, former ones too, those of `own`, and anybody."""
    yield Actor("anybody", Client())
    yield Actor("anybody with a made-up token", Client(), "hub_" + "x" * 43)
    for side in (own, other):
        for name, person in side.people.items():
            client = Client()
            client.force_login(person)
            here = ROLES.get(name, 0) if side is other else 0
            yield Actor(f"{side.slug}'s {name}", client, role=here)
        for name, token in side.tokens.items():
            role = {**ROLES, "write only": 2}.get(name, 0) if side is other else 0
            yield Actor(f"{side.slug}'s token: {name}", Client(), token, role, name == "write only")


def paths(pattern: URLPattern, own: Side, other: Side) -> Iterator[str]:
    """Addresses of a route that lead to `other`: by all of its names, and by its ids in the project of `own`."""
    route = str(pattern.pattern)
    for names in (other.names(), other.names() | {"project": own.slug}):
        yield "/" + "".join(_fill(route, names))


def _fill(route: str, names: dict[str, Any]) -> Iterator[str]:
    for part in route.replace(">", "<").split("<"):
        converter, colon, name = part.partition(":")
        known = colon and name in names and converter in ("slug", "int", "str", "path")
        yield str(names[name]) if known else part


@dataclass
class Attempts:
    """How many times it was tried, and what came of it."""

    tried: int = 0
    admitted: int = 0
    leaks: list[str] = field(default_factory=list)

    def look(self, actor: Actor, what: str, answer: Any, word: str, refusals: tuple[int, ...] = REFUSALS) -> None:
        self.tried += 1
        body = b"".join(answer.streaming_content) if answer.streaming else answer.content
        told = body.decode(errors="replace") + str(dict(answer.items()))
        if word in told or answer.status_code not in refusals:
            self.leaks.append(f"{actor.name}: {what}: {answer.status_code}")


def attack(own: Side, other: Side, methods: tuple[str, ...] = METHODS) -> Attempts:
    """Try every route as everybody, by some methods; without any, by those that the route has.

    Whoever may see the project is a control: that it can be seen.
    """
    attempts, before = Attempts(), other.rows()
    for actor in actors(own, other):
        for pattern in urlpatterns:
            rule = pattern.callback.rule
            if rule in (AccessRule.PUBLIC, AccessRule.PERSON, AccessRule.LISTING, AccessRule.TOKEN):
                continue
            for number, path in enumerate(paths(pattern, own, other)):
                in_own = number == 1 and f"/{own.slug}/" in path
                if actor.may(rule) and not in_own:
                    if pattern.callback.methods == ("GET",) or pattern.name == "get_chunk":  # the control
                        method = pattern.callback.methods[0]
                        asked = actor.ask(method, path, {"path": "file.txt", "chunk": 0} if actor.token else None)
                        attempts.admitted += asked.status_code == 200
                    continue
                at_home = actor.name.startswith(own.slug) and (in_own or bool(actor.token))  # numbers mean own runs
                for method in ("GET", "HEAD") if at_home and in_own else methods or pattern.callback.methods:
                    data = {"deleted": "yes", "role": 3, "notes": "changed", "digests": other.digests, "name": "x"}
                    data |= {"path": "file.txt", "chunk": 0, "files": [], "paths": []}
                    query = f"path=file.txt&chunk=0&run={other.run.number}"
                    range_ = {"Range": "bytes=0-1"} if method == "GET" else {}
                    answer = actor.ask(method, f"{path}?{query}", data, **range_)
                    attempts.look(
                        actor,
                        f"{method} {path}",
                        answer,
                        other.word,
                        (*REFUSALS, 200, 205, 206) if at_home else REFUSALS,
                    )
    _attack_chunks(attempts, own, other)
    _attack_lists(attempts, own, other)
    _attack_listings(attempts, own, other, methods)
    if other.rows() != before:
        attempts.leaks.append("the attacked project was changed")
    return attempts


def _attack_chunks(attempts: Attempts, own: Side, other: Side) -> None:
    """Ask of the digests of the other's bytes, and name them in files of one's own."""
    for name in ("owner", "writer", "write only"):
        actor = Actor(f"{own.slug}'s token: {name}", Client(), own.tokens[name])
        answer = actor.ask("POST", "/api/chunks/missing", {"digests": other.digests})
        attempts.tried += 1
        if answer.json() != {"missing": other.digests}:
            attempts.leaks.append(f"{actor.name}: is told which chunks {other.slug} has")
        run = actor.ask("POST", f"/api/own/{secrets.token_hex(16)}", {"name": "thief"}).json()
        key = HubRun.objects.get(project=own.project, number=run["number"]).key
        file = {"path": "stolen", "size": 10, "chunks": other.digests[:1]}
        attempts.look(actor, "commit", actor.ask("POST", f"/api/own/{key}/files", {"files": [file]}), other.word)
    writer = Actor(
        "write only", Client(), other.tokens["write only"]
    )  # within its own project it is told nothing either
    for question in (
        writer.ask("POST", f"/api/own/{other.run.key}", {"name": "x"}),
        writer.ask("PUT", f"/api/own/{other.run.key}/log?at=0&have=0&attempt=1"),
    ):
        attempts.look(writer, "a run of another token", question, other.word)
    attempts.tried += 1
    if writer.ask("POST", "/api/chunks/missing", {"digests": other.digests}).json()["missing"] != other.digests:
        attempts.leaks.append("a token that only writes is told which chunks its project has")


def _attack_lists(attempts: Attempts, own: Side, other: Side) -> None:
    """Pages that everybody has: no word of the other project, and no number of its runs."""
    for name in ROLES:
        client = Client()
        client.force_login(own.people[name])
        pages = ("", "clips", "runs.csv", "compare?run=1&run=2")
        for path in ("/", "/account", *(f"/{own.slug}/{page}" for page in pages)):
            attempts.tried += 1
            answer = client.get(path)
            body = b"".join(answer.streaming_content) if answer.streaming else answer.content
            if other.word in body.decode() or other.slug in body.decode():
                attempts.leaks.append(f"{name}: {path} speaks of {other.slug}")


def _attack_listings(attempts: Attempts, own: Side, other: Side, methods: tuple[str, ...]) -> None:
    """Listings across projects: whatever is asked for, they speak of the other project to its people alone."""
    queries = (
        f"q={other.word}",
        f"q={other.slug}",
        f"q={other.word}&project={other.slug}",
        "before=9999999999999999.0",
    )
    listings = [pattern for pattern in urlpatterns if pattern.callback.rule is AccessRule.LISTING]
    for actor in actors(own, other):
        for pattern in listings:
            path = "/" + "".join(_fill(str(pattern.pattern), other.names()))
            if actor.role and not actor.token:  # the control
                answer = actor.ask("GET", f"{path}?{queries[0]}")
                attempts.admitted += other.slug in answer.content.decode()
                continue
            for method, query in itertools.product(
                methods or pattern.callback.methods, queries if pattern.name == "search" else queries[-1:]
            ):
                answer = actor.ask(method, f"{path}?{query}", {"follow": "yes"})
                attempts.tried += 1
                told = answer.content.decode().replace(f'value="{other.word}"', "")  # the search repeats its question
                of_person = "<str:name>" in str(pattern.pattern)
                refused = answer.status_code in REFUSALS
                if not refused and (of_person or any(sign in told for sign in other.signs())):
                    attempts.leaks.append(f"{actor.name}: {method} {path}?{query}: {answer.status_code}")
