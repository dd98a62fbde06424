"""The store of a labelling project, what goes in and out of it as files, and the page on which people label."""

import csv
import http.client
import json
import threading

import pytest
import sqlalchemy as sql

from benchmarks.tune.postgresql import PostgresServer, programs
from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.annotation import exchange
from shoestring_recipes.annotation.__main__ import main
from shoestring_recipes.annotation.server import LabelServer
from shoestring_recipes.annotation.store import QUERIES, open_store, plan, scans
from shoestring_recipes.annotation.tables import FAILED, StoredTables
from tests.browser import Browser, needs_chromium

CHOICES = ["good", "bad", '<b>neither</b> & "both"']
TEXTS = ["A fine day.", "<script>alert(1)</script> & more", "=1+1 is a formula\nin two lines", "x" * 5000]


@pytest.fixture
def store(tmp_path):
    return filled(open_store(f"sqlite:///{tmp_path / 'labels.db'}"))


def filled(store):
    for number, text in enumerate(TEXTS):
        assert store.add_item("file a.csv", f"http://a.example/{number}", f"title {number}", text)
    store.add_project("mood", "How is it?", CHOICES, wanted=2)
    assert store.add_tasks("mood") == len(TEXTS)
    return store


def label_all(store, rater, choice):
    project, number = store.project("mood"), store.raters()[rater]
    for task in list(store.tasks(project)):
        store.add_label(project, task.task, number, choice(task.task), 1.5)


def check_store(store):
    """What any database must do with a store that is `filled`."""
    assert not store.add_item("other", "http://a.example/0", "again", "again")
    store.add_item("other", "http://b.example/0", "copy", "a FINE  day.\0\ud800")
    assert store.add_tasks("mood") == 1  # the text has characters that are none, so it is another one
    assert store.add_tasks("mood") == 0
    store.add_rater("ada")
    store.add_rater("bob")
    project, people = store.project("mood"), store.raters()
    seen = []
    while task := store.next_task(project, people["ada"]):
        seen.append(task["task"])
        store.add_label(project, task["task"], people["ada"], None if len(seen) == 2 else 0)
    assert len(set(seen)) == store.task_count(project) == store.labelled_by(project, people["ada"]) == 5
    store.add_label(project, seen[0], people["ada"], 1)  # changes the mind
    first = store.next_task(project, people["bob"])
    assert (first["task"], first["text"]) == (seen[0], TEXTS[0])
    assert store.undo(project, people["ada"]) and not store.undo(project, people["bob"])
    assert [row.choice for row in store.labels(project)] == [None, 0, 0, 0]  # the newest one is taken back
    for wrong, message in (
        ((project, 999, people["ada"], 0), "no task 999"),
        ((project, seen[0], 999, 0), "no rater 999"),
        ((project, seen[0], people["ada"], 3), "no choice 3"),
    ):
        with pytest.raises(DataError, match=message):
            store.add_label(*wrong)
    store.add_addresses("a.example", ["http://a.example/x", "http://a.example/x", "http://a.example/y"])
    assert [row[1] for row in store.waiting("a.example", 0, 9)] == ["http://a.example/x", "http://a.example/y"]
    store.store_page("a.example", "http://a.example/x", "x", "text of x", ["http://a.example/z"], 0)
    store.settle("http://a.example/y", FAILED, "status 500")
    assert store.states("a.example") == {("stored", ""): 1, ("failed", "status 500"): 1, ("waiting", ""): 1}
    assert store.retry_failed("a.example", FAILED) == 1 and len(store.waiting("a.example", 0, 9)) == 2
    assert store.store_records("api", [("http://c/#1", "t", "text")], "next", done=False) == 1
    assert store.cursor("api") == ("next", False) and store.cursor("none") == ("", False)


def test_a_store_in_a_file(store, tmp_path):
    check_store(store)
    again = open_store(f"sqlite:///{tmp_path / 'labels.db'}")
    assert set(again.raters()) == {"ada", "bob"} and again.item("http://b.example/0").title == "copy"
    with again.reading() as connection:  # the migrations make what the tables say
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        assert compare_metadata(MigrationContext.configure(connection), StoredTables.metadata) == []


@pytest.mark.slow
@pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")
def test_a_store_in_postgresql():
    with PostgresServer() as server:
        store = filled(open_store(server.url))
        check_store(store)
        with store.writing() as connection:
            connection.exec_driver_sql("set enable_seqscan = off")  # it is quicker for a few rows
            for name, arguments in ARGUMENTS.items():
                assert scans(plan(connection, QUERIES[name](*arguments))) == [], name


ARGUMENTS = {
    "item_of_url": ("http://a.example/1%",),
    "newest_of_host": ("a.example",),
    "items_of_source": ("file a.csv", 1),
    "same_text": ("0" * 32,),
    "next_task": (1, 1, 2),
    "newest_labels": (1,),
}


def test_the_named_queries_go_through_indexes(store):
    assert ARGUMENTS.keys() == QUERIES.keys()
    with store.reading() as connection:
        for name, arguments in ARGUMENTS.items():
            lines = plan(connection, QUERIES[name](*arguments))
            assert lines and scans(lines) == [], (name, lines)
            assert not any("TEMP B-TREE" in line for line in lines), (name, lines)  # nor is anything sorted
    with store.writing() as connection:
        connection.execute(sql.text("drop index items_digest"))
        assert scans(plan(connection, QUERIES["same_text"]("0"))) == ["SCAN items"]


def test_what_cannot_be_a_store_or_a_project_is_refused(store, tmp_path):
    (tmp_path / "no.db").write_text("this is a text, not a database, and long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match="cannot use the store"):
        open_store(f"sqlite:///{tmp_path / 'no.db'}")
    with pytest.raises(ConfigError, match="no address of a database") as caught:
        open_store("postgres//user:secret@host")
    assert "secret" not in str(caught.value)
    for choices in (["one"], ["one", "one"], ["one", " "]):
        with pytest.raises(ConfigError, match="no two or more different answers"):
            store.add_project("new", "?", choices)
    with pytest.raises(ConfigError, match="there is a project `mood` already"):
        store.add_project("mood", "?", CHOICES)
    with pytest.raises(ConfigError, match="did you mean `mood`"):
        store.project("moos")
    store.add_rater("ada")
    with pytest.raises(ConfigError, match="there is a rater `ada` already"):
        store.add_rater("ada")


# -- files -------------------------------------------------------------------------------------------------------------


def test_tasks_and_labels_go_through_csv(store, tmp_path):
    for name in ("ada", "bob"):
        store.add_rater(name)
        label_all(store, name, lambda task: None if task == 4 else task % 3)
    project = store.project("mood")
    assert exchange.write_tasks_csv(store, project, tmp_path / "tasks.csv") == 4
    rows = list(csv.DictReader((tmp_path / "tasks.csv").open(newline="", encoding="utf-8")))
    assert [row["text"] for row in rows] == [*TEXTS[:2], f"'{TEXTS[2]}", TEXTS[3]]  # no formula for a spreadsheet
    assert exchange.write_labels_csv(store, project, tmp_path / "labels.csv") == 8
    other = filled(open_store(f"sqlite:///{tmp_path / 'other.db'}"))
    with pytest.raises(DataError, match="line 2: there is no rater `ada`"):
        exchange.read_labels_csv(other, other.project("mood"), tmp_path / "labels.csv")
    for _ in range(2):  # the second time changes nothing
        assert exchange.read_labels_csv(other, other.project("mood"), tmp_path / "labels.csv", add_raters=True) == 8
    answers = [[(row.url, row.name, row.choice) for row in one.labels(one.project("mood"))] for one in (store, other)]
    assert answers[0] == answers[1] and len(answers[0]) == 8


@pytest.mark.parametrize(
    "line, message",
    [
        ("http://a.example/9,ada,good", "line 2: the project `mood` has no task `http://a.example/9`"),
        ("http://a.example/0,eve,good", "line 2: there is no rater `eve`"),
        ("http://a.example/0,,good", "line 2: a label has no rater"),
        ("http://a.example/0,ada,goof", "no choice `goof`.*did you mean `good`"),
        ("http://a.example/0,ada,bad", "rater 1 has given task 1 another answer before"),
        ('http://a.example/0,ada,"good', "is no CSV"),
    ],
)
def test_labels_that_do_not_fit_are_refused(store, tmp_path, line, message):
    store.add_rater("ada")
    store.add_label(store.project("mood"), 1, 1, 0)
    (tmp_path / "labels.csv").write_text(f"url,rater,label\n{line}\n")
    with pytest.raises(DataError, match=message):
        exchange.read_labels_csv(store, store.project("mood"), tmp_path / "labels.csv")
    assert len(list(store.labels(store.project("mood")))) == 1
    (tmp_path / "labels.csv").write_text("url,label\n")
    with pytest.raises(DataError, match="no column `rater`"):
        exchange.read_labels_csv(store, store.project("mood"), tmp_path / "labels.csv")


def test_tasks_and_labels_go_through_label_studio(store, tmp_path):
    for name in ("ada@example.org", "user 7"):
        store.add_rater(name)
        label_all(store, name, lambda task: None if task == 4 else task % 3)
    project, path = store.project("mood"), tmp_path / "tasks.json"
    assert exchange.write_label_studio(store, project, path) == 4
    first, last = json.loads(path.read_text())[0], json.loads(path.read_text())[-1]
    assert first["data"] == {"text": TEXTS[0], "title": "title 0", "url": "http://a.example/0"}
    region = first["annotations"][0]["result"][0]
    assert region["type"] == "choices" and region["value"] == {"choices": ["bad"]}
    config = exchange.labeling_config(project)
    assert f'name="{region["from_name"]}" toName="{region["to_name"]}"' in config and "&lt;b&gt;neither" in config
    assert [one["completed_by"] for one in first["annotations"]] == [{"email": "ada@example.org"}, 7]
    assert last["annotations"][0]["was_cancelled"] and last["annotations"][0]["result"] == []
    other = filled(open_store(f"sqlite:///{tmp_path / 'other.db'}"))
    assert exchange.read_label_studio(other, other.project("mood"), path, add_raters=True) == 8
    answers = [[(row.url, row.name, row.choice) for row in one.labels(one.project("mood"))] for one in (store, other)]
    assert answers[0] == answers[1] and len(answers[0]) == 8


EXPORT = [
    {
        "id": 1,
        "data": {"my_text": "Opossums are great"},
        "annotations": [
            {
                "id": 1001,
                "completed_by": 10,
                "lead_time": 4.288,
                "was_cancelled": False,
                "result": [{"from_name": "a", "to_name": "b", "type": "choices", "value": {"choices": ["good"]}}],
            }
        ],
    }
]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda task: None, None),
        (lambda task: task.pop("data"), "task 1 has no `data`"),
        (lambda task: task.update(id=99), "has no task 99"),
        (lambda task: task["annotations"][0].pop("completed_by"), "neither a number nor an object with `email`"),
        (lambda task: task["annotations"][0].update(lead_time="long"), "`long` are no seconds"),
        (lambda task: task["annotations"][0].update(result=[]), "not exactly one choice"),
        (lambda task: task["annotations"][0].update(result="x"), "is no list of objects"),
        (lambda task: task["annotations"][0]["result"][0].update(value={"choices": ["a", "b"]}), "exactly one choice"),
        (lambda task: task["annotations"][0]["result"][0].update(value={"choices": ["goof"]}), "did you mean `good`"),
    ],
)
def test_exports_of_label_studio_are_read_or_refused(store, tmp_path, change, message):
    tasks = json.loads(json.dumps(EXPORT))
    change(tasks[0])
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    read = [store, store.project("mood"), tmp_path / "export.json"]
    if message is None:
        assert exchange.read_label_studio(*read, add_raters=True) == 1 and store.raters() == {"user 10": 1}
        (tmp_path / "export.json").write_text('{"label": "good"}')
        message = "no list of tasks"
    with pytest.raises(DataError, match=message):
        exchange.read_label_studio(*read, add_raters=True)


@pytest.mark.slow
def test_the_command_line_goes_from_a_table_to_soft_labels(tmp_path, capsys):
    words = ("good", "bad", "fine", "poor")
    rows = [
        f"http://a.example/{number},{words[number % 4]},a {words[number % 4]} day {number}" for number in range(160)
    ]
    (tmp_path / "items.csv").write_text("url,title,text\n" + "\n".join(rows))
    truth = ["good", "bad", "good", "bad"]
    answers = [
        f"http://a.example/{number},{name},{'good' if name == 'eve' else truth[number % 4]}"
        for number in range(160)
        for name in ("ada", "bob", "cy", "eve")
        if name == "eve" or (number + len(name)) % 9
    ]
    (tmp_path / "labels.csv").write_text("url,rater,label\n" + "\n".join(answers))
    path = str(tmp_path / "store.db")
    for action in (
        ["add", str(tmp_path / "items.csv")],
        ["project", "mood", "--choice", "good", "--choice", "bad"],
        ["take", "mood", str(tmp_path / "labels.csv"), "--add-raters"],
        ["rater", "dan"],
        ["agree", "mood", "--soft", str(tmp_path / "soft.csv")],
    ):
        assert main([path, *action]) == 0
    shown = capsys.readouterr().out
    assert "160 new items" in shown and "160 new tasks" in shown and "http://127.0.0.1:8090/#" in shown
    assert "Krippendorff's alpha (nominal): 0." in shown and "eve, 160 labels, kappa with the others 0.000" in shown
    assert "disagrees with all others" in shown.splitlines()[-1] and shown.count("disagrees") == 1
    soft = list(csv.DictReader((tmp_path / "soft.csv").open(newline="")))
    assert [float(row["p(good)"]) > 0.5 for row in soft[:4]] == [True, False, True, False]
    assert main([path, "agree", "moos"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no project `moos`\nhint: did you mean `mood`?")


SIZES = [
    pytest.param((1280, 900, False), id="desktop"),
    pytest.param((390, 844, True), id="phone", marks=pytest.mark.slow),
]

# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(store):
    with LabelServer(store, store.project("mood")) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, token="", body=None, **headers):
    """The status, the headers and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, content, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_only_raters_with_a_token_see_tasks_and_label(served, store):
    token = store.add_rater("ada")
    status, headers, _ = ask(served, "/")
    assert status == 200 and headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "unsafe" not in str(headers)
    for wrong in ("", "x", token[:-1]):
        assert ask(served, "/next", wrong)[0] == 401
    assert ask(served, "/next", token, Host="evil.example")[0] == 403
    status, _, content = ask(served, "/next", token)
    task = json.loads(content)
    assert (status, task["rater"], task["text"], task["done"], task["all"]) == (200, "ada", TEXTS[0], 0, 4)
    for body, expected in (
        ({"task": task["task"], "choice": 3}, 400),
        ({"task": 99, "choice": 0}, 400),
        ({"task": "1", "choice": 0}, 400),
        ({"task": True, "choice": 0}, 400),
        ({"choice": 0}, 400),
        ([], 400),
        (b"{", 400),
        (b"[" * 4000, 400),
        (b" " * 5000, 400),
        ({"task": task["task"], "choice": 0, "seconds": 10**400}, 200),
        ({"task": task["task"], "choice": 1, "seconds": "x"}, 200),
    ):
        assert ask(served, "/label", token, body)[0] == expected, body
    assert ask(served, "/nothing", token)[0] == 404 and ask(served, "/next", token, {})[0] == 404
    assert [(row.name, row.choice) for row in store.labels(store.project("mood"))] == [("ada", 1)]
    with store.reading() as connection:
        assert token not in str(list(connection.execute(sql.text("select * from raters"))))


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_people_label_by_keyboard(served, store, size):
    with Browser(*size) as browser:
        browser.open(f"{served.address}#nonsense")
        browser.until("document.documentElement.dataset.ready")
        assert "this link is not valid" in browser.value("document.body.innerText")
        browser.problems.clear()
        browser.open("about:blank")
        browser.open(f"{served.address}#{store.add_rater('ada')}")
        browser.until("document.getElementById('text').textContent")
        assert "#" not in browser.value("location.href")
        for number, key in enumerate(("1", "3", "s", "2")):
            browser.until(f"document.getElementById('progress').textContent.includes('{number} of 4')")
            assert browser.value("document.getElementById('text').textContent") == TEXTS[number]
            assert browser.cut() == []
            browser.value(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")
        browser.until("document.body.innerText.includes('Nothing is left')")
        browser.click("#undo")
        browser.until("document.getElementById('progress').textContent.includes('3 of 4')")
        browser.click("#choices button")
        browser.until("document.body.innerText.includes('Nothing is left')")
        assert browser.problems == []
    assert [row.choice for row in store.labels(store.project("mood"))] == [0, 2, None, 0]
