"""Pipelines train what one process trains, in fp64; what does not work is refused before anything is allocated."""

import random
import shutil
import weakref

import pytest

import shoestring as ss
from shoestring.core.job import Job, attachments_of
from shoestring.testing.pool import Pool, RankError
from shoestring.testing.scenarios import here
from tests.rigs import pipelines, planted

CLOSE = 1e-10
ALONE = [("tied", {}), ("untied", {"chunks": 2}), ("grouped", {"schedule": "gpipe"}), ("llama", {"ahead": 0})]
ALONE += [("tied", {"embeddings": "first", "chunks": 2})]
PASSES = ["f0.0 f0.1 f0.2 b0.0 f0.3 b0.1 b0.2 b0.3", "f1.0 b1.0 f1.1 f1.2 b1.1 b1.2 f1.3 b1.3"]
ALONE += [("untied", {"pass_order": PASSES})]


@pytest.fixture(scope="module")
def pools():
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four:
        yield {2: two, 4: four}


def same(results, wanted, began=None):
    """Whether all ranks have the losses, norms and held-out loss of one process, and together its weights."""
    weights = {}
    for result in results:
        weights |= result["weights"]
        assert result["began"] == began
        for name in ("losses", "norms"):
            assert result[name] == pytest.approx(wanted[name][began or 0 :], abs=CLOSE, rel=1e-7)
        assert result["held out"] == pytest.approx(wanted["held out"], abs=CLOSE, rel=1e-12)
    assert weights.keys() == wanted["weights"].keys()
    for name, sums in wanted["weights"].items():
        assert weights[name] == pytest.approx(sums, abs=CLOSE)


@pytest.mark.parametrize(("model", "settings"), ALONE)
def test_two_stages_train_what_one_process_does(pools, model, settings):
    same(pools[2].call(pipelines.train, model=model, pipeline=settings), pipelines.train(model=model))


@pytest.mark.slow
def test_a_clipped_step_beside_replicas_is_that_of_one_process(pools):
    wanted = pipelines.train(beside="clip")
    same(pools[4].call(pipelines.train, beside="clip", pipeline={"stages": 2}), wanted)


@pytest.mark.slow
def test_all_stages_skip_the_step_in_which_the_gradients_of_one_overflow(pools):
    wanted = pipelines.train(beside="fp16")
    results = pools[2].call(pipelines.train, beside="fp16", pipeline={})
    same(results, wanted)
    assert [result["scale"] for result in results] == [wanted["scale"]] * 2 == [2.0**15] * 2


@pytest.mark.slow
@pytest.mark.share(16)  # `benchmarks.parallel` measures all
@pytest.mark.parametrize("beside", ["alone", "clip", "recompute"])
@pytest.mark.parametrize("model", [name for name in pipelines.MODELS if name != "frozen block"])
def test_all_forms_train_what_one_process_does(pools, model, beside):
    wanted = pipelines.train(model=model, beside=beside)
    arguments = {"model": model, "beside": beside}
    for schedule in ({}, {"chunks": 2}, {"schedule": "gpipe", "ahead": 3}):
        same(pools[2].call(pipelines.train, pipeline=schedule, **arguments), wanted)
    same(pools[4].call(pipelines.train, pipeline={}, **arguments), wanted)
    for over in pipelines.OVER:
        same(pools[4].call(pipelines.train, pipeline={"stages": 2}, over=over, **arguments), wanted)


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(10))
def test_what_one_split_has_saved_another_resumes(pools, tmp_path, seed):
    """Numbers of ranks, stages, parts and replicas are drawn for the start and for the rest of a run."""
    draw = random.Random(seed)
    model, micro = draw.choice(["tied", "untied", "grouped", "llama", "vit"]), draw.choice([1, 2, 4])
    wanted = pipelines.train(model=model, micro=micro)
    began = resumed = arguments_of(draw)
    while resumed == began:
        resumed = arguments_of(draw)
    for (ranks, arguments), others in ((began, {"stop": 3}), (resumed, {"resume": True})):
        given = {"model": model, "micro": micro, "folder": str(tmp_path), **arguments, **others}
        results = pools[ranks].call(pipelines.train, **given) if ranks > 1 else [pipelines.train(**given)]
        if "resume" in others:
            same(results, wanted, 3)
        shutil.rmtree(tmp_path / "memory", ignore_errors=True)


def arguments_of(draw):
    ranks = draw.choice([1, 2, 4])
    if ranks == 1:
        return 1, {}
    stages = draw.choice([count for count in (1, 2, 4) if count <= ranks])
    over = draw.choice(["ddp", "zero", "dense"])
    if stages == 1:
        return ranks, {"over": over}
    chunks = draw.choice([1, 2]) if stages == 2 and over != "ddp" else 1
    return ranks, {"over": over, "pipeline": {"stages": stages, "chunks": chunks}}


@pytest.mark.slow
@pytest.mark.share(8)  # `benchmarks.parallel` plants all
@pytest.mark.parametrize("fault", planted.FAULTS)
def test_a_fault_is_noticed(pools, tmp_path, fault):
    """Beside replicas and clipping, with tied weights; what is wrong in a checkpoint shows once it is resumed."""
    given = {"fault": fault, "beside": "clip", "pipeline": {"stages": 2}}
    if resumes := fault in planted.IN_CHECKPOINTS:
        pools[4].call(planted.train_with, folder=str(tmp_path), stop=3, **given)
        given |= {"folder": str(tmp_path), "resume": True}
    results = pools[4].call(planted.train_with, **given)
    with pytest.raises(AssertionError):
        same(results, pipelines.train(beside="clip"), 3 if resumes else None)


@pytest.mark.slow
def test_the_same_split_resumes_bit_by_bit(pools, tmp_path):
    whole = pools[4].call(pipelines.train, pipeline={"stages": 2})
    pools[4].call(pipelines.train, pipeline={"stages": 2}, folder=str(tmp_path), stop=3)
    rest = pools[4].call(pipelines.train, pipeline={"stages": 2}, folder=str(tmp_path), resume=True)
    assert [one["losses"][3:] for one in whole] == [one["losses"] for one in rest]
    assert [one["weights"] for one in whole] == [one["weights"] for one in rest]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline": {"stages": 3}}, "divides neither"),
        ({"pipeline": {"chunks": 4}}, "has 4 blocks, too few for 2 stages of 4 parts"),
        ({"pipeline": {"cuts": [0]}}, "do not cut 4 blocks into 2 parts"),
        ({"pipeline": {"cuts": [1, 2]}}, "do not cut 4 blocks into 2 parts"),
        ({"pipeline": {"ahead": -1}}, "must be at least 0, got -1"),
        ({"pipeline": {"schedule": "zb"}}, "cannot be 'zb'"),
        (
            {"pipeline": {"pass_order": ["f0.0 b0.0"]}, "model": "untied"},
            "pass_order`: there are 1 orders for 2 stages",
        ),
        ({"pipeline": {"pass_order": ["b0.0 f0.0", "f1.0 b1.0"]}, "model": "untied"}, "the stages wait for each other"),
        ({"pipeline": {}, "model": "no blocks"}, "has no repeated blocks to cut at"),
        ({"pipeline": {}, "model": "two lists"}, "has 2 lists of blocks"),
        ({"pipeline": {}, "model": "batch norms"}, "has statistics of batches"),
        ({"pipeline": {}, "model": "reads back"}, "reads `late.weight`, which another stage trains"),
        ({"pipeline": {}, "model": "skips"}, "reads `head.weight`, which another stage trains"),
        ({"pipeline": {"cuts": [1]}, "model": "frozen block"}, "stage 0 of 2 would train nothing"),
        ({"pipeline": {}, "model": "shared blocks"}, "blocks 0 and 3 of Strange share `weight`"),
        ({"pipeline": {}, "model": "tied inside"}, "block 1 and layers outside the blocks of Strange share"),
        ({"pipeline": {}, "model": "side inputs"}, "gets more than its hidden states"),
        ({"pipeline": {}, "model": "frozen side inputs"}, "gets more than its hidden states"),
        ({"pipeline": {}, "model": "two calls"}, "calls the model several times for a batch"),
        ({"pipeline": {}, "checkpoint": "plain"}, "assumes that the first rank holds the whole model"),
        ({"pipeline": {}, "beside": "lora"}, "exports weights of the whole model"),
        ({"pipeline": {}, "beside": "fsdp"}, "shards the parameters of the whole model"),
        ({"pipeline": {}, "beside": "compile"}, "compiles the whole model"),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused(pools, arguments, message):
    with pytest.raises(RankError, match=message):
        pools[2].call(pipelines.train, **arguments)


def weights_alive(model: str):
    """Names of the weights that a rank trains, and of those that it still holds in memory."""
    built = pipelines._built(model)
    references = {name: weakref.ref(parameter) for name, parameter in built.named_parameters()}
    job = ss.compose(Job(built, world=here()), [ss.parallel.Pipeline(), ss.optim.AdamW()])
    with job:
        return [*attachments_of(job).trained], [name for name, one in references.items() if one() is not None]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tied", "untied", "llama"])
def test_a_stage_holds_no_weights_of_others(pools, model):
    for trained, alive in pools[2].call(weights_alive, model=model):
        assert set(trained) == set(alive)


def test_an_order_of_passes_is_refused_beside_torchs_own_order_of_messages(monkeypatch):
    """Where a block is compiled and inductor puts messages into an order."""
    from torch._inductor import config
    from torch.nn import Linear

    from shoestring._torch import reorders_messages

    layer = Linear(2, 2)
    monkeypatch.setattr(config.aten_distributed_optimizations, "enable_overlap_scheduling", True)
    assert not reorders_messages(layer)
    layer.compile(backend="eager")
    assert reorders_messages(layer)
    monkeypatch.setattr(config.aten_distributed_optimizations, "enable_overlap_scheduling", False)
    assert not reorders_messages(layer)
