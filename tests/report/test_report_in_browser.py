"""The page in a real browser: the script runs, the curves are there, and nothing is asked of the network."""

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from shoestring import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--dump-dom",
)
INJECTED = "<img src='http://tracker.example/x.png'><script>document.documentElement.dataset.pwned = 'yes'</script>"


def opened(path, scratch):
    """The document after its script ran, and every address that the page made the browser ask for."""
    log = scratch / "net.json"
    command = [BROWSER, *FLAGS, f"--user-data-dir={scratch / 'profile'}", f"--log-net-log={log}", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()
    asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # what the browser asks on its own account has no page as its origin
    by_page = [each for each in asked if each.get("initiator", "not an origin") != "not an origin"]
    return dom, {each["url"] for each in by_page if "url" in each}


def injected(folder, scratch, policy=True):
    """The folder's page with foreign markup in it, with or without the page's policy."""
    text = report.write(folder.path).read_text("utf-8").replace("<main>", f"<main>{INJECTED}")
    if not policy:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    path = scratch / "injected.html"
    path.write_text(text, "utf-8")
    return path


def driven(path, scratch, script):
    """What `script` (the body of a function) returns in the page at `path`, under the page's own policy."""
    code = (
        f"(async () => {{ {HELPERS} {script} }})().then((said) => {{ {ROOT}.dataset.said = JSON.stringify(said); }});"
    )
    known = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    text = path.read_text("utf-8").replace("script-src '", f"script-src 'sha256-{known}' '", 1)
    page = scratch / "driven.html"
    page.write_text(text.replace("</body>", f"<script>{code}</script></body>"), "utf-8")
    dom, asked = opened(page, scratch)
    assert asked == set()
    return json.loads(html.unescape(re.search(r'data-said="([^"]*)"', dom)[1]))


ROOT = "document.documentElement"
HELPERS = """
const chart = (title) => charts.find((one) => one.spec.title === title);
const rgb = (name) => colour(name).match(/[0-9]+/g).map(Number);
const pixels = (one, name) => {
  const canvas = one.plot.ctx.canvas, wanted = rgb(name);
  const all = one.plot.ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let k = 0; k < all.length; k += 4) found +=
    all[k + 3] > 200 && wanted.every((part, j) => Math.abs(all[k + j] - part) < 12);
  return found;
};
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const button = (text) => [...document.querySelectorAll("button")].find((one) => one.textContent === text);
const drawn = async () => { drawAll(); await null; }; // uPlot draws in a microtask
const click = (text) => { button(text).click(); return drawn(); };
const set = (id, value) => {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event("input"));
  return drawn();
};
const drag = (one, from, to) => {
  const over = one.plot.over, box = over.getBoundingClientRect();
  const at = (x) => ({ clientX: box.left + x * box.width, clientY: box.top + 20, movementX: 5, bubbles: true });
  over.dispatchEvent(new MouseEvent("mouseenter", at(from)));
  over.dispatchEvent(new MouseEvent("mousemove", at(from)));
  over.dispatchEvent(new MouseEvent("mousedown", at(from)));
  over.dispatchEvent(new MouseEvent("mousemove", at((from + to) / 2)));
  over.dispatchEvent(new MouseEvent("mousemove", at(to)));
  document.dispatchEvent(new MouseEvent("mouseup", at(to)));
  return drawn();
};
"""


@pytest.mark.slow
def test_a_run_is_drawn_and_nothing_is_asked_whatever_came_in(whole, tmp_path):
    dom, asked = opened(injected(whole, tmp_path), tmp_path)
    assert 'data-ready="true"' in dom
    assert len(re.findall(r'role="slider"', dom)) == 6  # two large charts and four small ones
    assert dom.count("<canvas") == 5  # one of the large charts waits to be chosen
    assert re.search(r'aria-label="Bits per byte, by step: 44 points of training; held out', dom)
    assert asked == set() and 'data-pwned="yes"' not in dom


@pytest.mark.slow
def test_without_the_policy_the_same_page_would_ask(whole, tmp_path):
    dom, asked = opened(injected(whole, tmp_path, policy=False), tmp_path)
    assert asked == {"http://tracker.example/x.png"} and 'data-pwned="yes"' in dom


@pytest.mark.slow
def test_each_curve_has_its_colour_and_can_be_hidden(whole, tmp_path):
    said = driven(
        report.write(whole.path),
        tmp_path,
        """const bits = chart("Bits per byte"), seen = () => [pixels(bits, "tone0") > 50, pixels(bits, "tone1") > 50];
        const before = seen();
        await click("held out");
        const without = [...seen(), button("held out").getAttribute("aria-pressed")];
        await click("held out");
        return [before, without, seen()];""",
    )
    assert said == [[True, True], [True, False, "false"], [True, True]]


@pytest.mark.slow
def test_dragging_zooms_every_chart_and_the_button_shows_the_whole_run(whole, tmp_path):
    said = driven(
        report.write(whole.path),
        tmp_path,
        """const ranges = () => ["Bits per byte", "Speed"].map((title) => {
          const { min, max } = chart(title).plot.scales.x;
          return [min, max];
        });
        const before = ranges();
        await drag(chart("Bits per byte"), 0.25, 0.5);
        const zoomed = ranges(), usable = !document.getElementById("whole").disabled;
        await click("Whole run");
        return [before, zoomed, usable, ranges()];""",
    )
    before, zoomed, usable, after = said
    assert before == after == [[1, 40], [1, 40]] and usable
    assert zoomed[0] == zoomed[1] == pytest.approx([1 + 39 / 4, 1 + 39 / 2], abs=0.3)


@pytest.mark.slow
def test_keys_move_along_the_curve_and_zoom_for_who_has_no_pointer(whole, tmp_path):
    said = driven(
        report.write(whole.path),
        tmp_path,
        """const bits = chart("Bits per byte");
        bits.box.focus();
        await press(bits.box, "End");
        await press(bits.box, "ArrowLeft");
        const told = bits.box.getAttribute("aria-valuetext");
        await press(bits.box, "+");
        const { min, max } = bits.plot.scales.x;
        return [told, max - min];""",
    )
    assert said[0].startswith("step 39; training ") and "; held out " in said[0] and said[0].endswith("(step 40)")
    assert said[1] == pytest.approx(39 / 2, abs=1)


@pytest.mark.slow
def test_smoothing_smooths_and_keeps_the_logged_values_beneath(new, tmp_path):
    folder = new(steps=400).metrics(loss=lambda step: 2.0 + (-1) ** step)
    said = driven(
        report.write(folder.path),
        tmp_path,
        """const bits = chart("Bits per byte"), spread = (one) => {
          const values = one.points.map((point) => point[1]).slice(5, -5);
          return Math.max(...values) - Math.min(...values);
        };
        await set("smooth", 0);
        const raw = bits.drawn.map(spread);
        await set("smooth", 60);
        return [raw, bits.drawn.map(spread), document.querySelector("output").textContent];""",
    )
    raw, smooth, told = said
    assert raw[0] == pytest.approx(1.0) and told == "over 43 steps"
    assert smooth[0] == pytest.approx(1.0) and smooth[1] < 0.05


@pytest.mark.slow
def test_labels_of_baselines_that_lie_together_keep_apart(whole, tmp_path):
    whole.summary(baselines={"a": 1.500, "b": 1.501, "c": 1.502, "d": 1.503})
    labels, beside = driven(
        report.write(whole.path),
        tmp_path,
        """const one = chart("Bits per byte"), { left, width } = one.plot.bbox, canvas = one.plot.ctx.canvas;
        const from = left + width + 12, inside = [from, 0, canvas.width - from, canvas.height];
        const gutter = one.plot.ctx.getImageData(...inside).data;
        return [JSON.parse(one.box.dataset.labels), gutter.filter((part, k) => k % 4 === 3 && part > 100).length];""",
    )
    assert len(labels) == 4 and beside > 200  # what is written right of the curves
    assert all(lower - upper >= 14 for upper, lower in pairwise(labels))


@pytest.mark.slow
def test_a_small_chart_has_several_ticks_on_its_y_axis(whole, tmp_path):
    said = driven(
        report.write(whole.path),
        tmp_path,
        """return charts.filter((one) => one.plot).map((one) => one.plot.axes[1]._splits.filter((tick) => {
          const { min, max } = one.plot.scales.y;
          return tick >= min && tick <= max;
        }).length);""",
    )
    assert len(said) == 5 and min(said) >= 2


def test_nothing_is_wider_than_a_phone(whole, tmp_path):
    whole.summary(features=[{"name": "a.b", "seams": ["STEP"], "settings": {"long": "x" * 90}, "why": "because " * 20}])
    report.write(whole.path)
    frame = tmp_path / "phone.html"
    path = whole.path / "report.html"
    text = path.read_text("utf-8").replace("</body>", f"<script>{WIDTHS}</script></body>")
    known = base64.b64encode(hashlib.sha256(WIDTHS.encode()).digest()).decode()
    (tmp_path / "inner.html").write_text(text.replace("script-src '", f"script-src 'sha256-{known}' '", 1), "utf-8")
    frame.write_text(
        '<iframe src="inner.html" style="width:375px;height:900px;border:0"></iframe><script>'
        'addEventListener("message", (event) => { document.documentElement.dataset.said = event.data; });</script>'
    )
    dom, _ = opened(frame, tmp_path)
    page, why, caption = json.loads(html.unescape(re.search(r'data-said="([^"]*)"', dom)[1]))
    assert page <= 375 and min(why, caption) >= 250  # the reason and the caption are as wide as the screen


WIDTHS = """
const why = [...document.querySelectorAll("td")].find((one) => one.textContent.startsWith("because"));
const widths = [why, why.closest("table").caption].map((one) => one.getBoundingClientRect().width);
parent.postMessage(JSON.stringify([document.documentElement.scrollWidth, ...widths]), "*");
"""


def test_ugly_data_is_drawn_as_text(new, hostile, tmp_path):
    folder = new(name=hostile).metrics(
        loss=lambda step: math.nan if step > 20 else 1.0, tail=json.dumps({"step": 1, hostile: 1.0})
    )
    folder.summary(status="failed", samples=[{"prompt": hostile, "text": hostile}], baselines={hostile: 0.5})
    dom, asked = opened(report.write(folder.path), tmp_path)
    assert 'data-ready="true"' in dom and 'data-pwned="yes"' not in dom.split("<head>")[0]
    assert "× not a finite number, first NaN at step 21" in dom
    assert not re.search(r"<img", dom) and asked == set()


@pytest.mark.slow
def test_each_of_several_runs_has_its_colour_in_every_chart_and_can_be_hidden(new, tmp_path):
    folders = [new(name, name=name).metrics(loss=lambda step, k=k: k + 1 / step).path for k, name in enumerate("abc")]
    _, path = report.compare(folders, tmp_path / "compared.html")
    said = driven(
        path,
        tmp_path,
        """const tones = ["tone0", "tone1", "tone2"], titles = ["Bits per byte", "Learning rate"];
        const seen = () => titles.map((title) => tones.map((tone) => pixels(chart(title), tone) > 20));
        const before = seen();
        await click("c");
        return [before[0], seen()];""",
    )
    assert said == [[True, True, True], [[True, True, False], [False, True, False]]]
