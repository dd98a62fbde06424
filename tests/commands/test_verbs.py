"""The verbs as a user types them, on a model small enough to train in a second."""

import json
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shoestring.cli import main
from shoestring.verbs.plan import _deviation
from tests.small_runs import write_run_file, write_texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run file, run folder) of a finished run."""
    root = tmp_path_factory.mktemp("verbs")
    folder = root / "run"
    run = {"data": write_texts(root), "steps": 6, "prompts": ["a"], "folder": str(folder)}
    file = write_run_file(root / "run.toml", {"run": run, "optim": {"clip": {}}})
    assert main(["train", str(file)]) == 0
    return file, folder


def test_a_run_leaves_everything_that_its_folder_promises(trained):
    folder = trained[1]
    expected = {"run.toml", "environment.json", "metrics.jsonl", "tokenizer.json", "summary.json", "report.html"}
    assert expected | {"trace-0.jsonl", "model", "checkpoints"} <= {path.name for path in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 6, 6 * 4 * 16)
    assert summary["samples"][0]["prompt"] == "a"
    assert not list(folder.rglob("*.tmp"))


def test_metrics_have_a_line_a_step(trained):
    lines = [json.loads(line) for line in (trained[1] / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert {"lr", "grad_norm", "tokens_per_second", "data_wait", "memory_gib", "bits_per_byte"} <= steps[-1].keys()
    assert any("held_out_loss" in line for line in lines)


def test_generate_writes_the_same_text_for_the_same_seed(trained, capsys):
    texts = []
    for _ in range(2):
        assert main(["generate", str(trained[1]), "--prompt", "the ", "--max-tokens", "12", "--seed", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the ")


def test_generate_writes_the_same_text_with_drafts_and_reports_what_they_gained(trained, capsys):
    call = ["generate", str(trained[1]), "--prompt", "the ", "--max-tokens", "40", "--seed", "3"]
    assert main(call) == 0
    text = capsys.readouterr().out
    for drafter in ("lookup", str(trained[1])):
        assert main([*call, "--draft", drafter, "--draft-length", "3", "--report"]) == 0
        drafted = capsys.readouterr()
        assert drafted.out == text
        assert "tokens drafted" in drafted.err
    assert "(100%)" in drafted.err  # a drafter that is the model itself


def test_skip_writes_a_plan_that_generate_takes(trained, capsys, tmp_path):
    plan = str(tmp_path / "plan.json")
    options = ["--share", "0.3", "--samples", "4", "--sequence", "16", "--out", plan]
    assert main(["skip", str(trained[1]), *options]) == 0
    said = capsys.readouterr().out
    saved = re.search(r"bytes moved for a token at a context of 16: ([\d.]+)% saved", said)
    assert 30 <= float(saved.group(1)) < 80
    assert re.search(r"loss on the samples: [\d.]+ nats a token before, [\d.]+ after", said)
    texts = {}
    call = ["generate", str(trained[1]), "--prompt", "the ", "--max-tokens", "40", "--seed", "3"]
    for more in (
        (),
        ("--skip", plan),
        ("--skip", "0.3"),
        ("--skip", "0"),
        ("--draft", "skip"),
        ("--skip", plan, "--draft", "lookup"),
    ):
        assert main([*call, *more]) == 0
        texts[more] = capsys.readouterr().out
    assert texts["--skip", "0"] == texts["--draft", "skip"] == texts[()]
    assert texts["--skip", plan] == texts["--skip", plan, "--draft", "lookup"]
    assert texts["--skip", plan] != texts[()]
    for wrong in (["--skip", "1.5"], ["--skip", "0.3", "--draft", "lookup"], ["--skip", str(trained[0])]):
        assert main([*call, *wrong]) == 2
        assert "skip" in capsys.readouterr().err


def test_check_says_what_a_run_file_comes_to_and_starts_nothing(trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(trained[0]), "--workers", "2", "--comm.bf16", "{}"]) == 0
    out = capsys.readouterr().out
    order = out[out.index("order of application") :]
    assert order.index("SHARD  parallel.ddp") < order.index("WIRE   comm.bf16") < order.index("OPTIM  optim.adamw")
    assert "parameters: " in out
    assert "sum for a rank: " in out
    assert "shoestring keys NAME" in out
    assert list(tmp_path.iterdir()) == []


def test_a_resolved_run_file_runs_again_to_the_same_losses(trained, tmp_path):
    again = tmp_path / "again"
    assert main(["train", str(trained[1]), "--folder", str(again)]) == 0

    def losses(folder):
        lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    assert losses(again) == losses(trained[1])


def test_compare_names_the_settings_that_differ(trained, tmp_path, capsys):
    other, page = tmp_path / "other", tmp_path / "compare.html"
    assert main(["train", str(trained[0]), "--folder", str(other), "--optim.adamw.lr", "0.01"]) == 0
    capsys.readouterr()
    assert main(["compare", str(trained[1]), str(other), "--out", str(page)]) == 0
    assert "optim.adamw.lr" in capsys.readouterr().out
    assert page.is_file()


def test_report_exports_the_trace_for_perfetto(trained, tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert main(["report", str(trained[1]), "--trace", str(out)]) == 0
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert {"forward", "backward", "optimizer", "data"} <= names


@pytest.mark.slow
def test_probe_writes_what_it_measured(tmp_path, capsys):
    from shoestring.planning.cluster import read_cluster

    out = tmp_path / "cluster.toml"
    assert main(["probe", "--workers", "1", "--out", str(out)]) == 0
    cluster = read_cluster(out)
    assert cluster.devices[0].matmul_fp32 > 1e6
    assert cluster.stores[0].write > 1e3
    assert cluster.links == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["no verb `trian`", "did you mean `train`?"]),
        (["generate", "."], ["holds no model"]),
        (["compare", "nowhere", "nowhere"], ["no run folder"]),
        (["probe", "--bogus", "1"], ["unknown argument `--bogus`"]),
        (["train", "quickstat"], ["did you mean `quickstart`?"]),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert all(word in said for word in words)
    assert "Traceback" not in said


def test_help_is_quick_because_it_imports_no_torch():
    code = "import sys; from shoestring.cli import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False"


@pytest.mark.slow
def test_the_wheel_has_recipes_and_page_and_runs_away_from_the_repository(tmp_path):
    root = Path(__file__).parents[2]
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(root),
    ]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    code += "import shoestring; from shoestring.cli import main\n"
    code += "print(shoestring.__file__); sys.exit(main(['check', 'quickstart']))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert shown.startswith(str(tmp_path / "site"))
    assert "parallel" not in shown
    assert "optim.schedule" in shown
    assert (tmp_path / "site/shoestring/report/web/uplot/LICENSE").is_file()


def test_version_is_said_without_torch():
    code = "import sys; from shoestring.cli import main\nmain(['--version']); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"shoestring \d\S*, torch \d\S*, Python \d\S*\nFalse\n", shown)


def test_help_takes_no_more_than_its_imports_need():
    """Nothing that takes long to import; at most 0.3 s of a calm machine, here of processor time."""
    code = """
import sys
from shoestring.cli import main
try: main(["--help"])
except SystemExit: pass
slow = {"torch", "numpy", "asyncio", "ssl", "sqlalchemy", "optuna", "rich", "http"}
print(*sorted(slow & set(sys.modules)), file=sys.stderr)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == "\n"

    def seconds(*arguments):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    nothing, helped = [], []
    for _ in range(4):
        nothing.append(seconds("-c", "import argparse, typing, dataclasses, inspect, tomllib"))
        helped.append(seconds("-m", "shoestring", "--help"))
    assert min(helped) < max(0.3, 12 * min(nothing)), (helped, nothing)


def test_a_technique_is_turned_on_by_its_name_alone(trained, capsys):
    assert main(["check", str(trained[0]), "--comm.bf16", "--optim.clip", "--run.steps", "7"]) == 0
    out = capsys.readouterr().out
    assert "[comm.bf16" in out and "[optim.clip]" in out and "steps = 7" in out
    for flag in ("--optim.clip.max_norm", "--run.baselines"):
        assert main(["check", str(trained[0]), flag]) == 2
        assert f"`{flag}` needs a value" in capsys.readouterr().err


def test_a_mark_before_the_text_of_a_run_file_is_passed_over(trained, tmp_path, capsys):
    (tmp_path / "marked.toml").write_text(trained[0].read_text(), encoding="utf-8-sig")
    assert main(["check", str(tmp_path / "marked.toml")]) == 0


def test_generate_prints_nothing_before_an_error(trained, capsys, tmp_path):
    for flags in (["--seed", str(2**70)], ["--seed", "-1"], ["--temperature", "-1"], ["--top-p", "0"]):
        assert main(["generate", str(trained[1]), "--prompt", "the ", *flags]) == 2
        out, said = capsys.readouterr()
        assert out == "" and said.startswith("error: ") and "Traceback" not in said
    assert main(["generate", str(tmp_path), "--prompt", "the "]) == 2
    assert capsys.readouterr().out == ""


def test_arguments_that_are_not_utf8_are_refused(trained, capsys):
    broken = b"caf\xe9".decode(errors="surrogateescape")
    assert main(["generate", str(trained[1]), "--prompt", broken]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    assert main(["train", str(trained[0]), "--run.prompts", f'["{broken}"]']) == 2
    assert "is not UTF-8" in capsys.readouterr().err


LONG = "n" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", LONG],
        ["train", f"{LONG}.toml"],
        ["train", "{run}", "--run.folder", LONG],
        ["train", "{run}", "--run.folder", "{run}.new", "--run.data", f"{LONG}.txt"],
        ["train", "{run}", "--run.folder", "{run}.new", "--run.resume", LONG],
        ["check", LONG],
        ["generate", LONG],
        ["report", LONG],
        ["compare", LONG, LONG],
        ["checkpoint", "ls", LONG],
        ["checkpoint", "trim", LONG, "--keep", "1"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)
def test_names_that_no_file_can_have_are_one_line(trained, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main([each.format(run=trained[0]) for each in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "Traceback" not in said


def test_trimming_nothing_is_an_error(tmp_path, capsys):
    assert main(["checkpoint", "trim", str(tmp_path / "nosuch"), "--keep", "1"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_former_names_of_verbs_and_flags_work_and_say_the_new_ones(trained, tmp_path, capsys):
    assert main(["checkpoint", "prune", str(trained[1]), "--keep", "9", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == [] and err == "`shoestring checkpoint prune` is now `shoestring checkpoint trim`\n"
    assert main(["generate", str(trained[1]), "--prompt", "the ", "--tokens=2"]) == 0
    assert capsys.readouterr().err.startswith("`--tokens` is now `--max-tokens`\n")
    for words in (["checkpoint", "purge"], ["memory", "vieww"]):
        assert main(words) == 2
        assert f"there is no verb `{' '.join(words)}`" in capsys.readouterr().err
    assert main(["finetune"]) == 2 and "shoestring train finetune" in capsys.readouterr().err


def test_help_of_verbs_and_groups_is_that_of_the_table(capsys):
    for arguments in (["generate", "--help"], ["checkpoint", "-h"], ["tune", "--help"], ["tune", "join", "-h"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
    out = capsys.readouterr().out
    assert "In Python: shoestring.verbs.generate.generate" in out and "shoestring tune join" in out
    for name in ("--temperature", "--draft-length", "trim", "best"):
        assert name in out


def test_the_largest_seed_trains(trained, tmp_path):
    assert main(["train", str(trained[0]), "--folder", str(tmp_path / "run"), "--run.seed", str(2**63 - 1)]) == 0


@pytest.mark.parametrize(
    ("measured", "said"),
    [(0.0396, "13.2 times as long as predicted"), (0.0033, "10% more than predicted"), (0.0015, "50% less than")],
)
def test_what_a_plan_was_off_by_is_said_of_what_it_predicted(measured, said):
    assert _deviation(measured, 0.003).startswith(said)


def test_more_ranks_than_memory_holds_are_refused_before_they_start(capsys):
    assert main(["train", "quickstart", "--workers", "1000000"]) == 2
    said = capsys.readouterr().err
    assert "1000000 ranks need about" in said and "lower --workers" in said


@pytest.mark.parametrize("verb", ["train", "plan", "distill"])
def test_a_verb_that_needs_a_run_says_so_and_names_the_recipes(verb, capsys):
    assert main([verb, "--model", "hf:base"]) == 2
    said = capsys.readouterr().err
    assert f"`shoestring {verb}` needs the name of a recipe" in said and "finetune" in said


def test_a_model_can_be_checked_without_a_run(trained, capsys):
    assert main(["check", "--model", str(trained[1])]) == 0
    assert "context              16 tokens" in capsys.readouterr().out
