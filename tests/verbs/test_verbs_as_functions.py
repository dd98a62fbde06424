"""Each verb as a function: called without the command line, with the settings that the command line nests."""

import asyncio
import inspect
import os
import shutil
import signal
from dataclasses import replace
from importlib import import_module

import pytest

from shoestring import run
from shoestring.commands.table import GROUPS, VERBS
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.decode.settings.generation import Decoding, Generation, SamplingOptions, SeededOptions, Speculation
from shoestring.decode.settings.serving import Serving
from shoestring.distributed.join import join
from shoestring.memory import Budget
from shoestring.models.loading import load_model
from shoestring.planning.cluster import read_cluster
from shoestring.recipes import find as installed_recipes
from shoestring.testing.pool import Pool
from shoestring.verbs import archive, interchange, memory, profile, recipes, report, trust
from shoestring.verbs.check import check
from shoestring.verbs.distill import distill
from shoestring.verbs.generate import generate
from shoestring.verbs.plan import plan
from shoestring.verbs.probe import probe
from shoestring.verbs.prune import prune
from shoestring.verbs.quantize import quantize
from shoestring.verbs.settings import (
    CheckpointImport,
    OneShotPruning,
    ProgramProfiling,
    Quantization,
    SampleText,
    SkipChoice,
)
from shoestring.verbs.skip import skip
from shoestring.verbs.trim import trim
from tests.profile.small_profiles import small
from tests.small_runs import write_run_file, write_texts
from tests.verbs import ranks


@pytest.fixture
def copied(ours, tmp_path):
    """A run that a test may change."""
    return shutil.copytree(ours / "run", tmp_path / "run")


@pytest.mark.parametrize("name", VERBS)
def test_the_table_names_a_function_and_the_command_that_calls_it(name):
    module, _, attribute = VERBS[name].function.partition(":")
    module = f"{VERBS[name].package}.{module}"
    function = getattr(import_module(module), attribute)
    assert inspect.isfunction(function) and function.__module__ == module and function.__doc__
    source = inspect.getsource(VERBS[name].load())
    assert f"from {module} import" in source and attribute in source
    assert name in VERBS and (" " not in name or name.split()[0] in GROUPS)


def test_check_describes_a_run(ours):
    lines = list(check(run.look(str(ours / "run.toml"), ["--run.folder", "elsewhere"])))
    assert any(line.startswith("parameters: ") for line in lines)


def test_generate_yields_the_text_of_the_seed(ours):
    settings = Generation(max_tokens=6, sampling=SeededOptions(temperature=1.0, seed=3))
    text = "".join(generate(ours / "run", "the ", settings))
    drafts, lines = Decoding(speculation=Speculation(draft="lookup", draft_length=2)), []
    drafted = Generation(max_tokens=6, sampling=SeededOptions(temperature=1.0, seed=3), decoding=drafts)
    assert text and "".join(generate(ours / "run", "the ", drafted, report=lines.append)) == text
    assert lines


def test_serve_runs_until_it_is_told_to_stop(ours):
    lines = []

    def ready(line):
        lines.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    from shoestring.verbs.serve import serve

    serve(str(ours / "run"), Serving(port=0, slots=2, name="ours"), ready=ready)
    assert lines[0].startswith("ours at http://127.0.0.1:") and "2 slots of 16 tokens" in lines[0]


def test_requests_take_what_they_do_not_give_from_the_server(ours):
    from shoestring.decode.serve.asking import completion
    from shoestring.verbs.serve import build_app

    app = build_app(str(ours / "run"), Serving(), SamplingOptions(temperature=0.5, top_k=3))
    asked = completion({"prompt": "the ", "max_tokens": 2, "top_k": 5}, app.served)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (0.5, 5, 1.0)
    try:  # chats and long requests are read by other processes
        asked = asyncio.run(app.understanding.later("completion", b'{"prompt": "the ", "max_tokens": 2, "top_k": 5}'))
    finally:
        app.understanding.close()
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (0.5, 5, 1.0)


def test_prune_quantize_and_skip_write_what_they_made(ours, tmp_path):
    source = str(ours / "run")
    pruned = prune(source, tmp_path / "pruned", OneShotPruning(format="packed"))
    assert pruned[0].startswith("2:4 by magnitude") and load_model(tmp_path / "pruned")
    rounded = quantize(source, tmp_path / "rounded", Quantization(bits=4))
    assert rounded[-1] == f"written to {tmp_path / 'rounded'}" and load_model(tmp_path / "rounded")
    choice = SkipChoice(share=0.1, text=SampleText(samples=2, sequence=16))
    lines = skip(source, tmp_path / "plan.json", choice)
    assert "bytes moved for a token" in "\n".join(lines) and (tmp_path / "plan.json").is_file()


def test_exchanges_are_planned_for_several_ranks(ours):
    with pytest.raises(ConfigError, match="single rank has nothing to exchange"):
        plan(run.load(str(ours / "run.toml"), trusted=False), World(), tries=0)


@pytest.mark.slow
def test_plan_of_one_rank_finds_micro_batches_that_fit(ours, tmp_path):
    own = run.load(str(ours / "run.toml"), trusted=False)
    free = plan(own, World(), tries=1)
    peaks = {one.run.settings.accumulate: one.predicted.peak for one in free.plans if not one.added}
    assert peaks[2] < peaks[1]
    room = (peaks[2] + peaks[1]) / 2 / 2**30
    tight = plan(replace(own, features=(*own.features, Budget(gib=room))), World(), tmp_path / "plan.toml", tries=1)
    assert tight.exchanged is None and tight.choice is not None
    assert tight.plans[tight.choice].predicted.peak <= room * 2**30
    planned = run.load(str(tmp_path / "plan.toml"), trusted=False)
    assert planned.settings.accumulate > 1 or any(one.name == "memory.recompute" for one in planned.features)


@pytest.mark.slow
def test_plan_writes_the_choice(ours, tmp_path):
    with Pool(2) as pool:
        lines = pool.call(ranks.planned, source=str(ours / "run.toml"), out=str(tmp_path / "plan.toml"))[0]
    assert any(line.startswith("chosen: ") for line in lines)
    assert run.load(str(tmp_path / "plan.toml"), trusted=False).settings.steps == 2


@pytest.mark.slow
def test_probe_writes_what_it_measured(tmp_path):
    with join() as world:
        cluster = probe(world, tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == cluster and cluster.devices[0].matmul_fp32 > 1e6


@pytest.mark.slow
def test_distill_trains_a_reference_and_a_draft(ours, tmp_path):
    tables = {"data": write_texts(tmp_path / "texts"), "steps": 2, "folder": str(tmp_path / "run")}
    file = write_run_file(tmp_path / "run.toml", {"run": tables, "decode": {"distill": {"teacher": str(ours / "run")}}})
    lines = []
    with join() as world:
        assert distill(run.load(str(file)), world, say=lines.append) == "finished"
    assert [line.split(":")[0] for line in lines[:2]] == ["reference", "draft"]


def test_reports_and_comparisons_are_pages(copied, ours, tmp_path):
    assert report.report(copied, tmp_path / "trace.json") == [copied / "report.html", tmp_path / "trace.json"]
    text, page = report.compare([ours / "run", copied], tmp_path / "compare.html")
    assert page.is_file() and f"Memory of {copied} against" in text


@pytest.mark.slow
def test_a_program_is_profiled_in_this_process(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "a.npz"
    program.write_text("import sys\nsum(range(1000))\nsys.exit(len(sys.argv))\n")
    ended = profile.profile_program(str(program), ["x", "y"], ProgramProfiling(out=out))
    assert (ended.code, ended.error, ended.out) == (3, None, out)
    assert profile.open_profile(out).facts.command == ended.profile.facts.command


def test_profiles_are_viewed_compared_merged_and_exported(tmp_path):
    before, after = tmp_path / "before.npz", tmp_path / "after.npz"
    small().save(before)
    small(scale=2).save(after)
    assert profile.view([before])[1] == tmp_path / "before.html"
    comparison, page = profile.diff(before, after, tmp_path / "diff.html")
    assert comparison is not None and page.is_file()
    both = profile.open_profile(profile.merge([before, after], tmp_path / "both.npz"))
    assert list(both.ranks.labels) == ["before", "after"]
    assert profile.export(before, "collapsed").name == "before.collapsed.txt"
    with pytest.raises(ConfigError, match="there is no format `png`"):
        profile.export(before, "png")


def test_recordings_of_memory_are_viewed_compared_and_exported(ours, copied):
    assert memory.view(copied)[-1] == f"page: {copied / 'memory.html'}" and (copied / "memory.html").is_file()
    assert memory.diff(ours / "run", copied)
    assert memory.export(copied).is_file()
    assert memory.list_leases()


def test_checkpoints_are_listed_verified_shown_exported_imported_and_trimmed(copied, tmp_path):
    (newest, *_) = archive.list_checkpoints(copied)
    assert newest.step == 2
    assert [row["damage"] for row in archive.verify(copied, 2)] == [[]]
    assert "step 2" in next(iter(archive.explain(copied).lines()))
    assert {state["name"] for state in archive.show(copied)["states"]} >= {"model", "optimizer"}
    assert interchange.export(copied, tmp_path / "weights")
    path = interchange.import_checkpoint(tmp_path / "weights", tmp_path / "new", CheckpointImport(step=7))
    assert archive.list_checkpoints(tmp_path / "new")[0].path == path
    with pytest.raises(ConfigError, match="--step must not be negative"):
        interchange.import_checkpoint(tmp_path / "weights", tmp_path / "newer", CheckpointImport(step=-1))
    assert trim(tmp_path / "new", keep=1) == []


def test_the_word_for_a_place_is_given_and_taken_back(copied):
    assert trust.vouch(copied) == [f"{copied} names no code: it opens without your word"]
    assert trust.forget(copied) == [f"nobody has vouched for {copied}"]


@pytest.mark.slow
def test_a_study_is_worked_for_and_its_best_trial_written(ours, tmp_path):
    from shoestring.verbs import tune

    own = f'[tune]\nrun = "{ours / "run.toml"}"\nfolder = "{tmp_path / "study"}"\ntrials = 2\n'
    (tmp_path / "tune.toml").write_text(own + '[space]\n"optim.adamw.lr" = {log = [1e-4, 1e-2]}\n')
    outcome = tune.tune(tmp_path / "tune.toml")
    assert outcome.code == 0 and outcome.lines[0].endswith("2 done") and outcome.lines[-1].startswith("page: ")
    assert tune.join(f"sqlite:///{tmp_path / 'study/store.db'}").code == 0
    tune.write_best(tmp_path / "tune.toml", tmp_path / "best.toml")
    assert "lr = " in (tmp_path / "best.toml").read_text()
    assert tune.compare_studies([tmp_path / "tune.toml"], tmp_path / "page.html").is_file()


def test_recipes_are_listed_with_their_purpose_areas_and_run_time():
    lines = list(recipes.list_recipes())
    assert len(lines) == 2 * len(installed_recipes())
    for name, purpose, facts in zip(installed_recipes(), lines[::2], lines[1::2], strict=True):
        listed, _, words = purpose.partition("  ")
        assert listed.strip() == name and words.strip()
        assert facts.startswith(" " * len(listed)) and facts.strip()
