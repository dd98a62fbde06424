"""Analyses find what was planted in small trees, on the line that does it, and nothing where it was not planted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.profile.analyses import costs, find
from shoestring.profile.recording import Events, Facts
from shoestring.profile.tree import NodeKind
from tests.profile.built_programs import BIG, FILE, MILLISECOND, TORCH, Program, only


def test_a_model_of_products_has_no_findings():
    assert find(Program().model().profile()) == []


def test_a_line_that_sorts_most_of_the_time_is_a_hotspot_and_one_that_multiplies_matrices_is_none():
    program = Program().model(40)
    program.call(program.line(20), "sort", 70)
    assert "64%" in only(program.found("hotspot"), 20).evidence
    dense = Program().model(40)
    dense.call(dense.line(20), "matmul", 70, flops=10**12)
    assert dense.found("hotspot") == []


def test_a_loop_in_python_is_a_hotspot():
    program = Program().model(20)
    program.line(20, "slow", python=18)
    program.line(21, "slow", python=20)
    only(program.found("hotspot"), 21)


@pytest.mark.parametrize(("versions", "found"), [({}, True), ({"jax": "0"}, False)])
def test_a_line_that_waits_for_a_compiled_function_of_jax_is_no_hotspot(versions, found):
    program = Program().model(20)
    program.facts = Facts(versions=versions)
    line = program.line(20, python=60)
    operation = program.builder.node(program.line(7, "update", line), NodeKind.OPERATOR, "dot_general")
    program.builder.add(operation, count=100, own=30 * MILLISECOND)
    assert [finding.line for finding in program.found("hotspot")] == [20] * found


GELU = """
def gelu(x):
    inner = 0.79788456 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))
"""


def gelu(program):
    program.write(18, GELU)
    for number, names in ((20, ("pow", "mul", "add", "mul")), (21, ("tanh", "add", "mul", "mul"))):
        for name in names:
            program.call(program.line(number, "gelu"), name, 11 if name == "tanh" else 2, 2, inputs=BIG, variants=1)


def test_a_written_out_gelu_is_fusible_and_the_gain_is_less_than_it_takes():
    program = Program().model()
    gelu(program)
    finding = only(program.found("fusible"), 21)
    assert "F.gelu" in finding.advice
    assert finding.gain is not None
    least, most = finding.gain
    assert 0.05 < least < most < 41 / 91
    assert most / least < 1.3


def test_a_finding_is_on_the_line_of_a_package_whose_lines_count_as_the_programs_own():
    program = Program().model()
    called = program.library(program.line(20), "activations.py", "gelu")
    text = "def mish(x):\n    return x * torch.tanh(torch.log(1 + torch.exp(x)))\n"
    program.write(19, text)
    program.sources[f"{TORCH}/activations.py"] = "\n" * 5 + text
    for name in ("exp", "add", "log", "tanh", "mul"):
        program.call(called, name, 12, 6, inputs=BIG, variants=1)
    for inside, file in (([], FILE), (["torch"], "activations.py")):
        program.facts = Facts(inside=inside)
        assert [finding.file.endswith(file) for finding in program.found("fusible")] == [True]


LOSS = """
def loss(x, wanted):
    likely = 1 / (1 + torch.exp(-x))
    likely = likely.clamp(1e-6, 1 - 1e-6)
    each = -(wanted * torch.log(likely) + (1 - wanted) * torch.log(1 - likely))
    return each.mean()
"""


def test_a_formula_that_guards_its_logarithms_is_fusible_and_a_norm_that_is_limited_is_none_of_them():
    program = Program().model()
    program.write(18, LOSS)
    lines = (
        ("neg", "exp", "add", "reciprocal"),
        ("clamp",),
        ("log", "mul", "rsub", "rsub", "log", "mul", "add", "neg"),
    )
    for number, names in enumerate((*lines, ("mean",)), 20):
        for name in names:
            program.call(program.line(number, "loss"), name, 3, 2, inputs=BIG, variants=1)
    (finding,) = program.found("fusible")
    assert "binary_cross_entropy_with_logits" in finding.advice
    limited = Program().model()
    limited.write(19, "def train(x):\n    return x * (1 / (x.norm() + 1e-6)).clamp(max=1)\n")
    for name in ("linalg_vector_norm", "add", "reciprocal", "mul", "clamp"):
        limited.call(limited.line(20), name, 8, 2, inputs=BIG, variants=1)
    assert limited.found("fusible") == []


def test_a_fused_gelu_and_a_few_operators_that_no_operator_replaces_are_not_fusible():
    program = Program().model()
    program.call(program.line(20, "gelu"), "gelu", 12, 14, inputs=BIG, variants=1)
    for name in ("mul", "add", "sin"):
        program.call(program.line(30, "wave"), name, 10, 2, inputs=BIG, variants=1)
    assert program.found("fusible") == []


@pytest.mark.parametrize("calls", [("mul_", "add_", "sqrt", "addcdiv_"), ("_foreach_add_", "_foreach_addcdiv_")])
def test_an_optimizer_is_found_if_it_updates_each_parameter_by_itself(calls):
    program = Program().model()
    span = program.call(program.line(30), "Optimizer.step#Adam.step", 20, kind=NodeKind.SPAN)
    each = 1 if "foreach" in calls[0] else 40
    inner = program.library(span, "optim/adam.py", "_adam")
    for name in calls:
        program.call(inner, name, 4, count=each * program.steps, inputs="float32[64] -> float32[64]", variants=1)
    found = program.found("optimizer")
    if each == 1:
        assert found == []
    else:
        finding = only(found, 30)
        assert "fused=True" in finding.advice
        assert "about 40 parameters" in finding.evidence


@pytest.mark.parametrize(("updates", "found"), [(("mul_", "addcmul_", "addcdiv_"), True), (("_foreach_mul_",), False)])
def test_an_optimizer_whose_costs_are_not_known_is_found_by_its_operators(updates, found):
    program = Program().model()
    step = program.call(program.line(40), "Optimizer.step#Rprop.step", 1, kind=NodeKind.SPAN)
    inside = program.library(step, "optim/rprop.py", "step")
    for name in (*updates, "mul", "sign"):
        program.call(inside, name, 12, count=5000, inputs="float32[64,64] -> float32[64,64]")
    findings = program.found("optimizer")
    assert len(findings) == found
    if found:
        assert "foreach=True" in only(findings, 40).advice


def test_a_loop_of_ones_own_that_updates_parameters_is_an_unfused_optimizer():
    program = Program().model()
    program.call(program.line(99), "Optimizer.step#SGD.step", 1, kind=NodeKind.SPAN)
    for name in ("mul_", "add_"):
        count = 30 * program.steps
        columns = {"inputs": "float32[64] -> float32[64]", "variants": 1, "bytes": 512 * count}
        program.call(program.line(40, "average"), name, 10, count=count, **columns)
    assert "_foreach_" in only(program.found("optimizer"), 40).advice


@pytest.mark.parametrize(
    ("rows", "gradient", "found"),
    [
        (100_000, "embedding_dense_backward", True),
        (100_000, "_sparse", False),
        (1000, "embedding_dense_backward", False),
    ],
)
def test_a_gradient_of_all_rows_is_found_where_few_are_taken_and_it_is_dense(rows, gradient, found):
    program, table = Program().model(), f"float32[{rows},32]"
    inputs = f"{table}, int64[512] -> float32[512,32]"
    program.call(program.line(20), "embedding", 1, 8, inputs=inputs, variants=1, gradient=gradient)
    program.call(
        program.library(program.line(97), "optim/sgd.py", "step"), "add_", 20, inputs=f"{table}, {table}", variants=1
    )
    findings = program.found("imbalance")
    assert len(findings) == found
    if found:
        assert "sparse=True" in only(findings, 20).advice
        assert "28 ms with the updates" in findings[0].evidence


@pytest.mark.parametrize(("least", "found"), [(0.9, True), (0.01, False)])
def test_gradients_that_only_other_programs_make_long_are_not_imbalanced(least, found):
    program = Program().model()
    node = program.call(
        program.line(20), "cumsum", 1, 90, inputs="float32[100,100] -> float32[100,100]", gradient="flip"
    )
    (function,) = [each for each, row in enumerate(program.builder.rows) if each > node and row[1] == NodeKind.BACKWARD]
    program.builder.numbers[function]["least"] = round(least * MILLISECOND)
    assert len(program.found("imbalance")) == found


@pytest.mark.parametrize(("count", "found"), [(20_000, True), (100, False)])
def test_values_taken_one_at_a_time_are_a_synchronization_and_one_a_step_is_none(count, found):
    program = Program().model()
    program.call(program.line(98), "Optimizer.step#SGD.step", 1, kind=NodeKind.SPAN)
    for name in ("select", "item"):
        program.call(program.line(25), name, count / 1000, count=count)
    findings = program.found("synchronization")
    assert len(findings) == found
    if found:
        assert "200 a step" in only(findings, 25).evidence


def test_a_library_that_takes_values_is_not_the_programs_synchronization():
    program = Program().model()
    inner = program.library(program.line(25), "nn/utils/clip_grad.py", "clip_grad_norm_")
    program.call(inner, "item", 20, count=20_000)
    assert program.found("synchronization") == []


def test_waiting_for_a_loader_is_found_on_the_line_of_the_loop():
    program = Program().model()
    loader = program.library(program.line(15), "utils/data/dataloader.py", "_BaseDataLoaderIter.__next__")
    program.line(71, "Texts.__getitem__", above=loader, python=30)
    finding = only(program.found("loading"), 15)
    assert "train.py:71" in finding.evidence
    assert finding.gain is not None
    least, most = finding.gain
    assert least < 30 / 80 < most


@pytest.mark.parametrize("kind", ["_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"])
def test_what_more_workers_would_save_is_not_told(kind):
    program = Program().model(20)
    waits = program.library(program.line(30), "utils/data/dataloader.py", "_BaseDataLoaderIter.__next__")
    program.library(waits, "utils/data/dataloader.py", f"{kind}._next_data", python=180)
    assert only(program.found("loading"), 30).limit == (kind == "_MultiProcessingDataLoaderIter")


@pytest.mark.parametrize(
    ("line", "body", "found"),
    [
        ("for batch in read(store): train(batch)", "yield 1", True),
        ("for batch in map(read, files): train(batch)", "return 1", True),
        ("y = read(store)", "yield 1", False),
        ("for _ in range(100): read(store)", "return 1", False),
        ("for row in read(store).topk(4).values: show(row)", "return 1", False),
    ],
)
def test_waiting_for_a_generator_of_ones_own_is_found_where_the_text_is_a_loop(line, body, found):
    program = Program().model()
    program.sources = {FILE: "\n" * 14 + f"{line}\n\ndef read(store):\n    {body}\n"}
    program.line(80, "read", above=program.line(15), python=30)
    assert [finding.line for finding in program.found("loading")] == [15] * found


def converted(*pairs):
    program = Program().model()
    for number, (before, after) in enumerate(pairs, 20):
        conversion = program.call(
            program.line(number), "to", 0.1, inputs=f"{before}[64,64] -> {after}[64,64]", variants=1
        )
        program.call(conversion, "_to_copy", 8)
    return program


def test_a_conversion_that_another_takes_back_is_found_and_one_alone_is_not():
    only(converted(("float32", "bfloat16"), ("bfloat16", "float32")).found("layout"), 20)
    assert converted(("float32", "bfloat16"), ("int64", "float32")).found("layout") == []


def test_conversions_at_first_or_of_a_library_are_not_taken_back():
    program = converted(("float32", "bfloat16"))
    back = program.line(21)
    node = program.call(back, "to", 4, inputs="bfloat16[64,64] -> float32[64,64]", variants=1, count=1)
    program.call(node, "_to_copy", 8, count=1)
    assert program.found("layout") == []
    program = Program().model()
    for number in (20, 21):
        inside = program.library(program.line(number), "nn/functional.py", "attention")
        program.call(program.call(inside, "contiguous", 4), "clone", 8)
    assert program.found("layout") == []


@pytest.mark.parametrize(
    ("made", "found"), [("float32[8,16,32,32] channels_last", True), ("float32[8,16,32,32]", False)]
)
def test_a_layout_that_a_convolution_takes_back_is_converted_back_and_forth(made, found):
    program = Program().model()
    inside = program.library(program.line(20), "nn/functional.py", "conv2d")
    program.call(
        inside, "conv2d", 9, flops=10**9, inputs=f"float32[8,16,32,32], float32[16,16,3,3] -> {made}", variants=1
    )
    copy = program.call(
        program.line(22), "contiguous", 4, inputs="float32[8,16,32,32] channels_last -> float32[8,16,32,32]", variants=1
    )
    program.call(copy, "clone", 8)
    findings = program.found("layout")
    assert len(findings) == found
    if found:
        only(findings, 22)


@pytest.mark.parametrize("times", [1, 20])
def test_functions_of_jax_that_are_compiled_again_and_again_are_on_the_line_that_calls_them(times):
    program = Program().model()
    program.line(33, python=40)
    program.facts = Facts(
        waits={
            "jax trace: update": Events(times, 0.002, 0.001, f"{FILE}:33"),
            "jax compile: jit(update)": Events(times, 0.038, 0.02, f"{FILE}:33"),
        }
    )
    findings = program.found("retracing")
    assert len(findings) == (times > 1)
    if findings:
        assert "20 times, which takes 40 ms" in only(findings, 33).evidence


@pytest.mark.parametrize("times", [1, 20])
def test_tracing_again_and_again_is_found_and_tracing_once_is_not(times):
    program = Program().model()
    inner = program.library(program.line(33), "jit/_trace.py", "trace", python=40)
    program.call(inner, "add", 1, count=times)
    findings = program.found("retracing")
    assert len(findings) == (times > 1)
    if findings:
        assert "20 times" in only(findings, 33).evidence


def test_a_recompilation_says_why():
    program = Program().model()
    inner = program.library(program.line(33), "_dynamo/convert_frame.py", "_compile", python=40)
    program.call(inner, "add", 1, count=1)
    program.facts = Facts(waits={"recompile: size of x changed": Events(5, 0.04, 0.01, f"{FILE}:33")})
    assert "size of x changed" in only(program.found("retracing"), 33).evidence


def test_a_graph_break_is_on_the_line_that_breaks():
    program = Program().model()
    region = program.builder.node(program.line(33), NodeKind.OPERATOR, "Torch-Compiled Region: 0/0")
    program.builder.add(region, count=100, own=20 * MILLISECOND)
    program.line(52, "torch_dynamo_resume_in_forward_at_51", above=region, python=1)
    assert only(program.found("retracing"), 51).gain is None


def test_many_small_collectives_are_exposed_communication():
    program = Program().model()
    inner = program.library(program.line(44), "distributed/distributed_c10d.py", "all_reduce")
    node = program.builder.node(inner, NodeKind.OPERATOR, "c10d::allreduce_")
    program.builder.add(node, count=50 * program.steps, own=30 * MILLISECOND)
    assert "buckets" in only(program.found("communication"), 44).advice


OVERLAPPED = """
def work():
    pending = dist.irecv(total, 1)
    state = advance(state)
    pending.wait()
"""


@pytest.mark.parametrize(("meanwhile", "found"), [(20.0, False), (0.0, True)])
def test_a_wait_is_exposed_where_nothing_is_done_between_it_and_what_it_waits_for(meanwhile, found):
    program = Program().model(20)
    program.sources = {FILE: OVERLAPPED}
    received = program.library(program.line(3, "work"), "distributed/distributed_c10d.py", "irecv")
    operator = program.builder.node(received, NodeKind.OPERATOR, "c10d::recv_")
    program.builder.add(operator, count=100, own=MILLISECOND)
    program.line(4, "work", python=meanwhile)
    program.line(5, "work", python=60)
    findings = program.found("communication")
    assert len(findings) == found
    if found:
        assert only(findings, 5).gain is None
        assert findings[0].limit, "how much of it could be hidden is not known"
    assert all(finding.line != 5 for finding in program.found("hotspot"))


@pytest.mark.parametrize(("averaged", "found"), [(400, True), (100, False)])
def test_gradients_that_are_averaged_once_for_several_passes_are_no_finding(averaged, found):
    program = Program().model(20)
    backward = program.library(program.line(30), "autograd/graph.py", "_engine_run_backward", python=40)
    program.library(program.line(31), "nn/parallel/distributed.py", "DistributedDataParallel.forward")
    gradient = program.builder.node(backward, NodeKind.BACKWARD, "torch::autograd::AccumulateGrad")
    program.builder.add(gradient, count=400, own=MILLISECOND)
    reducer = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    program.builder.add(program.builder.node(backward, NodeKind.OPERATOR, reducer), count=averaged, own=MILLISECOND)
    assert len(program.found("communication")) == found


def test_findings_come_with_the_largest_gain_first():
    program = converted(("float32", "bfloat16"), ("bfloat16", "float32"))
    loader = program.library(program.line(15), "utils/data/dataloader.py", "_BaseDataLoaderIter.__next__")
    program.line(71, "Texts.__getitem__", above=loader, python=60)
    gains = [finding.gain[0] for finding in find(program.profile()) if finding.gain]
    assert len(gains) == 2
    assert gains == sorted(gains, reverse=True)


@given(
    elements=st.floats(300, 1e7),
    calls=st.lists(
        st.tuples(st.sampled_from(["aten::mul", "aten::tanh", "aten::unheard_of"]), st.integers(1, 5)), min_size=1
    ),
)
def test_the_elements_that_a_time_stands_for_are_found(elements, calls):
    measured = costs.total(calls, "forward", elements)
    found, slower = costs.elements_of(calls, measured)
    assert slower == 1
    assert costs.total(calls, "forward", found) == pytest.approx(measured, rel=1e-3)
