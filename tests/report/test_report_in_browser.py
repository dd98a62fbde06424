"""The page in a real browser: the script runs, the curves are there, and nothing is asked of the network."""

import json
import math
import re
import shutil
import subprocess

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


def test_a_run_is_drawn_and_nothing_is_asked_whatever_came_in(whole, tmp_path):
    dom, asked = opened(injected(whole, tmp_path), tmp_path)
    assert 'data-ready="true"' in dom
    assert len(re.findall(r'role="slider"', dom)) == 6  # two large charts and four small ones
    for curve in ("t0 thin", "t1 dots"):
        assert re.search(rf'<path class="line {curve}" d="M[\d. ]+L', dom)
    assert re.search(r'aria-label="Bits per byte, by step: 44 points of training, held out', dom)
    assert asked == set() and 'data-pwned="yes"' not in dom


def test_without_the_policy_the_same_page_would_ask(whole, tmp_path):
    dom, asked = opened(injected(whole, tmp_path, policy=False), tmp_path)
    assert asked == {"http://tracker.example/x.png"} and 'data-pwned="yes"' in dom


def test_ugly_data_is_drawn_as_text(new, hostile, tmp_path):
    folder = new(name=hostile).metrics(
        loss=lambda step: math.nan if step > 20 else 1.0, tail=json.dumps({"step": 1, hostile: 1.0})
    )
    folder.summary(status="failed", samples=[{"prompt": hostile, "text": hostile}], baselines={hostile: 0.5})
    dom, asked = opened(report.write(folder.path), tmp_path)
    assert 'data-ready="true"' in dom and 'data-pwned="yes"' not in dom.split("<head>")[0]
    assert "× not a finite number, first NaN at step 21" in dom
    assert not re.search(r"<img", dom) and asked == set()


def test_two_runs_are_drawn_over_each_other(new, tmp_path):
    a, b = new("a").metrics(), new("b").metrics(loss=lambda step: 3.0 + 1 / step)
    _, path = report.compare(a.path, b.path, tmp_path / "compared.html")
    dom, asked = opened(path, tmp_path)
    assert 'data-ready="true"' in dom and asked == set()
    assert re.search(r'<path class="line t1 solid dashed" d="M', dom)
