"""`shoestring plan --explain`: how the ranks of a host would divide the operators of a run, without starting ranks."""

import json
from dataclasses import asdict, replace

import pytest
import tomli_w

from shoestring.cli import main
from shoestring.graph.costs import ring
from shoestring.precision.fact_names import CHOSEN_TITLE
from tests.small_runs import write_run_file, write_texts

HOST = ring(2, latency=2e-4, bandwidth=1.25e8, flops=2e10, copy=4e9, memory=1 << 32)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    run = write_run_file(tmp_path / "run.toml", {"run": {"data": texts, "model": "shoestring.models.gpt:tiny"}})

    def cluster(host):
        (tmp_path / "cluster.toml").write_text(tomli_w.dumps(asdict(host)))
        return str(tmp_path / "cluster.toml")

    return str(run), cluster


@pytest.mark.slow
def test_it_shows_operators_ways_parameters_and_messages(files, capsys):
    run, cluster = files
    assert main(["plan", run, "--explain", cluster(HOST)]) == 0
    printed = capsys.readouterr().out
    assert "4 samples on 2 ranks of a host" in printed
    assert "operators split by the search" in printed
    assert "replicas" in printed
    assert "model." not in printed
    for name in ("blocks.*.attention.qkv.weight", "embed.weight"):
        assert name in printed
    assert "ranks exchange" in printed
    assert "messages beside computation" in printed
    for order in ("one after the other", "in the traced order", "in the order found", "or more in any order"):
        assert order in printed


@pytest.mark.slow
def test_it_shows_the_plan_of_the_mesh_that_the_run_asks_for(files, capsys):
    run, cluster = files
    host = cluster(ring(4, latency=2e-4, bandwidth=1.25e8, flops=2e10, copy=4e9))
    assert main(["plan", run, "--explain", host, "--graph.split.mesh", "[2, 2]"]) == 0
    printed = capsys.readouterr().out
    assert "4 samples on 2 × 2 ranks of a host" in printed
    assert "along axis 2, of 2 ranks: " in printed
    assert "all ranks as one axis" in printed
    assert "for each axis of the mesh" in printed
    assert main(["plan", run, "--explain", host, "--graph.split.mesh", "[2, 3]"]) == 2
    assert "a mesh of 2 × 3 ranks was asked for, and there are 4" in capsys.readouterr().err


@pytest.mark.slow
def test_it_shows_the_bits_that_the_run_asks_for_and_those_it_has_chosen(files, tmp_path, capsys):
    run, cluster = files
    group = {"title": CHOSEN_TITLE, "head": ["operators", "bits"], "rows": [["silu(mm) -> mul, mul'", 32.0]]}
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.toml").write_text("")
    (folder / "summary.json").write_text(json.dumps({"report_items": [group]}))
    arguments = ["plan", run, "--explain", cluster(HOST), "--run.folder", str(folder)]
    arguments += ["--precision.graph.wide", '["silu_backward"]', "--precision.graph.measure", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "in 32 bits: its measured error is too large" in printed
    assert "in 32 bits: needs 32 bits" in printed.partition("silu_backward: ")[2].partition("\n")[0]


def test_a_cluster_that_is_no_host_of_several_ranks_is_refused(files, capsys):
    run, cluster = files
    apart = replace(HOST, devices=(HOST.devices[0], replace(HOST.devices[1], host="other")))
    assert main(["plan", run, "--explain", cluster(apart)]) == 2
    assert "2 ranks on 2 hosts" in capsys.readouterr().err
    assert main(["plan", run, "--explain", "missing.toml"]) == 2
    assert "cannot read `missing.toml`: No such file" in capsys.readouterr().err
    assert main(["plan", run, "--explain", run]) == 2
    assert "is no cluster file" in capsys.readouterr().err


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_would(files, capsys):
    run, cluster = files
    small = replace(HOST, devices=tuple(replace(device, memory=1000) for device in HOST.devices))
    assert main(["plan", run, "--explain", cluster(small)]) == 2
    assert "the smallest takes" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--out", "other.toml"), ("--tries", "2"), ("--workers", "2")])
def test_what_has_no_effect_beside_it_is_refused(tmp_path, capsys, flags):
    (tmp_path / "run.toml").write_text("")
    assert main(["plan", str(tmp_path / "run.toml"), "--explain", str(tmp_path / "cluster.json"), *flags]) == 2
    assert f"{flags[0]} has no effect with --explain" in capsys.readouterr().err
