"""Ranks that were started with different settings, code or versions end at once, with the key and both values."""

import pytest

from shoestring.core.world import World
from shoestring.run import parse
from shoestring.testing.pool import Pool
from shoestring.training import same_run
from tests.small_runs import write_texts
from tests.training import different_ranks

CASES = {
    "run.seed": ["--seed", "5"],
    "run.batch": ["--batch", "16"],
    "run.accumulate": ["--accumulate", "2"],
    "run.steps": ["--steps", "7"],
    "run.minutes": ["--minutes", "1"],
    "run.model": ["--model", "shoestring.testing.jobs:tiny"],
    "run.data": ["--data", "python-stdlib"],
    "run.loss": ["--loss", "mine:loss"],
    "run.evaluate_every": ["--evaluate_every", "2"],
    "run.deterministic": ["--deterministic", "true"],
    "run.resume": ["--resume", "auto"],
    "run.folder": ["--folder", "elsewhere"],
    "model.layers": ["--model.layers", "3"],
    "data.sequence": ["--data.sequence", "32"],
    "data.tokenizer": ["--data.tokenizer", "bpe"],
    "data.held_out": ["--data.held_out", "0.2"],
    "optim.adamw.lr": ["--optim.adamw.lr", "3e-3"],
    "optim.clip.max_norm": ["--optim.clip.max_norm", "1.0"],
    "optim.schedule.shape": ["--optim.schedule.warmup", "10"],
    "memory.zero.stage": ["--memory.zero"],
    "comm.powersgd.rank": ["--comm.powersgd.rank", "2"],
    "checkpoint.plain.every": ["--checkpoint.plain.every", "1"],
    "code of shoestring": ["code"],
    "version of torch": ["torch"],
}
CLIP, DDP = ["optim", "Clip", {"max_norm": 1.0}], ["parallel", "DDP", {}]
FEATURES = [
    ("compose", [DDP, CLIP], [DDP], "`features` differs between ranks"),
    ("compose", [DDP, CLIP], [DDP, ["optim", "Clip", {"max_norm": 2.0}]], "`optim.clip.max_norm` differs between"),
    ("compose", [DDP], [["parallel", "FSDP", {}]], "`features` differs between ranks"),
    ("rates", [DDP], [DDP], "`optimizer.groups[0].lr` differs between ranks: 0.1 on rank 0, 0.2 on rank 1"),
    ("factories", [DDP], [DDP], "`optimizer.groups[0].lr` differs between ranks: 0.1 on rank 0, 0.2 on rank 1"),
    ("attach", [DDP, CLIP], [DDP, CLIP], None),
]  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=100) as pool:
        yield pool


@pytest.mark.slow
def test_every_key_that_differs_is_named_with_both_values(pool, tmp_path):
    document = {
        "run": {"steps": 4, "batch": 8, "data": write_texts(tmp_path / "texts"), "folder": str(tmp_path / "run")},
        "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 16},
        "data": {"tokenizer": "bytes", "sequence": 16, "held_out": 0.3},
    }
    first, second = pool.call(different_ranks.runs, document=document, cases=list(CASES.values()))
    for key, mine, theirs in zip(CASES, first, second, strict=True):
        assert mine == theirs and mine is not None, key
        kind, message, hint = mine
        table = key.rpartition(".")[0]
        whole = table in ("run", "model", "data", "")  # else the table is missing on the first rank
        assert kind == "ConfigError" and (f"`{key}`" if whole else f"`{table}.") in message, message
        assert "differs between ranks: " in message, message
        assert " on rank 0, " in message and " on rank 1" in message and "the same run file" in hint
    assert not (tmp_path / "run").exists()
    said = dict(zip(CASES, (message for _, message, _ in first), strict=True))
    assert said["run.seed"] == "`run.seed` differs between ranks: 0 on rank 0, 5 on rank 1"
    assert said["memory.zero.stage"].startswith("`memory.zero")


@pytest.mark.parametrize(("kind", "one", "other", "message"), FEATURES)
def test_own_loops_that_attach_other_features_are_told(pool, kind, one, other, message):
    first, second = pool.call(different_ranks.features, kind=kind, first=one, second=other)
    assert first == second
    assert (first is None) == (message is None)
    assert message is None or message in first[1]


def test_a_corpus_is_prepared_with_the_same_settings_everywhere(pool, tmp_path):
    source = write_texts(tmp_path / "texts")
    said = pool.call(different_ranks.prepared, source=source, folder=str(tmp_path / "data"), sequences=[16, 32])
    assert said[0] == said[1] and "`data.sequence` differs between ranks: 16 on rank 0, 32 on rank 1" in said[0][1]


def test_all_code_that_a_run_names_is_compared(tmp_path, monkeypatch):
    """Also what a named module imports from its own package, packages of features, sinks, and a schedule's function."""
    monkeypatch.syspath_prepend(tmp_path)
    compared = []
    monkeypatch.setattr(World, "alike", lambda world, facts, hint: compared.append(facts))
    (tmp_path / "owned").mkdir()
    names = {"schedule": "owned.rates:flat", "sink": "sinks_alone:Sink", "package": "featured"}
    for path in ("owned/__init__.py", "owned/rates.py", "owned/inner.py", "sinks_alone.py", "featured.py"):
        (tmp_path / path).write_text("")
    (tmp_path / "featured.py").write_text("from shoestring.optim import Clip\nclass Own(Clip): ...\n")
    run = parse({
        "run": {"model": "shoestring.models.gpt:tiny", "sinks": [names["sink"]], "packages": [names["package"]]},
        "optim": {"schedule": {"function": names["schedule"]}},
    })  # fmt: skip
    for path in ("owned/inner.py", "sinks_alone.py", "featured.py"):
        same_run._digest.cache_clear()
        same_run.check_ranks(run.document, World(rank=0, size=2, local_size=2))
        with (tmp_path / path).open("a") as file:
            file.write("changed = True")
        same_run._digest.cache_clear()
        same_run.check_ranks(run.document, World(rank=0, size=2, local_size=2))
        before, after = compared[-2:]
        (differs,) = (key for key in after if before[key] != after[key])
        assert differs == f"code of {'owned.rates' if 'owned' in path else path.removesuffix('.py')}"
