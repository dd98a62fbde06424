"""The page: what it says, that nothing from outside becomes markup, and that it asks nobody for anything."""

import base64
import errno
import hashlib
import json
import os
import re
from html.parser import HTMLParser

import pytest

from shoestring import report
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.report import curves, page, sections
from shoestring.report.reading import read


class Outline(HTMLParser):
    """Tags with their attributes, and what each pre, style and script holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._inside = [], {"pre": [], "style": [], "script": []}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in self.text:
            self.text[tag].append("")
            self._inside = tag

    def handle_endtag(self, tag):
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.text[self._inside][-1] += data


def written(folder):
    return report.write(folder.path).read_text("utf-8")


def items_of_features(text):
    return [
        {
            "feature": "sparse.soft",
            "as": "table",
            "title": f"Layers {text}",
            "note": "Kept energy & flips",
            "head": ["Layer", f"Kept {text}"],
            "rows": [["mlp.up", 0.8194], [text, float("nan")]],
        },
        {
            "feature": "sparse.soft",
            "as": "curve",
            "title": f"Flip rate {text}",
            "unit": "share",
            "metrics": {"flips_up": f"up {text}", "flips_down": "down"},
        },
    ]


def test_what_features_show_is_there_and_escaped(new, hostile):
    folder = new()
    for step in range(1, 5):
        folder.rows.append({"step": step, "time": float(step), "loss": 2.0, "flips_up": 0.5, "flips_down": 0.25})
    folder.summary(report_items=items_of_features(hostile))
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in folder.rows))
    text = written(folder)
    assert hostile not in text and text.count("&lt;/script&gt;&lt;img src=x") >= 3
    assert "Kept energy &amp; flips" in text and "0.819" in text and "NaN" in text
    (chart,) = [chart for chart in curves.payload([read(folder.path)])["small"] if "flips" not in chart["key"]]
    assert (chart["title"], chart["unit"]) == (f"Flip rate {hostile}", "share")
    lines = [(line["label"], line["tone"], line["value"]) for line in chart["lines"]]
    assert lines == [(f"up {hostile}", 0, [0.5] * 4), ("down", 1, [0.25] * 4)]


@pytest.mark.parametrize(
    "report_items",
    [
        None, 5, [5], [{}], [{"as": "table"}], [{"as": "curve"}], [{"as": "table", "head": 3, "rows": [4, [5, None]]}],
        [{"as": "curve", "metrics": {"loss": 3}}], [{"as": "curve", "metrics": ["loss"], "title": {}}],
    ],
    ids=str,
)  # fmt: skip
def test_what_features_show_may_be_damaged(new, report_items):
    folder = new().metrics().summary(report_items=report_items)
    assert "<h1>quickstart</h1>" in written(folder)


def test_the_page_says_what_happened(whole):
    text = written(whole)
    for phrase in (
        "<h1>quickstart</h1>",
        "✓ finished",
        '<span class="number">1.91</span>',
        "Better than gzip -9 and 5-gram (Witten-Bell); not better than xz -9",
        "comm.bf16 cut bytes per step by 50%: 2.1 MB instead of 4.2 MB, measured; costs: rounding",
        "default with 2 ranks",
        "rank 1 on laptop",
        "run.steps",
        "versions.torch",
        "bf16 is slow here",
    ):
        assert phrase in text, phrase


def test_what_ran_where_gives_means_shares_and_each_rank(whole):
    row = re.search(r'<tr><th scope="row">backward</th>.*?</tr>', written(whole))[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells[0] == "compute" and cells[1].endswith("42%</div>")  # 8.5 of 20 seconds
    assert cells[2:] == ["40", "–", "8.5 s", "8 s", "9 s"]


def test_many_ranks_are_shown_as_the_least_and_the_most(new):
    text = written(new().metrics().summary().traces(ranks=9))
    assert "least" in text and "rank 8" not in text


def test_a_run_on_images_counts_samples(new):
    folder = new("images").settings().metrics().summary()
    lines = (folder.path / "metrics.jsonl").read_text().replace("tokens_per_second", "samples_per_second")
    (folder.path / "metrics.jsonl").write_text(
        lines.replace("held_out_bits_per_byte", "other").replace("bits_per_byte", "any")
    )
    text = written(folder)
    assert "Loss, nats per sample" in text and "Samples per second" in text
    assert "nats per token" not in text and "Tokens" not in text


def test_the_bars_are_sorted_and_mark_the_run(whole):
    bars = re.search(r'<table class="bars">.*?</table>', written(whole))[0]
    assert re.findall(r'<th scope="row">(.*?)</th>', bars) == [
        "xz -9",
        "this run, training",
        "this run, held out",
        "5-gram (Witten-Bell)",
        "gzip -9",
    ]
    assert '<tr class="ours"><th scope="row">this run, held out' in bars


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"used": 3, "without": 4, "measured": False}, "f cut GiB by 25%: 3 instead of 4, computed, not measured"),
        ({"used": 5, "without": 4, "measured": True}, "f raised GiB by 25%: 5 instead of 4, measured"),
        ({"used": 5, "without": 0, "measured": True}, "f: GiB 5 instead of 0, measured"),
        ({"used": "x", "cost": "time"}, "f: GiB unknown; costs: time"),
    ],
)
def test_a_saving_is_a_sentence(row, line):
    assert sections.reduction({"feature": "f", "unit": "GiB"} | row) == line


def test_text_from_outside_stays_text(new, hostile):
    folder = new(name=hostile)
    folder.settings(f"[x]\n{json.dumps(hostile)} = {json.dumps(hostile)}\n").metrics(
        tail=json.dumps({"step": 1, hostile: 1.0})
    )
    folder.traces(name=hostile).put("environment.json", {"host": hostile, "started": hostile, hostile: hostile})
    row = dict.fromkeys(("name", "prompt", "text", "host", "why", "device", hostile), hostile)
    said = {key: [row] for key in ("samples", "features", "ranks")}
    reductions = [{"feature": hostile, "unit": hostile, "used": 1, "without": 2, "cost": hostile}]
    folder.summary(
        **said, reductions=reductions, status=hostile, message=hostile, notes=[hostile], baselines={hostile: 2.0}
    )
    text = written(folder)
    outline = Outline(text)
    assert not [tag for tag, _ in outline.tags if tag == "img"]
    assert [tag for tag, _ in outline.tags].count("script") == 2
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith("on") or key == "style"]
    assert hostile in "".join(outline.text["pre"]) and json.loads(outline.text["script"][0])["small"]
    assert text.count("<!--") == 0


def test_the_page_asks_nobody_for_anything(whole):
    text = written(whole)
    outline = Outline(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "a", "video", "audio"} & {
        tag for tag, _ in outline.tags
    }
    loading = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "ping"}
    assert not loading & {key for _, attributes in outline.tags for key in attributes}
    style, script = "".join(outline.text["style"]), outline.text["script"][1]
    assert not re.search(r"url\(|@import|https?:", style)
    assert not re.search(r"fetch\(|XMLHttp|import\(|WebSocket|sendBeacon|new Image|innerHTML|eval\(", script)
    assert re.findall(r"https?:[^ ]*", script) == ["https://github.com/leeoniya/uPlot"]  # named in its own comment


def test_the_policy_lets_only_this_style_and_this_script_in(whole):
    outline = Outline(written(whole))
    policy = next(attributes["content"] for _, attributes in outline.tags if "http-equiv" in attributes)
    for directive, body in (("style-src", outline.text["style"][0]), ("script-src", outline.text["script"][1])):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_every_chart_has_a_table_of_values_at_steps_that_were_evaluated(whole):
    text = written(whole)
    assert len(re.findall("<summary>Values</summary>", text)) == text.count('class="chart"') == 6
    values = re.search(r"<caption><span>Bits per byte at some.*?</table>", text, re.DOTALL)[0]
    assert re.findall(r'<th scope="row">(.*?)</th>', values) == ["1", "10", "20", "30", "40"]
    assert values.count("–") == 1  # only the first step has no held-out value


def test_the_parts_of_the_page_stay_small(whole):
    script = "".join(map(page._part, page.SCRIPT))
    assert "</script" not in script and "\r" not in script
    assert len(written(whole)) < 110_000  # of which the chart library has 53,000


def test_the_chart_library_keeps_its_licence(whole):
    assert "Copyright (c) 2022 Leon Sorokin" in written(whole) and "Permission is hereby granted" in written(whole)
    assert "uPlot" in page._part("uplot/uPlot.iife.min.js")[:80] and "MIT" in page._part("uplot/LICENSE")


def test_settings_are_folded(whole):
    opened = [
        attributes for tag, attributes in Outline(written(whole)).tags if tag == "details" and "open" in attributes
    ]
    assert not opened


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(new, steps):
    text = written(new(steps=steps).metrics(tail='{"step": 2, "lo'))
    assert "unfinished" in text and "1 unreadable line left out" in text
    assert ("No loss has been logged yet." in text) == (steps == 0)


def test_wrong_types_in_the_summary_are_no_error(new):
    odd = [None, 1, "x", [], {}, [1, None, {}], {"a": None}, True, 1e999]
    keys = json.loads((new().summary().path / "summary.json").read_text())
    for value in odd:
        assert "</html>" in written(new().metrics().summary(**dict.fromkeys(keys, value)))


def test_the_page_is_replaced_whole_or_not_at_all(whole, monkeypatch):
    before = written(whole)
    files = set(whole.path.iterdir())

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    whole.summary(message="another")
    with pytest.raises(ShoestringError, match=r"cannot write .*report\.html: No space left"):
        report.write(whole.path)
    assert (whole.path / "report.html").read_text("utf-8") == before
    assert set(whole.path.iterdir()) == files


def test_the_change_of_a_share_is_in_points(new):
    a, b = new("a").metrics(), new("b")
    b.metrics()
    rows = [json.loads(line) | {"data_wait": 0.253} for line in (b.path / "metrics.jsonl").read_text().splitlines()]
    (b.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, _ = report.compare([a.path, b.path], a.path.parent / "compared.html")
    assert "25% (+25 points)" in text


def test_comparing_says_what_differs(new):
    a = new("a").metrics().summary()
    b = new("b", steps=80).metrics().summary(bits_per_byte={"training": 1.8, "held out": 1.719})
    a.put("environment.json", {"versions": {"torch": "2.13.0", "numpy": "2"}, "host": "one"})
    b.put("environment.json", {"versions": {"torch": "2.11.0", "numpy": "2"}, "host": "two"})
    text, path = report.compare([a.path, b.path], a.path.parent / "compared.html")
    lines = {tuple(line.split()) for line in text.splitlines()}
    assert ("run.steps", "40", "80") in lines and ("versions.torch", "2.13.0", "2.11.0") in lines
    assert ("held-out", "bits", "per", "byte", "1.91", "1.719", "(-10%)") in lines
    assert "share of time waiting for data (median)  0.3%" in text and "0.3% (equal)" in text
    assert "numpy" not in text and "optim.adamw.lr" not in text
    assert text.startswith("a: finished, 40 steps\nb: finished, 80 steps\n")
    drawn = json.loads(Outline(path.read_text("utf-8")).text["script"][0])
    assert [run["name"] for run in drawn["runs"]] == ["a", "b"]
    assert [(line["run"], line["kind"]) for line in drawn["large"][0]["lines"]] == [
        (0, "training"), (0, "held out"), (1, "training"), (1, "held out"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("folders", "names", "labels"),
    [
        (["a", "b", "c"], ["fast", "slow", "best"], ["fast", "slow", "best"]),
        (["runs/q", "runs/q-2", "runs/q-3"], ["q", "q", "q"], ["q", "q-2", "q-3"]),
        (["lr1/run", "lr2/run"], ["q", "q"], ["lr1", "lr2"]),
        (["lr1/s1/run", "lr1/s2/run", "lr2/s1/run"], ["q", "q", "q"], ["lr1/s1", "lr1/s2", "lr2/s1"]),
        (["x/one", "y/one", "y/two"], ["q", "q", "p"], ["x/one", "y/one", "y/two"]),
    ],
)
def test_runs_are_told_apart_by_what_differs_and_no_more(new, folders, names, labels):
    paths = [new(folder, name=name).metrics().path for folder, name in zip(folders, names, strict=True)]
    text, _ = report.compare(paths, paths[0].parent / "compared.html")
    assert [line.partition(": ")[0] for line in text.splitlines()[: len(paths)]] == labels


def test_comparing_takes_at_least_two_different_runs(new):
    one = new("a").metrics().path
    with pytest.raises(ConfigError, match="at least two run folders"):
        report.compare([one], one / "compared.html")
    with pytest.raises(ConfigError, match="is given twice"):
        report.compare([one, one / "../a"], one / "compared.html")


def test_a_comparison_cannot_steer_the_terminal(new):
    a, b = new("a", name="x\x1b[31m").metrics(), new("b").metrics()
    text, _ = report.compare([a.path, b.path], a.path.parent / "compared.html")
    assert "\x1b" not in text


def test_runs_of_equal_settings_differ_in_nothing(new):
    a, b = new("a").metrics(), new("b").metrics()
    text, _ = report.compare([a.path, b.path], a.path.parent / "compared.html")
    assert "Settings that differ\n  none" in text and "Versions that differ\n  none" in text
    assert re.search(r"training loss .* \(equal\)", text)


def test_the_page_opens_with_the_chart_that_has_most(tmp_path):
    """The loss of a feature at LOSS is not in bits: there are those of the evaluations only."""
    (tmp_path / "run.toml").write_text("[run]\nsteps = 9\n")
    rows = [{"step": step, "time": step, "loss": 9.0 / step} for step in range(1, 10)]
    rows.append({"step": 9, "time": 10, "held_out_loss": 1.5, "held_out_bits_per_byte": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [chart["key"] for chart in curves.payload([read(tmp_path)])["large"]] == ["nats", "bits"]
    rows = [row | {"bits_per_byte": row.get("loss", 0) / 2} for row in rows[:-1]] + rows[-1:]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [chart["key"] for chart in curves.payload([read(tmp_path)])["large"]] == ["bits", "nats"]
