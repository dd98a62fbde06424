"""Layers split over ranks train what one process trains, in fp64; what does not work is refused before allocation."""

import random
import shutil

import pytest

from shoestring.testing.pool import Pool, RankError
from tests.parallel.test_stages import same
from tests.rigs import families, pipelines, planted

QUICK = [
    ("tied", {}),
    ("grouped", {"vocabulary_layers": "whole", "tiles": 3}),
    pytest.param("gpt2", {"tiles": 2}, marks=pytest.mark.slow),
    pytest.param("vit", {"tiles": 2}, marks=pytest.mark.slow),
    pytest.param("llama", {"vocabulary_layers": "whole"}, marks=pytest.mark.slow),
    pytest.param("gpt2", {}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def pools():
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize(("model", "settings"), QUICK)
def test_two_ranks_train_what_one_process_does(pools, model, settings):
    same(pools[2].call(pipelines.train, model=model, tensor=settings), pipelines.train(model=model))


@pytest.mark.slow
def test_a_clipped_step_beside_replicas_is_that_of_one_process(pools):
    wanted = pipelines.train(model="grouped", beside="clip")
    same(pools[4].call(pipelines.train, model="grouped", beside="clip", tensor={"ways": 2}), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["recompute", "fp16"])
def test_tiles_train_what_one_process_does_on_four_ranks(pools, beside):
    """All four share layers, or two share those of a stage."""
    wanted = pipelines.train(beside=beside)
    same(pools[4].call(pipelines.train, beside=beside, tensor={"tiles": 2}), wanted)
    stages = {"pipeline": {"stages": 2}, "tensor": {"ways": 2, "tiles": 4}}
    same(pools[4].call(pipelines.train, beside=beside, **stages), wanted)


MODELS = ("tied", "untied", "grouped", "llama", "tied llama", "qwen3", "gpt2", "vit")


@pytest.mark.slow
@pytest.mark.share(20)  # `benchmarks.parallel` measures all
@pytest.mark.parametrize("beside", ["alone", "clip", "recompute", "exchange", "lamb", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_all_models_train_what_one_process_does(pools, model, beside):
    wanted = pipelines.train(model=model, beside=beside)
    arguments = {"model": model, "beside": beside}
    same(pools[2].call(pipelines.train, tensor={}, **arguments), wanted)
    for over in ("ddp", "dense") if beside != "exchange" else ("ddp",):
        same(pools[4].call(pipelines.train, tensor={"ways": 2}, over=over, **arguments), wanted)


@pytest.mark.slow
def test_ranks_that_drew_other_weights_begin_with_those_of_the_first(pools):
    results = pools[2].call(pipelines.train, tensor={}, seeds=[0, 1])
    same(results, pipelines.train())


@pytest.mark.slow
@pytest.mark.share(8)  # `benchmarks.parallel` plants all
@pytest.mark.parametrize("fault", planted.IN_LAYERS)
def test_a_fault_is_noticed(pools, tmp_path, fault):
    """What is wrong in a checkpoint shows once one process resumes it."""
    model = planted.IN_OTHER_MODELS.get(fault, {"model": "qwen3"})
    given = {"fault": fault, "beside": "clip", "tensor": {"ways": 2}, **model}
    if resumes := fault in planted.IN_CHECKPOINTS:
        pools[4].call(planted.train_with, folder=str(tmp_path), stop=3, **given)
        given |= {"folder": str(tmp_path), "resume": True}
    wanted = pipelines.train(beside="clip", **model)
    with pytest.raises((AssertionError, RankError)):  # the split refuses some itself
        same(pools[4].call(planted.train_with, **given), wanted, 3 if resumes else None)


@pytest.mark.slow
@pytest.mark.share(6)
@pytest.mark.parametrize("seed", range(10))
def test_what_one_split_has_saved_another_resumes(pools, tmp_path, seed):
    """Whole models, replicas, split layers and pipelines: drawn for the start and for the rest of a run."""
    draw = random.Random(seed)
    model = draw.choice(["tied", "grouped", "tied llama", "gpt2"])
    wanted = pipelines.train(model=model)
    ways = [
        (1, {}),
        (2, {"tensor": {}}),
        (4, {"tensor": {"ways": 2}}),
        (2, {}),
        (2, {"pipeline": {}}),
        (4, {"tensor": {"ways": 2, "vocabulary_layers": "whole"}}),
        (2, {"over": "zero"}),
    ]
    began = draw.choice(ways)
    resumed = draw.choice([way for way in ways if way is not began])
    if not any("tensor" in way[1] for way in (began, resumed)):
        began = ways[2]
    for (ranks, arguments), others in ((began, {"stop": 3}), (resumed, {"resume": True})):
        given = {"model": model, "folder": str(tmp_path), **arguments, **others}
        results = pools[ranks].call(pipelines.train, **given) if ranks > 1 else [pipelines.train(**given)]
        if "resume" in others:
            same(results, wanted, 3)
        shutil.rmtree(tmp_path / "memory", ignore_errors=True)


@pytest.mark.slow
def test_the_same_split_resumes_bit_by_bit(pools, tmp_path):
    whole = pools[4].call(pipelines.train, tensor={"ways": 2}, model="grouped")
    pools[4].call(pipelines.train, tensor={"ways": 2}, model="grouped", folder=str(tmp_path), stop=3)
    rest = pools[4].call(pipelines.train, tensor={"ways": 2}, model="grouped", folder=str(tmp_path), resume=True)
    assert [one["losses"][3:] for one in whole] == [one["losses"] for one in rest]
    assert [one["weights"] for one in whole] == [one["weights"] for one in rest]


@pytest.mark.slow
@pytest.mark.share(8)
@pytest.mark.parametrize("part", range(4))
def test_any_family_of_transformers_is_split_exactly_or_refused(pools, part):
    zoo = pytest.importorskip("benchmarks.models.zoo")
    names = [name for name in sorted(set(zoo.CASES) - set(zoo.missing())) if name != "xglm"]  # not in double precision
    kinds = {name: families.kind(pools[2], name) for name in names[part::4]}
    assert {name: kind for name, kind in kinds.items() if kind not in ("equal", "refused")} == {}
    assert list(kinds.values()).count("equal") >= 5


REFUSED = [
    ({"tensor": {"ways": 3}}, "does not divide the 2 ranks of a host"),
    ({"tensor": {"tiles": 0}}, "tiles` must be at least 1, got 0"),
    ({"tensor": {}, "beside": "lora"}, "exports weights of the whole model"),
    ({"tensor": {}, "beside": "fsdp"}, "shards the parameters of whole layers"),
    ({"tensor": {}, "beside": "compile"}, "compiles the model, which exchanges"),
    ({"tensor": {"ways": 2}, "over": "zero"}, "shards the optimizer of whole layers"),
    ({"tensor": {}, "checkpoint": "plain"}, "assumes that the first rank holds"),
    ({"tensor": {}, "model": "two lists"}, "there is no table of how Strange is split"),
    ({"tensor": {}, "model": "frozen"}, "is frozen"),
    ({"tensor": {}, "model": "one head"}, "2 ranks cannot share the 1 of `blocks.0.attention.kv_heads` equally"),
    ({"tensor": {"columns": ["blocks.*.qkv"], "vocabulary_layers": "split"}}, "works only with the built-in tables"),
    ({"tensor": {"heads": ["blocks.*.attention.heads"]}}, "splits no layer by its columns"),
    ({"tensor": {"vocabulary_layers": "split"}, "model": "vit"}, "has no embeddings of tokens"),
    ({"tensor": {"columns": ["blocks.*.qkw"]}}, "no layer is called `blocks.\\*.qkw`"),
    ({"tensor": {"columns": ["blocks.*.qkv:3+0"]}}, "divided into 3\\+0 equal parts"),
    ({"tensor": {"columns": ["blocks.*.qkv"]}}, "splits no layer by its rows"),
    ({"tensor": {"rows": ["blocks.*_norm"]}}, "whose forward pass is not that of a linear layer"),
    ({"tensor": {"columns": ["*.gate_up:1+1"], "rows": ["*.down"], "heads": ["blocks.*.width"]}}, "no module has an"),
    ({"tensor": {"vocabulary_layers": "split"}, "beside": "chunked"}, "computes a loss in the output layer"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[f"{number}" for number in range(len(REFUSED))])
def test_what_does_not_work_is_refused(pools, tmp_path, arguments, message):
    with pytest.raises(RankError, match=message):
        pools[4 if "over" in arguments else 2].call(pipelines.train, folder=str(tmp_path), **arguments)


@pytest.mark.slow
@pytest.mark.share(16)
@pytest.mark.parametrize("beside", ["alone", "clip", "recompute", "fp16"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "vit"])
def test_stages_of_split_layers_train_what_one_process_does(pools, model, beside):
    wanted = pipelines.train(model=model, beside=beside)
    for pipeline in ({"stages": 2}, {"stages": 2, "chunks": 2}):
        results = pools[4].call(pipelines.train, model=model, beside=beside, pipeline=pipeline, tensor={"ways": 2})
        same(results, wanted)
