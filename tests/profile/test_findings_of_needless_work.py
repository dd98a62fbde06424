"""Analyses find products of zeros, formulas, conversions, updates and waits that are not needed, and none that are."""

import pytest
import torch

from shoestring.profile import profiled
from shoestring.profile.analyses import costs
from shoestring.profile.recording import Facts
from shoestring.profile.tree import ENGINE, NodeKind
from tests.profile.built_programs import BIG, FILE, MILLISECOND, Program, only

# -- products ---------------------------------------------------------------------------------------------------------


def product(zeros="", gradient_zeros="", consumer=("cross_entropy_loss", "float32[768,600], int64[768] -> float32[]")):
    program = Program().model(20)
    call = program.call(program.line(20), "matmul", 20, flops=10**9)
    shapes = "float32[768,1500], float32[1500,600] -> float32[768,600]"
    program.builder.add(call, inputs=shapes, variants=1)
    program.builder.add(program.builder.node(call, NodeKind.OPERATOR, "aten::mm"), inputs=shapes + zeros, variants=1)
    engine = program.builder.node(program.line(99), NodeKind.OPERATOR, f"{ENGINE}MmBackward0")
    function = program.builder.node(program.builder.node(engine, NodeKind.LINK, "", 0, call), NodeKind.BACKWARD, "Mm")
    program.builder.add(function, count=100, own=40 * MILLISECOND)
    gradient = program.builder.node(function, NodeKind.OPERATOR, "aten::mm")
    program.builder.add(gradient, inputs=shapes + gradient_zeros, variants=1)
    name, inputs = consumer
    program.call(program.line(21), name, 5, inputs=inputs, variants=1)
    return program.found("hotspot")


def zeros(elements, lines):
    return f"; argument 1 is {elements}% zeros, as are {lines}% of its rows or columns"


def test_a_product_with_a_factor_of_zeros_is_found_and_one_of_a_relu_is_not():
    assert "99.99% of one factor" in only(product(zeros(99.99, 40)), 20).advice
    assert product(zeros(62, 0)) == []


def test_a_product_is_found_whose_rows_the_loss_leaves_out():
    assert "85% of its rows" in only(product("", zeros(85, 85)), 20).advice
    assert product("", zeros(30, 30)) == []
    everything = ("add", "float32[768,600], float32[768,600] -> float32[768,600]")
    assert product("", zeros(85, 85), everything) == [], "what computes with all rows may have no gradient for most"


@pytest.mark.parametrize(("name", "found"), [("select", True), ("gelu", False)])
def test_a_product_without_gradients_is_found_of_which_only_a_part_is_taken(name, found):
    program = Program().model(20)
    inputs = "float32[8,64,32], float32[32,500] -> float32[8,64,500]"
    program.call(program.line(20), "matmul", 60, flops=10**9, inputs=inputs, variants=1)
    size = "8,500" if name == "select" else "8,64,500"
    program.call(program.line(21), name, 1, inputs=f"float32[8,64,500] -> float32[{size}]", variants=1)
    assert [finding.line for finding in program.found("hotspot")] == [20] * found


def test_zeros_of_factors_are_sampled_and_those_of_a_state_that_is_zero_at_first_are_not():
    words, table, weight = torch.arange(256), torch.randn(500, 64), torch.zeros(64, 256)
    with profiled() as result:
        for _ in range(3):
            chosen = torch.nn.functional.one_hot(words, 500).float() @ table
            chosen @ weight
            weight += 1
            (chosen @ chosen.mT).relu() @ chosen
    tree = result.profile.tree
    texts = [tree.names[tree.inputs[n]] for n in range(len(tree)) if tree.names[tree.name[n]] == "aten::mm"]
    sampled = [text for text in texts if "zeros" in text]
    assert [text.partition(" is ")[0] for text in sampled] == [
        "float32[256,500], float32[500,64] -> float32[256,64]; argument 1"
    ]
    assert "99.8% zeros" in sampled[0]


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_a_formula_is_fusible_in_time_and_only_with_the_operators_that_are_part_of_it():
    program = Program().model(20)
    program.write(19, "def weigh(x):\n    return (x * (x.pow(2).mean(-1) + 1e-6).rsqrt()).cumsum(0)\n")
    for name, time in (("pow", 12), ("mean", 12), ("add", 12), ("rsqrt", 12), ("mul", 12), ("cumsum", 30)):
        program.call(program.line(20, "weigh"), name, time, 6, inputs=BIG, variants=1)
    finding = only(program.found("fusible"), 20)
    assert "F.rms_norm" in finding.advice
    assert "cumsum" not in finding.evidence
    assert 0 < finding.expected < 90 / 146


def test_operators_that_compute_the_same_cost_the_same():
    for name, other in (("clamp_min", "clamp"), ("log_sigmoid", "softplus")):
        assert costs.nanoseconds(f"aten::{name}", "forward", 5e5) == costs.nanoseconds(f"aten::{other}", "forward", 5e5)


@pytest.mark.parametrize(("over", "found"), [("self.model.named_parameters()", True), ("self.texts.items()", False)])
def test_a_loop_that_computes_something_new_for_each_parameter_is_found(over, found):
    program = Program().model()
    text = f"for name, value in {over}:\n    self.mean[name] = 0.9 * self.mean[name] + 0.1 * value\n"
    program.sources = {FILE: text}
    for name in ("mul", "add"):
        count = 60 * program.steps
        program.call(program.line(2), name, 10, count=count, inputs="float32[64] -> float32[64]", variants=1)
    findings = program.found("optimizer")
    assert len(findings) == found
    if found:
        only(findings, 2)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "advice"), [(" channels_last", "contiguous()"), ("", "autograd.Function")])
def test_a_gradient_in_another_layout_is_said_to_be_in_one(layout, advice):
    program, shape = Program().model(), "float32[8,16,64,64]"
    program.call(program.line(20), "relu", 1, 90, inputs=f"{shape} -> {shape}", variants=1, gradient="threshold")
    (gradient,) = [each for each, row in enumerate(program.builder.rows) if row[1] == NodeKind.OPERATOR and each > 1][
        -1:
    ]
    program.builder.add(gradient, inputs=f"{shape}{layout}, {shape} -> {shape}", variants=1)
    assert advice in only(program.found("imbalance"), 20).advice


def test_rows_that_attention_needs_are_used():
    program = Program().model(20)
    shapes = "float32[8,96,64], float32[192,64], float32[64,64] -> float32[8,96,64]"
    program.call(program.line(20), "_native_multi_head_attention", 60, flops=10**9, inputs=shapes, variants=1)
    program.call(program.line(21), "select", 1, inputs="float32[8,96,64] -> float32[8,64]", variants=1)
    assert program.found("hotspot") == []


# -- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"), [("(x.double() + y.double()).float()", True), ("x.double() + y.double()", False)]
)
def test_a_line_that_converts_both_ways_is_found(line, found):
    program = Program().model()
    program.sources = {FILE: f"def add(x, y):\n    return {line}\n"}
    inputs = "float32[512,256] -> float64[512,256]"
    node = program.call(program.line(2), "to", 1, count=300, inputs=inputs, variants=2)
    program.call(node, "_to_copy", 15, count=300)
    assert [finding.line for finding in program.found("layout")] == [2] * found


@pytest.mark.parametrize(
    ("mixed", "back", "found"),
    [
        ("float64[8,1,1,1], float32[8,3,48,48]", 100, True),
        ("float64[8,3,48,48], float64[8,3,48,48]", 100, False),
        ("float64[8,1,1,1], float32[8,3,48,48]", 1, False),
    ],
    ids=["mixed", "all in double", "taken back once"],
)
def test_single_precision_that_becomes_double_on_the_way_is_found(mixed, back, found):
    program = Program().model()
    for number, given in ((20, mixed), (21, "float64[8,3,48,48], float64[8,3,48,48]")):
        program.call(program.line(number), "mul", 15, inputs=f"{given} -> float64[8,3,48,48]", variants=1)
    inputs = "float64[8,3,48,48] -> float32[8,3,48,48]"
    program.call(program.call(program.line(25), "to", 1, count=back, inputs=inputs, variants=1), "_to_copy", 4)
    findings = program.found("layout")
    assert len(findings) == found
    if found:
        assert "line 25 converts back" in only(findings, 20).evidence


@pytest.mark.parametrize(("elements", "found"), [("600,600", True), ("300,300", False)])
def test_a_sparse_tensor_that_becomes_dense_and_sparse_again_is_found(elements, found):
    program = Program().model()
    sparse = "float32[600,600] not strided"
    program.call(program.line(20), "to_dense", 5, inputs=f"{sparse} -> float32[600,600]", variants=1)
    made = f"float32[{elements}] -> float32[{elements}] not strided"
    program.call(program.line(21), "to_sparse", 30, inputs=made, variants=1)
    findings = program.found("layout")
    assert len(findings) == found
    if found:
        only(findings, 21)


@pytest.mark.parametrize(("graphed", "found"), [(100, True), (0, False)])
def test_the_gradient_of_another_layout_is_copied_too(graphed, found):
    program = Program().model(92)
    for number in (20, 22):
        node = program.call(program.line(number), "contiguous", 0.1, graphed=graphed)
        program.call(node, "clone", 2.1)
    assert bool(program.found("layout")) == found


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizers", "found"), [(10, True), (1, False)])
def test_many_optimizers_of_few_parameters_are_one_that_updates_each_by_itself(optimizers, found):
    program = Program().model()
    program.facts = Facts(steps=program.steps)
    count = optimizers * program.steps
    span = program.call(program.line(30), "Optimizer.step#Adam.step", 20, count=count, kind=NodeKind.SPAN)
    inner = program.library(span, "optim/adam.py", "_adam")
    for name in ("mul_", "add_", "sqrt", "addcdiv_"):
        program.call(inner, name, 4, count=4 * count, inputs="float32[64] -> float32[64]", variants=1)
    findings = program.found("optimizer")
    assert len(findings) == found
    if found:
        assert "a group of parameters for each rate" in only(findings, 30).advice


def test_an_optimizer_of_ones_own_is_a_loop_whatever_it_is_called():
    program = Program().model()
    span = program.call(program.line(98), "Optimizer.step#Adagrad.step", 1, kind=NodeKind.SPAN)
    line = program.line(40, "Adagrad.step", above=span)
    for name in ("pow", "add", "sqrt", "div", "sub_"):
        count = 30 * program.steps
        program.call(line, name, 8, count=count, inputs="float32[64] -> float32[64]", variants=1, bytes=512 * count)
    only(program.found("optimizer"), 40)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copies", "found"), [(128, True), (1, False)])
def test_few_elements_taken_out_of_an_expanded_tensor_are_found(copies, found):
    program = Program().model()
    small, large = "float32[8,1,128,32]", f"float32[8,{copies},128,32]"
    program.call(program.line(19), "expand", 0.1, 8, inputs=f"{small} -> {large} strided", variants=1)
    inputs = f"{large} strided, int64[8,12,32] -> float32[8,12,32]"
    program.call(program.line(20), "gather", 10, 12, inputs=inputs, variants=1)
    findings = program.found("imbalance")
    assert [finding.line for finding in findings] == [20] * found


# -- compiling and waiting --------------------------------------------------------------------------------------------

COMPILES = """
def flow(steps):
    for number in range(steps):
        advance = torch.compile(make(number))
        points = advance(points)
"""


@pytest.mark.parametrize("within", [True, False])
def test_what_is_compiled_in_each_run_of_a_loop_is_found_though_its_code_is_kept(within):
    program = Program().model()
    text = COMPILES if within else COMPILES.replace("points = advance", "points = other")
    program.sources = {FILE: text}
    line = program.line(5, "flow")
    region = program.builder.node(line, NodeKind.OPERATOR, "Torch-Compiled Region: 0/0")
    program.builder.add(region, count=100, own=20 * MILLISECOND)
    program.library(line, "_dynamo/convert_frame.py", "_compile", python=40)
    assert [finding.line for finding in program.found("retracing")] == [5] * within


def collective(program, number, name, milliseconds, elements=1):
    inner = program.library(program.line(number), "distributed/distributed_c10d.py", name)
    node = program.builder.node(inner, NodeKind.OPERATOR, f"c10d::{name}_")
    size = "" if elements == 1 else elements
    program.builder.add(node, count=100, own=milliseconds * MILLISECOND, inputs=f"float32[{size}]", variants=1)


@pytest.mark.parametrize(("elements", "lines"), [(1, [40]), (1_000_000, [])])
def test_two_collectives_of_single_numbers_are_two_latencies_of_which_one_can_be_spared(elements, lines):
    program = Program().model()
    for number, name in ((40, "reduce"), (41, "broadcast")):
        collective(program, number, name, 12, elements)
    assert [finding.line for finding in program.found("communication")] == lines


FETCHED = """
def fetch():
    work = dist.batch_isend_irecv(operations)
    return work

def advance():
    coming = fetch()
    coming.wait()
"""


def test_a_wait_right_after_another_function_began_is_found_on_its_line_and_the_begin_is_not():
    program = Program().model(20)
    program.sources = {FILE: FETCHED}
    line = program.line(3, "fetch", above=program.line(7, "advance"))
    begins = program.library(line, "distributed/distributed_c10d.py", "batch_isend_irecv")
    for name in ("send", "recv_"):
        node = program.builder.node(begins, NodeKind.OPERATOR, f"c10d::{name}")
        program.builder.add(node, count=100, own=3 * MILLISECOND)
    program.line(8, "advance", python=20)
    assert only(program.found("communication"), 8).limit


@pytest.mark.parametrize("communicates", [True, False])
def test_what_another_rank_makes_is_not_waited_for_as_a_batch(communicates):
    program = Program().model()
    program.sources = {
        FILE: "\n" * 14 + "for weight in layers(store): use(weight)\n\ndef layers(store):\n    yield store\n"
    }
    inner = program.line(80, "layers", above=program.line(15), python=30)
    if communicates:
        program.builder.add(program.builder.node(inner, NodeKind.OPERATOR, "c10d::recv_"), count=10)
    assert [finding.line for finding in program.found("loading")] == [15] * (not communicates)
