"""JAX programs: compiled operations are on the lines they were traced from, below the place of each call."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoestring.cli import main
from shoestring.profile import load, profiled
from shoestring.profile.comparison import merged
from shoestring.profile.jax_calls import Compilations
from shoestring.profile.jax_collector import JaxCollector
from shoestring.profile.jax_programs import parse_program
from shoestring.profile.jax_windows import Dispatch, Executed, Window
from shoestring.profile.lines import by_line
from shoestring.profile.tree import NodeKind
from tests.waiting import until

MODULE = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/home/me/model.py"

FunctionNames
1 "<module>"
2 "build.<locals>.step"
3 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=50 end_line=50 column=4 end_column=10}
2 {file_name_id=1 function_name_id=2 line=20 end_line=20 column=4 end_column=10}
3 {file_name_id=2 function_name_id=3 line=7 end_line=7 column=4 end_column=10}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


%fused_computation (param_0: f32[8], param_1: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  %param_1 = f32[8]{0} parameter(1)
  %back.1 = f32[8]{0} negate(%param_1), metadata={op_name="jit(step)/transpose(jvp())/conv" stack_frame_id=3}
  ROOT %tanh.1 = f32[8]{0} tanh(%param_0), metadata={op_name="jit(step)/jvp()/tanh" stack_frame_id=2}
}

ENTRY %main.9 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="x"}
  %dot.2 = f32[8]{0} dot(%x.1, %x.1), metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=3}
  %sub.3 = f32[8]{0} subtract(%x.1, %dot.2), metadata={op_name="jit(step)/sub" stack_frame_id=2}
  %elsewhere = f32[8]{0} add(%x.1, %sub.3), metadata={op_name="jit(step)/jit(other)/add" stack_frame_id=1}
  %convolution.4 = f32[8]{0} convolution(%x.1, %x.1), dim_labels=b01f_01io->b01f
  %copy.5 = f32[8]{0} copy(%convolution.4)
  ROOT %wrapped_tanh = f32[8]{0} fusion(%sub.3, %copy.5), kind=kLoop, calls=%fused_computation
}
"""


def test_a_module_tells_the_lines_of_its_instructions_from_the_jitted_function_on():
    program = parse_program(MODULE)
    assert program.name == "jit_step"
    fused, product = program.operations["wrapped_tanh"], program.operations["dot.2"]
    assert product.frames[product.inside :] == (
        ("/home/me/train.py\tbuild.<locals>.step", 20),
        ("/home/me/model.py\tloss", 7),
    )
    assert (fused.name, fused.backward) == ("tanh", False)
    assert (product.name, product.backward) == ("dot_general", True)
    subtraction = program.operations["sub.3"]
    assert (subtraction.name, len(subtraction.frames), subtraction.inside) == ("sub", 2, 1)
    assert program.operations["elsewhere"].inside == -1, "step is not among the frames of who traced this first"
    assert fused.frames == subtraction.frames


def test_what_xla_adds_has_the_lines_of_what_uses_it():
    program = parse_program(MODULE)
    product, convolution, copy = (program.operations[name] for name in ("dot.2", "convolution.4", "copy.5"))
    assert convolution.frames == copy.frames == product.frames
    assert (convolution.name, convolution.backward) == ("convolution", True)
    assert copy.name == "copy"
    assert parse_program("HloModule empty\n").operations == {}


def test_of_a_module_only_the_computations_are_read_that_have_instructions_that_ran():
    everything, ran = parse_program(MODULE), parse_program(MODULE, ["dot.2"])
    assert set(everything.operations) - set(ran.operations) == {"back.1", "tanh.1"}
    assert ran.operations.items() <= everything.operations.items()
    assert "x.1" in parse_program(MODULE, ["x.1"]).operations, "a parameter does not run, but this one was seen"
    assert parse_program(MODULE, ["of_another_module"]).operations == {}


def test_recording_waits_until_what_it_took_is_within_the_budget():
    collector = JaxCollector(budget=0.1)
    collector.first = time.perf_counter() - 100
    assert collector._affordable(here=0.9, everywhere=10.0)
    assert not collector._affordable(here=1.1, everywhere=10.0), "of the processor time that the program itself took"
    assert not collector._affordable(here=11.0, everywhere=1000.0), "many threads do not make more time"
    collector.learning = 0.3
    assert collector._affordable(here=1.1, everywhere=10.0), "reading what was compiled is done once"
    collector.operations = 200_000
    assert not collector._affordable(here=1.1, everywhere=10.0), "the program takes time for each event, too"


def executed(run, start, module="jit_f"):
    return Executed(start, 5.0, 5.0, "dot", module, program=len(module), run=run, device=False)


def test_runs_are_matched_to_the_calls_that_started_them_though_some_were_called_before_the_window():
    calls = [Dispatch(10.0 * n + 10, "f" if n % 3 else "g<h>", site=n) for n in range(9)]
    before = [executed(98, 1.0), executed(99, 12.0), executed(49, 2.0, "jit_g_h_")]
    runs = [executed(100 + n, 10.0 * n + 14, "jit_f" if n % 3 else "jit_g_h_") for n in range(7)]  # two come later
    window = Window([*before, *runs], calls)
    usual = {}
    sites = window.sites(usual)
    assert {each.run: sites[each.program, each.run] for each in runs} == {100 + n: n for n in range(7)}
    assert set(Window(runs, []).sites({}).values()) == {-1}
    assert set(Window(runs[1:2], []).sites(usual).values()) <= {1, 2, 4, 5, 7, 8}, "as it was called before"


PROGRAM = """
import jax
import jax.numpy as jnp

def layer(w, x):
    hidden = jnp.tanh(x @ w)
    return hidden @ w

def loss(w, x):
    return jnp.mean(layer(w, x) ** 2)

@jax.jit
def gradient(w, x):
    return jax.grad(loss)(w, x)

def once(w, x):
    return gradient(w, x)  # once

def thrice(w, x):
    for _ in range(3):
        w = w - 0.1 * gradient(w, x)  # thrice
    return w

def run(steps):
    w, x = jnp.ones((160, 160)) / 160, jnp.ones((320, 160))
    for _ in range(steps):
        w = thrice(w - 0.1 * once(w, x), x)
    return float(w.sum())

if __name__ == "__main__":
    run(300)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    pytest.importorskip("jax")
    path = tmp_path_factory.mktemp("program") / "jax_program.py"
    path.write_text(PROGRAM)
    space = {"__name__": "jax_program"}
    exec(compile(PROGRAM, str(path), "exec"), space)
    return path, space


def line_of(text):
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if text in line)


def below(tree, node, wanted):
    while node > 0 and not wanted(node):
        node = tree.parent[node]
    return node > 0


def compiled(tree):
    return [
        node
        for node in range(len(tree))
        if tree.kind[node] in (NodeKind.OPERATOR, NodeKind.BACKWARD) and not tree.names[tree.name[node]].count("::")
    ]


@pytest.mark.slow
def test_two_calls_of_one_jitted_function_are_told_apart_and_nearly_all_of_its_time_has_a_line(program):
    path, space = program
    space["run"](5)
    with profiled() as result:
        began = time.perf_counter()
        while time.perf_counter() - began < 3:
            space["run"](20)
    tree = result.profile.tree
    nodes = compiled(tree)
    total = sum(int(tree.own[node]) for node in nodes)
    assert total > 0.2e9

    def calls_below(line):
        wanted = lambda node: tree.kind[node] == NodeKind.PYTHON and tree.place(node) == (str(path), line)  # noqa: E731
        products = [node for node in nodes if "dot_general" in tree.names[tree.name[node]]]
        return sum(int(tree.count[node]) for node in products if below(tree, node, wanted))

    apart = calls_below(line_of("# thrice")) / calls_below(line_of("# once"))
    assert 2.4 < apart < 3.75, apart
    lines = by_line(tree)
    product, hidden = lines[str(path), line_of("return hidden @ w")], lines[str(path), line_of("hidden = jnp")]
    assert product.forward > 0 < product.backward
    assert hidden.forward > 0 < hidden.backward
    inside = [line for (file, _), line in lines.items() if file == str(path)]
    assert sum(line.forward + line.backward for line in inside) > 0.95 * total
    assert product.total + hidden.total > 0.6 * total
    links = [node for node in range(len(tree)) if tree.kind[node] == NodeKind.LINK and tree.link[node] >= 0]
    assert {tree.names[tree.name[tree.link[node]]] for node in links} >= {"dot_general"}


@pytest.mark.slow
def test_functions_of_one_name_are_told_apart():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    collector = JaxCollector(budget=1.0)
    first = jax.jit(lambda x: jnp.tanh(x) + 1)  # first
    second = jax.jit(lambda x: jnp.tanh(x) + 2)  # second
    x = jnp.ones(100_000)
    collector.start()
    until(lambda: (first(x), second(x)) and collector.windows >= 3)
    collector.finish()
    assert collector.failure == ""
    own = Path(__file__).read_text().splitlines()
    places = {place for _, operation, _ in collector.totals for place in operation.frames}
    lines = {own[line - 1].rpartition("# ")[2] for name, line in places if name.startswith(f"{__file__}\t")}
    assert {"first", "second"} <= lines


@pytest.mark.slow
def test_memory_is_bounded_and_jitted_functions_are_called_as_before(program):
    import jax

    kind = type(jax.jit(len))
    before = kind.__flags__, kind.__call__
    rows = []
    for seconds in (1.0, 3.0):
        collector, began = JaxCollector(budget=1.0), time.perf_counter()
        collector.start()
        while time.perf_counter() - began < seconds:
            program[1]["run"](20)
        collector.finish()
        assert collector.failure == ""
        assert collector.windows > 1
        rows.append((len(collector.totals), len(collector.sites.paths), len(collector.programs.known)))
    assert (kind.__flags__, kind.__call__) == before
    assert all(later <= earlier + 3 for earlier, later in zip(*rows, strict=True)), rows


def listened_to_compilations():
    """Return once the collector's thread hears of compilations."""
    from jax._src.monitoring import get_event_duration_listeners as listeners

    until(lambda: any(isinstance(getattr(each, "__self__", None), Compilations) for each in listeners()))


@pytest.mark.slow
def test_compilations_are_counted_where_they_happen(program):
    import jax
    import jax.numpy as jnp

    @jax.jit
    def often_traced(x):
        return jnp.sin(x).sum()

    with profiled() as result:
        listened_to_compilations()
        for size in range(3, 8):
            often_traced(jnp.ones(size))
    traced = result.profile.facts.waits["jax trace: often_traced"]
    assert traced.count == 5
    assert traced.where.startswith(__file__)
    assert result.profile.facts.versions["jax"] == jax.__version__


@pytest.mark.slow
def test_a_program_may_use_the_profiler_of_jax_itself(program, tmp_path):
    import jax

    with profiled() as result:
        began = time.perf_counter()
        while time.perf_counter() - began < 1:
            program[1]["run"](10)
        for name in ("one", "two"):
            with jax.profiler.trace(str(tmp_path / name)):
                program[1]["run"](10)
        while time.perf_counter() - began < 3:
            program[1]["run"](10)
    for name in ("one", "two"):
        (trace,) = (tmp_path / name).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        assert any(
            event.name.startswith("PjitFunction") for plane in planes for line in plane.lines for event in line.events
        )
    assert compiled(result.profile.tree)


@pytest.mark.slow
def test_the_command_profiles_a_program_that_imports_jax(program, tmp_path, capsys):
    assert main(["profile", "--out", str(tmp_path / "it.npz"), str(program[0])]) == 0
    out = capsys.readouterr().out
    assert "hidden @ w" in out
    lines = by_line(load(tmp_path / "it.npz").tree)
    assert lines[str(program[0]), line_of("return hidden @ w")].backward > 0
    profile = load(tmp_path / "it.npz")
    assert 0 < profile.facts.beside < profile.facts.processor  # what its windows took is said, though no line has it
    assert merged([profile, profile]).facts.beside == 2 * profile.facts.beside


@pytest.mark.slow
def test_jax_is_not_imported_for_a_program_that_does_not():
    code = "import sys; from shoestring.profile import profiled\nwith profiled(): pass\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
