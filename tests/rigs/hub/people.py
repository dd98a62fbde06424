"""Two people who comment, follow and search at a hub, whatever its database is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor

WRITTEN = "of a newcomer 7"
TEXTS = {
    1: "The loss diverges with `optim.adamw.lr` = 0.3; see runs/quickstart.",
    2: "Größe and naïve and 速度 and emoji 🎉",
    3: 'quoted "words" and it\'s <b>bold</b> & done_with_it',
    4: "an old text",
}
"""Comments on run 1, by number; the last one is edited, and then says `EDITED`."""
EDITED = "a brand new remark"
FOUND = {
    "diverges": {1},
    "DIVERGES": {1},
    "diverg": {1},
    "iverges": set(),
    "adamw": {1},
    "optim.adamw.lr": {1},
    "runs/quick": {1},
    "loss quickstart": {1},
    "loss bold": set(),
    "0.3": {1},
    "größe": {2},
    "naïve": {2},
    "速度": {2},
    "🎉": set(),
    "bold": {3},
    "done_with": {3},
    'quoted" OR "loss': set(),
    "it's": {3},
    "' & loss": {1},
    "NEAR(loss diverges)": set(),
    "text : loss": set(),
    "loss*": {1},
    "(": None,
    '"': None,
    "brand": {4},
    "old": set(),
}
"""Numbers of the comments that a query finds; None where it has no words and so is no search."""

UPGRADE = """
import sys; from pathlib import Path
from shoestring_hub.server.configure import Place, configure
configure(Place(Path(sys.argv[1]), sys.argv[2]))
from django.core.management import call_command
from django.db import connection
with connection.constraint_checks_disabled():
    call_command("migrate", "hub", "0001", verbosity=0)
from django.utils import timezone
from shoestring_hub.server.models import Comment, HubRun, Person, Project
from shoestring_hub.server.serve import prepare
from shoestring_hub.server.text_search import matching
project, person = Project.objects.create(slug="old", notes="antediluvian"), Person.objects.create_user("p")
HubRun.objects.create(project=project, person=person, number=1, key="k", name="old run", notes="palimpsest")
with connection.constraint_checks_disabled():
    call_command("migrate", "hub", "0002", verbosity=0)
with connection.cursor() as cursor:
    text = "INSERT INTO hub_comment (run_id, number, person_id, text, created) VALUES (1, 1, 1, 'a fossil', %s)"
    cursor.execute(text, [timezone.now()])
prepare()
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
HubRun.objects.get().comments.create(number=2, person=person, text="a fossilised leaf")
found = [matching(HubRun.objects.all(), ["palimp"]), matching(Project.objects.all(), ["antediluvian"])]
found += [matching(Comment.objects.all(), [word]) for word in ("fossil", "leaf")]
print(*(rows.count() for rows in found))
"""
"""A hub of the first version that is upgraded twice; and a check that the migrations make what the models say."""


def newcomer(server: HubServer, owner: Visitor, slug: str, role: int) -> Visitor:
    """A new person, who joins a project by an invitation of its owner."""
    visitor = Visitor(server.port)
    name = f"grace-{slug}"
    joined = visitor.send(owner.invite(slug, role), username=name, password1=WRITTEN, password2=WRITTEN)
    assert f"<h1>{slug}</h1>" in joined.text, joined.text
    return visitor


def commented(visitor: Visitor, slug: str, text: str, run: int = 1) -> None:
    visitor.get(f"/{slug}/runs/{run}")
    assert visitor.post(f"/{slug}/runs/{run}/comments", text=text).status == 200


def listed(text: str, slug: str) -> list[tuple[int, int]]:
    """The rows of a listing that are of a project: numbers of the run and of the comment, 0 for a run by itself."""
    pattern = rf'href="/{slug}/runs/(\d+)(?:\?comment=(\d+)#comment-\d+)?">'
    return [(int(run), int(comment or 0)) for run, comment in re.findall(pattern, text)]


def check_search(owner: Visitor, reader: Visitor, slug: str) -> None:
    """Comments, notes and names of runs are found by their words, by whoever may see them."""
    for text in TEXTS.values():
        commented(owner, slug, text)
    owner.post(f"/{slug}/runs/1/comments/4/edit", text=EDITED)
    for query, numbers in FOUND.items():
        page = reader.ask("GET", f"/search?{_encoded(query, slug)}")
        assert page.status == 200, query
        expected = [(1, number) for number in sorted(numbers or (), reverse=True)]
        assert listed(page.text, slug) == expected, (query, listed(page.text, slug))
    assert "<mark>bold</mark>&lt;/b&gt;" in reader.get(f"/search?{_encoded('bold', slug)}").text
    owner.post(f"/{slug}/runs/2/edit", notes="Notes on a *zyzzyva*", tags="")
    assert listed(reader.get("/search?q=zyzzyva").text, slug) == [(2, 0)]
    owner.post(f"/{slug}/runs/2/edit", notes="", tags="")
    assert listed(reader.get("/search?q=zyzzyva").text, slug) == []
    owner.post(f"/{slug}/runs/1/comments/1/hide", hidden="yes")
    assert listed(reader.get("/search?q=diverges").text, slug) == []
    assert listed(owner.get("/search?q=diverges").text, slug) == [(1, 1)]
    owner.post(f"/{slug}/runs/1/comments/3/delete")
    assert listed(owner.get(f"/search?{_encoded('bold', slug)}").text, slug) == []


def check_feed(owner: Visitor, reader: Visitor, slug: str) -> None:
    """The feed of somebody who follows a project has its runs and comments, newest first, over several pages."""
    reader.get("/following")
    assert reader.post(f"/{slug}/follow", follow="yes").status == 200
    before = listed(reader.get("/feed").text, slug)
    for number in range(28):
        commented(owner, slug, f"number {number}", run=1 + number % 2)
    rows, address = [], "/feed"
    while address:
        page = reader.get(address).text
        rows += listed(page, slug)
        match = re.search(r'href="(\?before=[\d.]+)"', page)
        address = f"/feed{match[1]}" if match else ""
    assert len(rows) == len(set(rows)) == len(before) + 28
    assert rows[28:] == before
    for run in (1, 2):
        numbers = [comment for number, comment in rows if number == run]
        assert numbers == sorted(numbers, reverse=True) and numbers[-1] == 0  # the run itself came first


def _encoded(query: str, slug: str) -> str:
    return urlencode({"q": query, "project": slug})


def upgraded(folder: Path, database: str = "") -> str:
    """How many runs, projects and comments of former versions are found after the upgrades, as printed, or errors."""
    command = [sys.executable, "-c", UPGRADE, str(folder), database]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr
