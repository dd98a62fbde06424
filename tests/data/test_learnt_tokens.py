"""Which tokens of a chat are learnt under the templates of known families, by comparing and by the template's marks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.data.chat_template import chat_template
from shoestring.data.confined_template import answer_ends
from tests.data.chat_templates import ALPACA, TEMPLATES, compared, tagged, tokenizer

ENDS = {
    "chatml": "<|im_end|>", "llama2": " </s>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>",
    "phi3": "<|end|>", "qwen3": "<|im_end|>", "deepseek": "<｜end▁of▁sentence｜>", "zephyr": "</s>",
    "glm": "<|user|>", "alpaca": "\n\n</s>",
}  # fmt: skip
BEGINS = {"llama2": " ", "mistral": " ", "qwen3": "<think>\n\n</think>\n\n"}
MADE = {
    name: (chat_template(tokenizer(compared(t))), chat_template(tokenizer(tagged(t)))) for name, t in TEMPLATES.items()
}


def runs(template, samples):
    """The runs of learnt text, in the order in which they end."""
    texts = []
    for tokens, trained in samples:
        run = []
        for token, flag in zip([*tokens, 0], [*trained, False], strict=True):
            if flag:
                run.append(token)
            elif run:
                texts.append(template.tokenizer.engine.decode(run, skip_special_tokens=False))
                run = []
    return texts


def talk(answers, system=False):
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for number, answer in enumerate(answers):
        messages += [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]
    return messages


def expected(name, answers, number):
    """What is learnt of an answer."""
    end = ENDS[name]
    if name == "glm" and number == len(answers) - 1:
        end = "</s>"  # nothing follows, so the end of the text does
    return BEGINS.get(name, "") + answers[number] + end


ANSWER = st.text(st.sampled_from("ab.<|é🙂"), min_size=1, max_size=6)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=8)
@given(answers=st.lists(ANSWER, min_size=1, max_size=3), system=st.booleans())
def test_all_answers_are_learnt_with_their_ends_and_nothing_else(name, answers, system):
    by_comparing, _ = MADE[name]
    system = system and name not in ("mistral", "gemma")
    samples = by_comparing.samples(talk(answers, system))
    assert sorted(runs(by_comparing, samples)) == sorted(expected(name, answers, n) for n in range(len(answers)))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=8)
@given(answers=st.lists(ANSWER, min_size=1, max_size=3), muted=st.integers(-1, 2))
def test_marks_of_a_template_and_comparing_agree(name, answers, muted):
    messages = talk(answers)
    if 0 <= muted < len(answers):
        messages[2 * muted + 1]["weight"] = 0
    by_comparing, by_marks = MADE[name]
    assert by_marks.samples(messages) == by_comparing.samples(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_an_answer_has_the_tokens_that_generation_gives_it(name):
    made, _ = MADE[name]
    messages = talk(["a", "b", "c"])
    prompts = {tuple(made.encode(messages[:turns])) for turns in (1, 3, 5)}
    prompts |= {prompt[: prompt.index(-1)] for prompt in prompts if -1 in prompt}
    beginnings = [
        tuple(tokens[:at])
        for tokens, trained in made.samples(messages)
        for at, flag in enumerate(trained)
        if flag and not trained[at - 1]
    ]
    assert len(beginnings) == 3
    for beginning in beginnings:  # a prompt may ask for reasoning that the answer lacks
        assert any(prompt[: len(beginning)] == beginning for prompt in prompts)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_calls_of_tools_are_learnt_and_their_results_are_not(name):
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"city": "X", "n": 3}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    for made in MADE[name]:
        first, last = runs(made, made.samples(messages, {"tools": [{"name": "f"}]}))
        assert '"city": "X", "n": 3' in first and first.endswith(ENDS[name])
        assert last == BEGINS[name] + "a" + ENDS[name]


@pytest.mark.slow
def test_the_ends_of_a_template_are_those_that_are_learnt():
    ends = {
        name: {made.tokenizer.engine.id_to_token(token) for token in made.ends()} for name, (made, _) in MADE.items()
    }
    wanted = {name: {end.strip()} for name, end in ENDS.items()}
    assert ends == wanted | {"glm": {"<|user|>", "</s>"}}
    tokens = tokenizer(compared(TEMPLATES["chatml"]))
    assert answer_ends(tokens) == (tokens.engine.token_to_id("<|im_end|>"),)
    assert answer_ends(tokenizer("{{ raise_exception('no') }}")) == answer_ends(tokenizer("{% if %}")) == ()
    del tokens.companions["tokenizer_config.json"]
    assert answer_ends(tokens) == ()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "changes the text before"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "message 2 is left out by it"),
        ("{{ messages[-1].content }}", "changes the text before message 2"),
        (
            "{% if messages | length < 2 or messages[1].content not in 'zz' %}{{ raise_exception('no') }}{% endif %}"
            + compared(ALPACA),
            "message 2 is refused where another text stands in its place",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        chat_template(tokenizer(template)).samples(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "zz"}]
        )


def test_a_chat_that_begins_with_an_answer_and_ends_with_a_question():
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "q"}]
    for name in ("chatml", "llama3", "zephyr"):
        made, _ = MADE[name]
        (run,) = runs(made, made.samples(messages))
        assert run.strip() == "hi" + ENDS[name]
