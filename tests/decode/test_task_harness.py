"""lm-evaluation-harness on our models: the numbers of its own `hf` model, from a folder as from the server."""

import json
import random

import pytest
import torch

from benchmarks.models import zoo
from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.saving import save_model
from shoestring.verbs.evaluate import evaluate
from shoestring.verbs.generate import open_described
from shoestring.verbs.settings import TaskEvaluation
from tests.decode import small_server
from tests.rigs.foreign_tokenizers import random_text, tokenizer_of
from tests.rigs.small_tasks import DOCUMENTS, write_tasks

pytestmark = pytest.mark.slow  # lm_eval and transformers are imported
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("transformers")

CONTEXT = 64


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def saved(folder, tokenizer, context=CONTEXT):
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=tokenizer.vocab_size, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, context=context, init_std=0.3
    )
    save_model(GPT(config), tokenizer, folder, {"model": "", "arguments": {}, "offered": {"context": context}})
    return folder


def both(folder, batch=3, **options):
    """The model of a folder as we open it and as `hf` does, in double precision."""
    from lm_eval.models.huggingface import HFLM

    from shoestring.decode.harness.model import HarnessModel

    model, tokenizer, description = open_described(folder)
    theirs = HFLM(pretrained=str(folder).removeprefix("hf:"), dtype="float64", device="cpu", batch_size=1, **options)
    theirs.model.set_experts_implementation("eager")  # torch's grouped matrix products do not support float64
    return HarnessModel(model.double(), tokenizer, description.ends, batch=batch), theirs


def close(ours, theirs):
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-6, abs=1e-5)


TOKENIZERS = [
    ("byte-level", False),
    ("byte-fallback, space before", True),
    ("byte-fallback", True),
    ("Unigram, byte-fallback", False),
]


@pytest.mark.parametrize(("kind", "begins"), TOKENIZERS)
def test_texts_score_as_in_hf_with_any_tokenizer(kind, begins, tmp_path):
    tokenizer, chance = tokenizer_of(kind, begins), random.Random(1)
    ours, theirs = both(saved(tmp_path / "model", tokenizer))
    pairs = [(random_text(chance, 200), random_text(chance, 60)) for _ in range(40)]
    pairs += [("the cat ", "sat"), ("<s>the cat", " sat"), ("", " the cat sat"), ("the cat " * 40, "sat")]
    pairs = [pair for pair in pairs if (pair[0].strip() or not pair[0]) and scored_by_hf(theirs, *pair)]
    assert len(pairs) > 20
    # Asked together, `hf` takes two pairs of equal tokens with unlike borders for one, and scores one of them wrongly.
    wanted = [theirs.loglikelihood(requests("loglikelihood", pair))[0] for pair in pairs]
    close(ours.loglikelihood(requests("loglikelihood", *pairs)), wanted)


def scored_by_hf(theirs, context, continuation):
    """Whether `hf` can score a pair: it refuses continuations without tokens of their own or beyond the context."""
    tokens = theirs._encode_pair(context, continuation)[1] if context else theirs.tok_encode(continuation)
    return 1 < len(tokens) <= CONTEXT


@pytest.mark.parametrize(("kind", "begins"), TOKENIZERS[:2])
def test_whole_texts_score_as_in_hf_where_it_does_not_score_the_begin_token(kind, begins, tmp_path):
    tokenizer = tokenizer_of(kind, begins)
    ours, theirs = both(saved(tmp_path / "model", tokenizer), add_bos_token=False)
    texts = [("the cat sat on the mat",), ("größer 漢字 " * 30,), ("the dog ran. " * 25,)]
    values = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *texts))
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", *texts)) == pytest.approx(
        values, rel=1e-6, abs=1e-5
    )


def test_texts_are_generated_as_in_hf(tmp_path):
    ours, theirs = both(saved(tmp_path / "model", byte_tokenizer()))
    asked = [
        (text, {"until": until, "max_gen_toks": most, "do_sample": False})
        for text, until, most in (
            ("the cat", ["e", "\n"], 30),
            ("a", "q", 20),
            ("long " * 30, [], 24),
            ("end", ["<|endoftext|>"], 12),
        )
    ]
    assert ours.generate_until(requests("generate_until", *asked)) == [
        theirs.generate_until(requests("generate_until", ask))[0] for ask in asked
    ]


@pytest.mark.parametrize("name", ["mistral", "mamba", "phi3, longrope", "mixtral, sliding"])
def test_models_with_windows_states_and_switches_score_as_in_hf(name, tmp_path):
    zoo.build(name).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model", zoo.CONTEXT)
    ours, theirs = both(f"hf:{tmp_path / 'model'}", max_length=zoo.CONTEXT)
    question = "which animal sat on the mat of the house?"
    pairs = [(question, " the cat"), (question, " the dog"), ("short", " x"), (question, " t"), (question, " u")]
    close(
        ours.loglikelihood(requests("loglikelihood", *pairs)), theirs.loglikelihood(requests("loglikelihood", *pairs))
    )


def test_results_do_not_depend_on_the_batch_size_and_come_in_the_harness_s_form(tmp_path, capsys):
    folder, tasks = saved(tmp_path / "model", byte_tokenizer(), 256), write_tasks(tmp_path / "tasks")
    results = [evaluate(folder, TaskEvaluation(tasks=tuple(tasks), batch=batch))["results"] for batch in (1, 4)]
    for task, values in results[0].items():
        for metric, value in values.items():
            assert results[1][task][metric] == pytest.approx(value, abs=1e-5), (task, metric)
    out = tmp_path / "results.json"
    command = ["evaluate", str(folder), "--tasks", tasks[0], "--limit", "4", "--samples", "--out", str(out)]
    assert main(command) == 0
    assert "|choices|" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["n-samples"]["choices"] == {"original": DOCUMENTS, "effective": 4}
    assert len(written["samples"]["choices"]) == 4


def test_a_folder_and_a_server_of_it_get_the_same_results(tmp_path):
    """The harness asks the server by its own models `local-completions` and `local-chat-completions`."""
    tasks = write_tasks(tmp_path / "tasks")
    with small_server.running(context=512) as server:
        origin = {"model": "", "arguments": {}, "offered": {"context": 512}}
        save_model(server.model, server.tokenizer, tmp_path / "model", origin)
        where = {"model": "small", "tokenizer": str(tmp_path / "model"), "tokenizer_backend": "huggingface"}
        where |= {"base_url": f"{server.url}/v1/completions", "max_length": 512, "max_retries": 1}
        options = {"tasks": tasks, "task_manager": manager()}
        served = lm_eval.simple_evaluate("local-completions", {**where, "batch_size": 4}, **options)["results"]
        here = evaluate(tmp_path / "model", TaskEvaluation(tasks=tuple(tasks)))["results"]
        same(here, served)
        where |= {"base_url": f"{server.url}/v1/chat/completions", "tokenizer_backend": None}
        options |= {"tasks": tasks[1:2], "apply_chat_template": True, "log_samples": True}
        served = lm_eval.simple_evaluate("local-chat-completions", where, **options)
        here = evaluate(tmp_path / "model", TaskEvaluation(tasks=tuple(tasks[1:2]), chat=True, samples=True))
        same(here["results"], served["results"])
        answers = [
            [sample["resps"] for sample in sorted(results["samples"]["answers"], key=lambda row: row["doc_id"])]
            for results in (here, served)
        ]
        assert answers[0] == answers[1] and any(text for [[text]] in answers[0])


def manager():
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def same(here, served):
    assert here.keys() == served.keys()
    for task, values in here.items():
        numbers = {key: value for key, value in values.items() if isinstance(value, float) and "stderr" not in key}
        assert numbers == {key: pytest.approx(served[task][key], abs=1e-6) for key in numbers}, task


def test_what_cannot_be_run_is_said_in_one_line(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", byte_tokenizer())
    with pytest.raises(ConfigError, match="`--tasks` names no task"):
        evaluate(folder, TaskEvaluation())
    with pytest.raises(ConfigError, match=r"there is no file `none\.yaml`"):
        evaluate(folder, TaskEvaluation(tasks=("none.yaml",)))
    (path,) = write_tasks(tmp_path / "tasks", ("choices",))
    (tmp_path / "tasks" / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"`--tasks`: .*choices\.yaml: FileNotFoundError"):
        evaluate(folder, TaskEvaluation(tasks=(path,)))
    with pytest.raises(ConfigError, match="lm-evaluation-harness has no task `hellaswagg`") as caught:
        evaluate(folder, TaskEvaluation(tasks=("hellaswagg",)))
    assert "did you mean `hellaswag`?" in str(caught.value)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="`--tasks` needs lm-evaluation-harness") as caught:
        evaluate(folder, TaskEvaluation(tasks=(path,)))
    assert "pip install shoestring" in caught.value.hint
