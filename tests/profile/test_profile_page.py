"""The page of a profile in a real browser: what it draws, how keys and tables show the same, and what it never runs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from shoestring.profile import analyses
from shoestring.profile.comparison import compare, merged
from shoestring.profile.findings import Finding
from shoestring.profile.recording import Facts, Profile, StepTimes
from shoestring.profile.tree import CallTree, NodeKind
from shoestring.profile.view import page
from tests.browser import Browser, needs_chromium
from tests.profile.small_profiles import HOSTILE, hostile, small

pytestmark = needs_chromium
LIMIT = 1_000_000  # bytes of a page without its data
DEPTH = 60
TIMED = "(() => { const began = performance.now(); %s; return performance.now() - began; })()"
ROWS = "flame.rows.map((row) => row.map((one) => [one.box.label, Math.round(one.width)]))"


@pytest.fixture(scope="module")
def browser():
    with Browser(width=1000, height=1000) as browser:
        yield browser


def opened(browser, path):
    browser.problems.clear()
    browser.open(path.as_uri())
    browser.until("document.documentElement.dataset.ready", 60)
    return browser


def press(browser, *keys):
    for key in keys:
        event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
        browser.value(f"void document.activeElement.dispatchEvent({event})")


def pick(browser, value):
    browser.value(f"void document.querySelector('input[value={value}]').click()")


@pytest.mark.slow
def test_boxes_are_as_wide_as_the_time_they_took_in_every_shape(tmp_path, browser):
    opened(browser, page.write(small(), tmp_path / "p.html"))
    width = browser.value("flame.figure.clientWidth")
    rows = browser.value(ROWS)
    assert rows[:2] == [[["all", width]], [["<module> train.py:10", width]]]
    shares = {label: round(wide / width, 2) for label, wide in rows[2]}
    assert shares == {"main train.py:5": 0.42, "main train.py:7": 0.32, "main train.py:6": 0.26}
    assert rows[3][0][0] == "aten::linear"  # functions of packages are not shown
    pick(browser, "joined")
    rows = browser.value(ROWS)
    shares = {label: round(wide / width, 2) for label, wide in rows[2]}
    assert shares == {"main train.py:5": 0.68, "main train.py:7": 0.32}
    assert {label for label, _ in rows[3]} == {"aten::linear", "backward of aten::linear"}
    pick(browser, "bottom-up")
    rows = browser.value(ROWS)
    assert sorted(label for label, _ in rows[1]) == ["AddmmBackward0", "aten::linear", "aten::mm", "main train.py:7"]
    assert sum(wide for _, wide in rows[1]) == pytest.approx(width, abs=4)
    browser.value("void document.getElementById('packages').click()")
    pick(browser, "top-down")
    assert browser.value(ROWS)[3][0][0] == "Module._call_impl module.py:1700"
    assert browser.problems == []


@pytest.mark.slow
def test_keys_move_through_the_graph_and_are_told(tmp_path, browser):
    opened(browser, page.write(small(), tmp_path / "p.html"))
    browser.value("void document.querySelector('canvas').focus()")
    press(browser, "ArrowDown", "ArrowDown", "ArrowDown")
    said = browser.value("document.getElementById('said').textContent")
    assert said == "aten::linear: 40 ms, 42% of all; 4 calls; level 3, 1 within"
    press(browser, "Enter")
    assert browser.value("flame.rows[3][0].width") == browser.value("flame.figure.clientWidth")
    press(browser, "ArrowUp", "ArrowRight")
    assert browser.value("flame.chosen.label") == "main train.py:7"
    assert "item()" in browser.value("document.getElementById('call').innerText")
    press(browser, "Escape")
    assert browser.value("flame.focus === shown.root")


@pytest.mark.slow
def test_the_table_shows_the_same_and_opens_by_keys(tmp_path, browser):
    opened(browser, page.write(small(), tmp_path / "p.html"))
    pick(browser, "table")
    rows = (
        "[...document.querySelectorAll('#rows tbody tr')].map((row) => row.innerText.split('\\t').map((c) => c.trim()))"
    )
    labels = [row[0].split("\n")[-1] for row in browser.value(rows)]
    assert labels[:3] == ["▾all", "▾<module> train.py:10", "▸main train.py:5"]
    assert browser.value(rows)[2][1:3] == ["42%", "40 ms"]
    browser.value("void document.querySelectorAll('#rows tbody tr')[2].focus()")
    press(browser, "ArrowRight")
    assert "aten::linear" in browser.value(rows)[3][0]
    press(browser, "ArrowLeft")
    assert "main train.py:7" in browser.value(rows)[3][0]
    expanded = browser.value("document.querySelectorAll('#rows tbody tr')[2].getAttribute('aria-expanded')")
    assert expanded == "false"


def test_search_marks_what_matches_and_says_how_much_time_it_is(tmp_path, browser):
    opened(browser, page.write(small(), tmp_path / "p.html"))
    for text, said in (
        ("aten::", "68% of the time is within the 3 names that match"),  # with the backward pass of one
        ("/^aten::mm/", "32% of the time is within the name that matches"),
        ("torch/nn/modules", "42% of the time is within the name that matches"),
        ("nowhere", "nothing matches"),
        ("/(/", "nothing matches"),
        ("", ""),
    ):
        browser.value(f"void (document.getElementById('search').value = {json.dumps(text)})")
        browser.value("void document.getElementById('search').dispatchEvent(new Event('input'))")
        assert browser.value("document.getElementById('found').textContent") == said


def test_ranks_findings_and_the_source_of_lines(tmp_path, browser, monkeypatch):
    finding = Finding(
        title="waits", file="/a/train.py", line=7, evidence="Evidence.", advice="Advice.", gain=(0.1, 0.2), nodes=(5,)
    )
    monkeypatch.setattr(analyses, "ANALYSES", {"planted": lambda _: [finding]})
    opened(browser, page.write(merged([small(), small(scale=3)]), tmp_path / "p.html"))
    text = browser.value("document.querySelector('main').innerText")
    assert text.index("Findings") < text.index("waits") < text.index("Lines of the program")
    assert "saves 10% to 20% of the time" in text
    times = []
    for rank in ("all", "0", "1"):
        browser.value(f"void (document.getElementById('rank').value = '{rank}')")
        browser.value("void document.getElementById('rank').dispatchEvent(new Event('change'))")
        times.append(browser.value("shown.root.time") / 1e6)
    assert times == [380, 95, 285]
    browser.value("void document.querySelector('.lines button, button[data-line=\"7\"]').click()")
    at = browser.value("document.querySelector('#source tr.at').innerText")
    assert at.split() == ["120", "ms", "7", "item()"]


def test_steps_are_drawn_and_said(tmp_path):
    profile = small()
    clock = [StepTimes(0, 1, 0.5, 0.5, 1 << 20), StepTimes(1, 1, 0.1, 0.1, 0), StepTimes(2, 8, 0.8, 0.2, 3 << 20)]
    text = page.write(replace(profile, facts=replace(profile.facts, clock=clock)), tmp_path / "p.html").read_text()
    assert "10 steps of 100 ms (median); the longest, step 1, took 500 ms." in text
    assert "The process held 1 MiB at first and 3 MiB at last." in text
    mean = re.search(r'points="([^"]*)" class="mean"', text)[1].split()
    assert mean == ["0.0,6.0", "100.0,6.0", "100.0,97.2", "200.0,97.2", "200.0,97.2", "1000.0,97.2"]
    assert "Optimizer steps</h2>" not in page.write(profile, tmp_path / "p.html").read_text()


def test_what_changed_between_two_profiles_is_red_or_blue(tmp_path, browser):
    slower = small(operator="aten::mm", scale=2)
    path = page.write_comparison(compare(small(), slower), ("a", "b"), tmp_path / "d.html")
    opened(browser, path)
    tones = browser.value("[flame.palette['box-more'], flame.changed(shown.root.boxes[0])]")
    assert re.findall(r"\d+", tones[0]) == re.findall(r"\d+", tones[1])
    assert "+65 ms" in browser.value("document.querySelector('main').innerText")
    opened(browser, page.write_comparison(compare(slower, small()), ("b", "a"), tmp_path / "d.html"))
    tones = browser.value("[flame.palette['box-less'], flame.changed(shown.root.boxes[0])]")
    assert re.findall(r"\d+", tones[0]) == re.findall(r"\d+", tones[1])
    browser.value("void document.querySelector('input[value=before]').click()")
    assert browser.value("flame.byOther") is True
    assert browser.problems == []


@pytest.mark.parametrize("compared", [False, True])
def test_names_and_sources_of_an_attacker_are_only_text(tmp_path, browser, monkeypatch, compared):
    finding = Finding(title=HOSTILE, file=HOSTILE, line=1, evidence=HOSTILE, advice=HOSTILE)
    monkeypatch.setattr(analyses, "ANALYSES", {"planted": lambda _: [finding]})
    bad, path = hostile(), tmp_path / "p.html"
    if compared:
        page.write_comparison(compare(bad, small()), (HOSTILE, HOSTILE), path)
    else:
        page.write(merged([bad, bad], [HOSTILE, HOSTILE]), path)
    opened(browser, path)
    for shape in ("bottom-up", "joined", "table", "top-down"):
        pick(browser, shape)
    browser.value("for (const box of shown.root.boxes[0].boxes) choose(box)")
    pick(browser, "graph")
    browser.value("flame.canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: 300, clientY: 450}))")
    assert browser.value("document.documentElement.dataset.pwned ?? ''") == ""
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.value("document.body.innerText")
    assert path.read_text().count("<script") == 2
    assert browser.problems == []


def large(nodes, seed=0):
    """A tree with so many nodes, as deep and as wide as those of real programs."""
    draw = np.random.default_rng(seed)
    parent, path = np.full(nodes, -1), [0]
    for node, returns in enumerate(draw.geometric(0.5, nodes)[1:], 1):  # on average as many calls end as begin
        path = path[: max(len(path) - returns + 1, 1)][:DEPTH]
        parent[node] = path[-1]
        path.append(node)
    own = draw.lognormal(10, 2, nodes).astype(np.int64)
    names = ["", *(f"/a/module{k % 40}.py\tfunction{k}" for k in range(3000)), *(f"aten::op{k}" for k in range(300))]
    kind = np.where(draw.random(nodes) < 0.6, NodeKind.PYTHON, NodeKind.OPERATOR)
    name = np.where(kind == NodeKind.PYTHON, draw.integers(1, 3001, nodes), draw.integers(3001, 3301, nodes))
    kind[0], name[0] = NodeKind.ROOT, 0
    zeros = np.zeros(nodes, np.int64)
    line = np.where(kind == NodeKind.PYTHON, draw.integers(1, 400, nodes), 0)
    known = {"parent": parent, "kind": kind, "name": name, "line": line, "link": zeros - 1, "own": own}
    known |= {"count": zeros + 3, "least": own // 9, "most": own // 2}
    columns = {field: zeros for field in CallTree.__dataclass_fields__ if field not in ("names", *known)}
    fractions = {field: column.astype(float) for field, column in columns.items() if field in ("squares", "errors")}
    return Profile(CallTree(names=names, **known, **(columns | fractions)), Facts(["large.py"], own.sum() / 1e9))


@pytest.mark.slow
def test_a_hundred_thousand_nodes_answer_within_a_second(tmp_path, browser):
    path = page.write(large(100_000), tmp_path / "p.html")
    packed = len(re.search(r'"packed":"([^"]*)"', path.read_text())[1])
    assert path.stat().st_size - packed < LIMIT
    ready = min(int(opened(browser, path).value("document.documentElement.dataset.ready")) for _ in range(3))
    took = {
        shape: browser.value(TIMED % act)
        for shape, act in {
            "joined": "document.querySelector('input[value=joined]').click()",
            "bottom-up": "document.querySelector('input[value=bottom-up]').click()",
            "search": "view.text = 'op7'; seek()",
            "zoom": "flame.zoom(shown.root.boxes[0])",
            "table": "document.querySelector('input[value=table]').click()",
        }.items()
    }
    print(f"ready after {ready} ms, {took}")
    assert ready < 1000
    assert max(took.values()) < 1000


def test_the_page_without_its_data_is_small(tmp_path):
    text = page.write(replace(small(), sources={}), tmp_path / "p.html").read_text()
    assert len(text) < 120_000
