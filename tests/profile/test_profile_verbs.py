"""`shoestring profile`: what belongs to it and what to the program, and what it says of one profile or two."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoestring.cli import find_verb, main
from shoestring.commands.recordings import split_program
from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring.core.trace import Trace
from shoestring.profile import analyses, load
from shoestring.profile.comparison import compare, merged
from shoestring.profile.findings import Finding, by_gain
from shoestring.profile.lines import by_line, package_of, short, sources_of
from shoestring.profile.recording import RankTimes
from shoestring.profile.summary import summary
from shoestring.profile.view import page
from tests.profile.small_profiles import MILLION, SOURCE, small

FINDING = Finding(
    title="waits for the device", file="/a/train.py", line=7, evidence="It took 30 ms.", advice="Read it less often.",
    gain=(0.2, 0.25),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "verb", "own", "programs"),
    [
        (["a.py", "--lines", "3"], "run", ["a.py"], ["--lines", "3"]),
        (["--lines", "3", "a.py", "--", "x", "--help"], "run", ["--lines", "3", "a.py"], ["--", "x", "--help"]),
        (["--lines=3", "--", "view"], "run", ["--lines=3", "view"], []),
        (["run", "view", "-h"], "run", ["view"], ["-h"]),
        (["-m", "json.tool", "--help"], "run", ["-m", "json.tool"], ["--help"]),
        (["--out", "x", "--module=a.b", "view"], "run", ["--out", "x", "--module=a.b"], ["view"]),
        (["view", "a.npz", "--out", "x"], "view", ["a.npz", "--out", "x"], []),
        (["--help"], "", ["--help"], []),
        ([], "", [], []),
    ],
)
def test_what_follows_the_program_is_its_own(given, verb, own, programs):
    name, rest = find_verb(["profile", *given])
    assert name == f"profile {verb}".strip()
    assert (split_program(rest) if verb == "run" else (rest, [])) == (own, programs)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small().save(tmp_path / "a.npz")
    small(scale=2).save(tmp_path / "b.npz")
    return tmp_path


def test_a_profile_is_shown_by_its_lines_and_operators_with_findings_first(saved, capsys, monkeypatch):
    monkeypatch.setattr(analyses, "ANALYSES", {"planted": lambda _: [FINDING]})
    assert main(["profile", "view", "a.npz", "--lines", "2"]) == 0
    said = capsys.readouterr().out
    rows = said.splitlines()
    assert rows[0] == "train.py --fast: 95 ms"
    assert "1. /a/train.py:7: waits for the device; saves 20% to 25% of the time (1.25x to 1.33x as fast)" in rows
    forward = next(row for row in rows if "train.py:5" in row)
    assert forward.split() == ["68%", "40", "ms", "25", "ms", "/a/train.py:5", "loss", "=", "model(x)", "aten::mm"]
    assert "32%" in said and "aten::mm" in said and "page: a.html" in said
    assert (saved / "a.html").stat().st_size > 10_000
    assert said.index("waits for the device") < said.index("share")


def test_what_a_profile_does_not_show_is_said_in_the_text_and_on_the_page(tmp_path):
    said = "What torch.compile has fused is own time of its region."
    profile = small()
    profile = replace(profile, facts=replace(profile.facts, unseen=[said], lost=3, processor=0.25, threads=2, cores=4))
    assert {said, "3 calls found no room in the tree; they are in no line."} <= set(summary(profile))
    text = page.write(profile, tmp_path / "p.html").read_text()
    assert f"<li>{said}</li>" in text
    assert "<dd>250 ms</dd>" in text and "<dd>2 on 4 cores</dd>" in text


def test_two_profiles_are_compared_and_merged(saved, capsys):
    assert main(["profile", "diff", "a.npz", "b.npz"]) == 0
    said = capsys.readouterr().out
    assert "95 ms in all before, 190 ms after: 0.50x as fast" in said
    assert "65 ms  130 ms  +65 ms  /a/train.py:5  loss = model(x)" in said
    assert (saved / "profile-diff.html").stat().st_size > 10_000
    assert main(["profile", "merge", "a.npz", "b.npz", "--out", "both.npz"]) == 0
    capsys.readouterr()
    assert main(["profile", "view", "both.npz"]) == 0
    assert "\na took least, 95 ms, and b longest, 190 ms\n" in capsys.readouterr().out
    both = load("both.npz")
    assert both.ranks.labels == ["a", "b"]
    assert both.ranks.own.sum(1).tolist() == [95 * MILLION, 190 * MILLION]
    assert both.tree.inclusive[0] == 285 * MILLION


def test_mistakes_are_named_with_what_to_do(saved, capsys):
    for arguments, said in (
        (["a.npz", "b.npz"], "shoestring profile view a.npz"),
        (["view", "c.npz"], "there is no profile c.npz"),
        (["view", "a.npz", "--lines", "0"], "--lines must be positive"),
        (["export", "a.npz", "--format", "chrome"], "formats: speedscope, pprof, collapsed, hatchet, perfetto"),
    ):
        assert main(["profile", *arguments]) == 2
        assert said in capsys.readouterr().err


# -- merging and comparing ---------------------------------------------------------------------------------------------


def test_merged_profiles_keep_the_times_of_each_in_files_too(tmp_path):
    one, other = small(), small(scale=3, extra="only here")
    both = merged([one, merged([other, one], ["x", "y"])], ["first", "never used"])
    assert both.ranks.labels == ["first", "x", "y"]
    np.testing.assert_array_equal(both.ranks.own.sum(0), both.tree.own)
    only = [node for node in range(len(both.tree)) if both.tree.label(node) == "only here"]
    assert both.ranks.own[:, only].tolist() == [[0], [15 * MILLION], [0]]
    both.save(tmp_path / "p.npz")
    back = load(tmp_path / "p.npz")
    np.testing.assert_array_equal(back.ranks.own, both.ranks.own)
    assert back.sources == {"/a/train.py": SOURCE}
    with pytest.raises(ConfigError, match="no profiles"):
        merged([])
    with pytest.raises(DataError, match="times of ranks"):
        replace(one, ranks=RankTimes(["a"], both.ranks.own[:1]))


def test_lines_that_moved_are_compared_with_themselves_and_gone_ones_are_named():
    before = small()
    after = small("/elsewhere/train.py", "# a comment\n# and another\n" + SOURCE, shift=2)
    changes = compare(before, after).by_line()
    assert changes == {
        ("/elsewhere/train.py", 7): (65 * MILLION, 65 * MILLION),
        ("/elsewhere/train.py", 9): (30 * MILLION, 30 * MILLION),
    }
    edited = SOURCE.replace("    item()\n", "").replace("model(x)", "model(x).sum()")
    changes = compare(before, small(source=edited)).by_line()
    assert changes["/a/train.py", -7] == (30 * MILLION, 0)  # which line 7 of the later source is not
    assert changes["/a/train.py", 5] == (65 * MILLION, 65 * MILLION)


def test_lines_that_became_one_are_compared_with_it_together():
    three, one = "    loss = model(x)\n    loss.backward()\n    item()\n", "    everything()\n"
    before = small()
    own = before.tree.own + np.where(before.tree.line == 5, 10 * MILLION, 0)
    before = replace(before, tree=replace(before.tree, own=own))
    changes = compare(before, small(source=SOURCE.replace(three, one))).by_line()
    assert changes["/a/train.py", 5] == (105 * MILLION, 65 * MILLION)


def test_a_program_under_another_name_is_compared_with_what_it_was():
    after = small("/a/faster.py")
    changes = compare(small(), replace(after, facts=replace(after.facts, command=["faster.py"]))).by_line()
    assert set(changes) == {("/a/faster.py", 5), ("/a/faster.py", 7)}


def test_profiles_that_know_their_steps_are_compared_by_the_step():
    one, other = small(), small(scale=2)
    steps = [replace(one, facts=replace(one.facts, steps=5)), replace(other, facts=replace(other.facts, steps=10))]
    comparison = compare(*steps)
    assert comparison.by_step
    assert comparison.total == (19 * MILLION, 19 * MILLION)


# -- lines -------------------------------------------------------------------------------------------------------------


def test_code_is_the_programs_own_unless_it_is_installed_or_pythons():
    assert package_of("/v/lib/python3.11/site-packages/torch/nn/functional.py") == "torch"
    assert package_of("/usr/lib/python3/dist-packages/six.py") == "six"
    assert package_of("/opt/python/lib/python3.12/json/decoder.py") == "python"
    assert package_of("<frozen runpy>") == package_of("<string>") == "python"
    assert package_of("/home/me/train.py") == package_of("<ipython-input-1-2>") == ""
    assert package_of(nearest.__code__.co_filename) == "shoestring"
    assert package_of(main.__code__.co_filename) == "python"
    assert package_of(by_line.__code__.co_filename) == package_of(Trace.record.__code__.co_filename) == "python"
    assert short("/v/lib/python3.11/site-packages/torch/nn/functional.py") == "torch/nn/functional.py"
    assert (
        short(main.__code__.co_filename) == "shoestring/cli.py" or Path.cwd() in Path(main.__code__.co_filename).parents
    )


def test_packages_count_as_the_program_where_they_are_asked_for():
    tree = small().tree
    assert set(by_line(tree)) == {("/a/train.py", 5), ("/a/train.py", 7)}
    inside = by_line(tree, ["torch"])
    assert {line for file, line in inside if "torch" in file} == {1700}
    alone = replace(tree, names=[name.replace("/a/", "/lib/python3.11/") for name in tree.names])
    assert sum(line.total for line in by_line(alone).values()) == 95 * MILLION  # on the nearest lines there are


def test_times_that_were_sampled_say_how_far_they_may_be_off(tmp_path, capsys):
    profile = small()
    variance = np.where(profile.tree.kind == 1, (9.5 * MILLION / 1.96) ** 2, 0.0)  # of four Python lines
    uncertain = replace(profile, tree=replace(profile.tree, own_variance=variance))
    assert by_line(uncertain.tree)["/a/train.py", 7].uncertainty == pytest.approx(9.5 * MILLION)
    uncertain.save(tmp_path / "u.npz")
    assert main(["profile", "view", str(tmp_path / "u.npz")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert next(row for row in rows if "train.py:7" in row).split()[:2] == ["32%", "10%"]


def test_sources_are_those_of_the_program_and_have_an_end(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    tree = small(str(path)).tree
    assert sources_of(tree) == {str(path): SOURCE}
    path.with_name("large.py").write_text("x = 1\n" * 100_000)
    assert sources_of(small(str(tmp_path / "large.py")).tree) == {}


def test_findings_stand_by_their_gain_and_refuse_what_cannot_be():
    unknown, small_gain = replace(FINDING, gain=None), replace(FINDING, gain=(0.1, 0.9))
    assert by_gain([unknown, small_gain, FINDING]) == [FINDING, small_gain, unknown]
    assert unknown.saving == ""
    with pytest.raises(ConfigError, match="the gain of a finding"):
        replace(FINDING, gain=(0.5, 0.2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no program is named"),
        (["--out", ".", "a.py"], "which is a folder"),
        (["--share", "0", "a.py"], "--share must be above 0 and at most 1, got 0"),
        (["--budget", "2", "a.py"], "--budget must be above 0 and at most 1, got 2"),
        (["-m", "package.that_is_not_there"], "there is no module package.that_is_not_there"),
        (["--nope", "a.py"], "shoestring profile run --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_profiled_is_said_before_anything_runs(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("print('ran')\n")
    assert main(["profile", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "ran" not in printed.out


@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [("raise KeyboardInterrupt", 130, "saved to profile.npz"), ("1 / 0", 1, "the program failed; its profile until")],
)
def test_a_program_that_is_interrupted_has_a_result_and_one_that_fails_its_own_traceback(
    tmp_path, monkeypatch, capsys, ending, code, shown
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(f"import torch\ntorch.ones(3).exp()\n{ending}\n")
    assert main(["profile", "a.py"]) == code
    printed = capsys.readouterr()
    assert shown in printed.out + printed.err
    assert "runpy" not in printed.err and "profiling.py" not in printed.err
    assert (tmp_path / "profile.npz").is_file()
