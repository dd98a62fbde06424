"""Models that were taught to call tools by `shoestring train finetune`: clients run their examples with them."""

import shutil

import pytest

from benchmarks.serving.clients import EXAMPLES
from benchmarks.serving.taught import TEMPLATES, data, teach, teach_to_repeat
from benchmarks.serving.tools import JAVASCRIPT, SCRIPT, client_of, in_javascript, judge

pytest.importorskip("openai")
pytest.importorskip("agents")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.all_cases]  # teaching takes minutes

SHORT = {"examples": 1500, "epochs": 0, "steps": 500}
"""Settings of trainings that are shorter than the benchmark's."""
FIRST, *OTHERS = TEMPLATES


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    return teach_to_repeat(tmp_path_factory.mktemp("repeating"), **SHORT)


# Each form takes minutes to teach.
@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(form, marks=pytest.mark.all_cases) for form in OTHERS)])
def client(request, repeating, tmp_path_factory):
    with client_of(teach(request.param, repeating, tmp_path_factory.mktemp(request.param), **SHORT)) as connected:
        yield connected


def test_examples_in_python_call_tools_and_all_end_alike(client):
    """How often a taught model is right, the benchmark measures."""
    outcomes = [run(client) for run in EXAMPLES.values()]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0].calls and outcomes[0].answer


@pytest.mark.skipif(
    shutil.which("node") is None or not (SCRIPT.parent / "node_modules").exists(),
    reason="npm did not install the client",
)
@pytest.mark.parametrize("example", JAVASCRIPT)
def test_examples_in_javascript_end_with_an_answer(client, example):
    assert in_javascript(client, example)["answer"]


def test_calls_are_right_in_conversations_that_were_held_out_and_streams_are_the_same(client):
    model = client.models.list().data[0].id
    judged = [judge(client, model, one) for one in data()[1][:40]]
    assert sum(one.right_calls for one in judged) > 0
    assert sum(one.differ for one in judged) == 0
