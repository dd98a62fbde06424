"""Analyses of wasted work find it in small trees, with the text of the program, on the line that does it."""

import platform
import threading
from dataclasses import replace

import pytest
import torch

from benchmarks.profile.calibration import LEAST, Error, calibrated
from shoestring.profile.analyses import gains
from shoestring.profile.analyses.reading import Reading
from shoestring.profile.happenings import StepClock, Surroundings
from shoestring.profile.recording import Facts, MemoryAt, WorkAt
from shoestring.profile.tree import NodeKind
from tests.profile.built_programs import BIG, FILE, MILLISECOND, Program, only

PREFIX = "import torch\nfrom torch import nn\n\n"


def program(text, steps=100):
    """A training loop with a text, whose lines are those of the function `train`."""
    built = Program(steps).model()
    built.sources = {FILE: PREFIX + text}
    built.call(built.line(98), "Optimizer.step#SGD.step", 1, kind=NodeKind.SPAN)
    return built


def at(text, part):
    """The number of the line that has this in it."""
    return next(number for number, line in enumerate((PREFIX + text).splitlines(), 1) if part in line)


# -- Python -----------------------------------------------------------------------------------------------------------

IN_PYTHON = """
def train(model, data):
    for batch in data:
        loss = model(batch)
        total = 0.0
        for value in values:
            total += value * value
"""


@pytest.mark.parametrize(
    ("text", "found"), [(IN_PYTHON, True), (IN_PYTHON.replace("value * value", "f(wait())"), False)]
)
def test_a_loop_that_computes_in_python_is_found_and_one_that_waits_is_not(text, found):
    text = text.replace("f(wait())", "queue.get(timeout)")
    built = program(text)
    built.line(at(text, "total +="), python=40)
    findings = built.found("python")
    assert len(findings) == found
    if found:
        least, most = only(findings, at(text, "total +=")).gain
        assert least < 40 / 91 < most


def test_a_line_of_the_training_loop_itself_does_not_compute_in_python():
    built = program(IN_PYTHON)
    for part in ("loss = model", "total = 0.0"):
        built.call(built.line(at(IN_PYTHON, part), python=30), "add", 1)
    assert built.found("python") == []


SMALL_OPERATORS = """
def train(model, data):
    for batch in data:
        found = []
        for row in batch:
            found.append((row * scale).sum())
"""


@pytest.mark.parametrize(
    ("body", "found"), [("found.append((row * scale).sum())", True), ("state = state * row", False)]
)
def test_small_operators_of_a_loop_are_found_unless_one_run_needs_the_one_before(body, found):
    text = SMALL_OPERATORS.replace("found.append((row * scale).sum())", body)
    built = program(text)
    line = built.line(at(text, body), python=20)
    for name in ("mul", "sum"):
        inputs = "float32[48], float32[48] -> float32[48]"
        built.call(line, name, 15, count=50 * built.steps, inputs=inputs, variants=1)
    findings = built.found("python")
    assert len(findings) == found
    if found:
        assert "50 times a step" in only(findings, at(text, body)).evidence


# -- JAX --------------------------------------------------------------------------------------------------------------

JAX = "/opt/lib/python3.11/site-packages/jax/_src"


@pytest.mark.parametrize("jitted", [False, True])
def test_operations_that_jax_starts_one_by_one_are_found_and_a_compiled_function_is_not(jitted):
    built = Program()
    line = built.line(30, "update")
    for name in ("add", "mul", "tanh"):
        built.builder.add(built.builder.node(line, NodeKind.OPERATOR, name), count=100, own=MILLISECOND)
        file = "pjit.py\t_python_pjit_helper" if jitted else f"numpy/ufuncs.py\t{name}"
        inner = built.builder.node(line, NodeKind.PYTHON, f"{JAX}/{file}", 5)
        built.builder.add(inner, own=20 * MILLISECOND)
    findings = built.found("unjitted")
    if jitted:
        assert findings == []
    else:
        assert "jax.jit" in only(findings, 30).advice


# -- copies -----------------------------------------------------------------------------------------------------------


def copied(pairs, count=100):
    built = Program().model(5)
    for number, (given, made) in enumerate(pairs, 20):
        inputs = f"float32[64,64]{given} -> float32[64,64]{made}"
        built.call(built.line(number), "_to_copy", 8, count=count, inputs=inputs, variants=1)
        built.builder.add(built.builder.node(built.line(number), NodeKind.OPERATOR, "aten::_to_copy"))
    return built.found("copies")


def test_a_tensor_that_goes_to_an_accelerator_and_back_is_found_and_a_batch_that_stays_is_not():
    assert "cuda to cpu" in only(copied([("", " cuda"), (" cuda", "")]), 20).evidence
    assert copied([("", " cuda")]) == []
    assert copied([("", ""), ("", "")]) == []


def test_copies_of_a_loop_are_found():
    built = program("def train(): pass\n")
    built.call(built.line(20), "to", 20, count=900, inputs="float32[8] -> float32[8] cuda", variants=1)
    to = built.builder.node(built.line(20), NodeKind.OPERATOR, "aten::to")
    built.call(to, "_to_copy", 1, count=900)
    assert "join the tensors" in only(built.found("copies"), 20).advice


THROUGH_LISTS = """
def train(scores):
    for step in range(100):
        numbers = scores.tolist()
        kept = torch.tensor(numbers)
"""


@pytest.mark.parametrize(("source", "found"), [("scores.tolist()", True), ("read_labels()", False)])
def test_a_tensor_made_of_a_list_that_was_a_tensor_is_found_and_one_of_a_list_is_not(source, found):
    text = THROUGH_LISTS.replace("scores.tolist()", source)
    built = program(text)
    line = built.line(at(text, "kept ="), python=20)
    built.call(line, "lift_fresh", 1)
    findings = built.found("copies")
    assert len(findings) == found
    if found:
        only(findings, at(text, "kept ="))


# -- recomputation ----------------------------------------------------------------------------------------------------

MASK = """
def train(model, x):
    for step in range(100):
        mask = torch.full((512, 512), -torch.inf).triu(1)
        loss = model(x + mask)
"""
LENGTHS = MASK.replace("(512, 512)", "(512 + step, 512)")
TWICE = """
def train(model, x):
    for step in range(100):
        y = model(x)
        accuracy = model(x).argmax(-1)
"""
CHANGED = TWICE.replace("        accuracy", "        optimizer.step()\n        accuracy")
OTHER = TWICE.replace("accuracy = model(x)", "accuracy = model(x + 1)")


@pytest.mark.parametrize(
    ("text", "part", "found"),
    [
        (MASK, "mask =", True),
        (LENGTHS, "mask =", False),
        (TWICE, "accuracy =", True),
        (CHANGED, "accuracy =", False),
        (OTHER, "accuracy =", False),
    ],
    ids=["mask", "mask-of-other-sizes", "twice", "changed-between", "of-another-input"],
)
def test_what_is_computed_again_is_found_unless_something_that_it_needs_changes(text, part, found):
    built = program(text)
    if part == "accuracy =":
        built.call(built.line(at(text, "y = model(x)")), "linear", 25, 25, flops=10**9)
    built.call(built.line(at(text, part)), "triu", 20, inputs=BIG, variants=1)
    findings = built.found("recomputation")
    assert len(findings) == found
    if found:
        only(findings, at(text, part))


def test_what_draws_random_numbers_is_not_the_same_again():
    built = program(TWICE)
    built.call(built.line(at(TWICE, "y = model(x)")), "linear", 25, 25)
    built.call(built.line(at(TWICE, "accuracy =")), "native_dropout", 20)
    assert built.found("recomputation") == []


# -- evaluation -------------------------------------------------------------------------------------------------------

EVALUATE = """
def evaluate(model, data):
    for x in data:
        y = model(x)

def train(model, data):
    for epoch in range(3):
        evaluate(model, data)
"""


@pytest.mark.parametrize("graphed", [100, 0])
def test_a_forward_pass_whose_gradients_nobody_computes_is_found_where_the_model_is_called(graphed):
    built = program(EVALUATE)
    above = built.line(at(EVALUATE, "evaluate(model, data)"))
    line = built.line(at(EVALUATE, "y = model(x)"), "evaluate", above=above)
    built.call(built.line(200, "Net.forward", above=line), "linear", 30, graphed=graphed)
    findings = built.found("evaluation")
    assert len(findings) == bool(graphed)
    if graphed:
        assert "inference_mode" in only(findings, at(EVALUATE, "y = model(x)")).advice


def test_a_forward_pass_with_a_backward_pass_is_no_evaluation():
    built = program(EVALUATE)
    built.call(built.line(at(EVALUATE, "y = model(x)"), "evaluate"), "linear", 30, 60, graphed=100)
    assert built.found("evaluation") == []


# -- threads ----------------------------------------------------------------------------------------------------------

THREADS = """
def train(model):
    torch.set_num_threads(16)
    torch.set_num_threads(before)
"""


@pytest.mark.parametrize(("threads", "found"), [(16, True), (4, False)])
def test_more_threads_than_cores_are_found_on_the_line_that_sets_them(threads, found):
    built = program(THREADS)
    built.facts = Facts(cores=4, threads=threads, seconds=1.0)
    findings = built.found("threads")
    assert len(findings) == found
    if found:
        assert "16 threads for an operator, on 4 cores" in only(findings, at(THREADS, "(16)")).evidence


# -- growth and drift -------------------------------------------------------------------------------------------------

KEPT = """
def train(model, data):
    losses = []
    for x in data:
        loss = model(x)
        losses.append(loss)
"""
KEPT_NUMBER = KEPT.replace("append(loss)", "append(loss.item())")
KEPT_INSIDE = KEPT.replace("    losses = []\n", "").replace("        loss = ", "        losses = []\n        loss = ")


def rising(mebibytes):
    return [MemoryAt(0.1 * number, 100 + (round(mebibytes * number / 40) << 20)) for number in range(41)]


@pytest.mark.parametrize(
    ("text", "grown", "found"),
    [(KEPT, 200, True), (KEPT, 8, False), (KEPT_NUMBER, 200, False), (KEPT_INSIDE, 200, False)],
    ids=["kept", "little", "numbers", "of-one-step"],
)
def test_what_keeps_the_tensors_of_every_step_is_found(text, grown, found):
    built = program(text)
    built.line(at(text, "loss = "), python=1)
    built.facts = Facts(memory=rising(grown))
    findings = built.found("growth")
    assert len(findings) == found
    if found:
        assert only(findings, at(text, "losses.append")).gain is None


def test_memory_that_settles_is_no_growth():
    built = program(KEPT)
    built.line(at(KEPT, "loss = "), python=1)
    settled = [replace(each, allocated=min(each.allocated, 100 << 20)) for each in rising(200)]
    built.facts = Facts(memory=settled)
    assert built.found("growth") == []


def work(slope):
    return [WorkAt(4 * n, 0.001 * (4 * n + slope * (4 * n) ** 2 / 2)) for n in range(26)]


@pytest.mark.parametrize(
    ("slope", "variants", "found"),
    [(0.02, 8, True), (0.0, 8, False), (0.02, 1, False)],
    ids=["drifts", "steady", "alike"],
)
def test_steps_that_take_longer_are_found_on_the_line_whose_inputs_grow(slope, variants, found):
    built = program("def train(): pass\n")
    built.facts = Facts(work=work(slope), seconds=0.2)
    node = built.call(built.line(20), "cat", 60, inputs=BIG, variants=variants)
    built.builder.numbers[node]["least"] = 5000
    findings = built.found("drift")
    assert len(findings) == found
    if found:
        assert "first quarter of 100 steps" in only(findings, 20).evidence


def test_a_gain_is_told_where_its_interval_says_enough_and_gives_its_estimate_back():
    narrow, wide = gains.gain("fusible", 0.2), gains.gain("fusible", 0.2, 0.05)
    assert wide.least < narrow.least < narrow.expected < narrow.most < wide.most
    assert narrow.figure == (narrow.least, narrow.most)
    assert wide.figure is None
    assert replace(narrow, told=False).figure is None
    for gain in (narrow, wide):
        assert gains.estimate("fusible", gain.expected) == pytest.approx(gains.log_odds(0.2))
    assert gains.gain("fusible", 0.0).figure is None
    assert gains.gain("fusible", 2.0).most < 1


def test_calibration_draws_the_errors_of_few_programs_to_those_of_all():
    alike = [Error("fusible", error) for error in (0.1, 0.12, 0.08)]
    assert calibrated(alike)[""] == (pytest.approx(0.1), LEAST), "errors that are all alike"
    table = calibrated([*alike, Error("layout", 0.5)])
    assert table[""][0] < table["layout"][0] < 0.5
    assert LEAST < table["fusible"][1] < table[""][1] < table["layout"][1] < 0.4
    outlier = calibrated([*alike * 7, Error("layout", 50.0)])
    assert outlier[""][1] == LEAST, "one of many that is far off makes no other interval wider"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not count what is allocated")
def test_memory_is_what_is_allocated_and_kept_in_few_entries():
    surroundings = Surroundings(StepClock(), threading.get_ident())
    surroundings.look(0.0)
    kept = torch.ones(1 << 21)
    surroundings.look(1.0)
    before, after = surroundings.memory
    assert after.allocated - before.allocated == pytest.approx(kept.nbytes, rel=0.05)
    for number in range(2, 600):
        surroundings.look(float(number))
    assert len(surroundings.memory) < 64
    assert surroundings.memory[-1].seconds > 580
    assert [each.processor for each in surroundings.work] == sorted(each.processor for each in surroundings.work)
    assert surroundings.clock.resident > kept.nbytes
    assert surroundings.threads == torch.get_num_threads()


def test_times_of_many_seconds_do_not_make_an_interval_wider():
    built = Program()
    node = built.call(built.line(20), "sort", 9000, count=1)
    built.builder.numbers[node]["squares"] = (9000.0 * MILLISECOND) ** 2
    built.call(built.line(21), "sort", 9000, count=1)
    gain = Reading(built.profile()).gain("layout", 9e9, [node])
    assert 0.4 < gain.least < 0.5 < gain.most < 0.6
