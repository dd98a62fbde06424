"""A conversation answers as a server does, keeps what was said, and gives way when its context is full."""

import io
import json
import os
import pty
import select
import signal
import sys
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.cli import main
from shoestring.commands import terminal
from shoestring.core.errors import ConfigError
from shoestring.data.chat_template import chat_template
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.engine import generate as draw
from shoestring.decode.settings.generation import (
    Conversing,
    Decoding,
    Generation,
    Sampling,
    SeededOptions,
    Speculation,
    TemplateOptions,
)
from shoestring.models.saving import save_model
from shoestring.verbs.chat import changed, converse, shorter_and_shorter
from shoestring.verbs.generate import generate
from tests.decode.small_server import model, tokenizer

RULE = {"temperature": 1.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_model(model(), tokenizer(), folder, {"model": "-", "arguments": {}, "offered": {"context": 256}})
    return folder


def open_chat(folder, **settings):
    sampling = SeededOptions(**RULE, seed=settings.pop("seed", 3))
    return closing(converse(folder, Conversing(**{"max_tokens": 12, "sampling": sampling, **settings})))


def expected(messages, seed, max_new=12):
    """The answer by one call of the engine without a cache of earlier turns."""
    words = tokenizer()
    start = chat_template(words).encode(messages)
    tokens = list(draw(model(), start, max_new=max_new, sampling=Sampling(**RULE, seed=seed), stop=[258, 256]))
    text = words.stream(start)
    return "".join(map(text.add, tokens)) + text.rest()


def message(role, content):
    return {"role": role, "content": content}


def test_answers_are_those_of_the_whole_conversation_read_anew(folder):
    said = [message("system", "be brief")]
    with open_chat(folder, system="be brief") as chat:
        for question in ("hello", "and <|im_end|> then?"):
            answer = "".join(chat.ask(question))
            said.append(message("user", question))
            assert answer == expected(said, seed=3)
            said.append(message("assistant", answer))
        assert chat.messages == said
        whole = chat_template(tokenizer()).encode(said[:-1])
        assert chat.rates.written <= 12 and chat.rates.read < len(whole) - 40  # the first question is in the cache
        again = "".join(chat.retry())
        assert again == expected(said[:-1], seed=4) != answer
        chat.undo()
        assert chat.messages == said[:3]


@pytest.mark.slow
def test_drafts_change_no_word(folder):
    with open_chat(folder) as plain:
        wanted = ["".join(plain.ask(question)) for question in ("a a a a", "a a a a")]
    drafts = Decoding(speculation=Speculation(draft="lookup", draft_length=3))
    with open_chat(folder, decoding=drafts) as drafted:
        assert isinstance(drafted.engine.speculator.drafter, PromptLookup)
        assert ["".join(drafted.ask(question)) for question in ("a a a a", "a a a a")] == wanted
        assert drafted.rates.drafted > 0 and "drafted tokens accepted" in str(drafted.rates)


def test_the_oldest_questions_give_way_when_the_context_is_full(folder):
    with open_chat(folder, system="be brief", context=160) as chat:
        for number in range(8):
            answer = "".join(chat.ask(f"question number {number}"))
            assert chat.rates.ending in ("stop", "length")
        shown = [chat.messages[0], *chat.messages[1 + chat.left_out : -1]]
        assert chat.left_out > 0 and answer == expected(shown, seed=3)
        before = list(chat.messages)
        with pytest.raises(
            ConfigError, match=r"question and the system message have 2,0\d\d tokens, but the context is 160"
        ):
            chat.ask("x" * 2000)
        with pytest.raises(ConfigError, match="characters, but the context is 160"):
            chat.ask("x" * 1_000_000)
        assert chat.messages == before


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=12))
def test_what_is_left_out_is_whole_turns_from_the_oldest_on(roles):
    messages = [message(role, str(number)) for number, role in enumerate(roles)]
    system = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    forms = list(shorter_and_shorter(messages))
    assert forms[0] == messages
    for longer, shorter in pairwise(forms):
        assert shorter[:system] == messages[:system] and shorter[system]["role"] == "user"
        assert len(shorter) < len(longer) and shorter[system:] == messages[len(messages) - len(shorter) + system :]
    if "user" in roles[system:]:
        assert [entry["role"] for entry in forms[-1][system:]].count("user") == 1


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(folder):
    with open_chat(folder) as chat:
        pieces = chat.ask("hello")
        first = next(pieces)
        pieces.close()
        assert chat.messages[-1] == message("assistant", first) and chat.rates.ending == "cancelled"
        said = list(chat.messages)
        assert "".join(chat.ask("go on")) == expected([*said, message("user", "go on")], seed=3)


def test_a_question_whose_answer_failed_is_replaced(folder):
    with open_chat(folder) as chat:
        pieces = chat.ask("hello")
        step = chat.engine.model.read
        chat.engine.model.read = lambda *_, **__: step(*_, **__) * float("nan")
        with pytest.raises(Exception, match="not finite"):
            list(pieces)
        chat.engine.model.read = step
        assert chat.messages == [message("user", "hello")]
        assert "".join(chat.ask("again")) == expected([message("user", "again")], seed=3)


def test_a_conversation_is_saved_as_a_chat_and_loaded(folder, tmp_path):
    with open_chat(folder, system="brief") as chat:
        list(chat.ask("hello"))
        chat.save(tmp_path / "chat.jsonl")
        said = chat.messages
    assert json.loads((tmp_path / "chat.jsonl").read_text()) == {"messages": said}
    with open_chat(folder) as other:
        other.load(tmp_path / "chat.jsonl")
        assert other.messages == said and other.system == "brief"
        (tmp_path / "bad.jsonl").write_text("no chat\n")
        with pytest.raises(Exception, match="the first line is not JSON"):
            other.load(tmp_path / "bad.jsonl")
        assert other.messages == said


def test_a_question_in_a_pipe_is_answered_alone(folder, capsys, monkeypatch):
    settings = Generation(max_tokens=12, sampling=SeededOptions(**RULE, seed=3), chat=True, system="brief")
    wanted = expected([message("system", "brief"), message("user", "hello")], seed=3)
    assert "".join(generate(folder, "hello", settings)) == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    flags = ["--max-tokens", "12", "--temperature", "1", "--top-p", "1", "--seed", "3", "--system", "brief"]
    assert main(["generate", str(folder), "--chat", *flags]) == 0
    assert capsys.readouterr().out == wanted + "\n"
    assert main(["generate", str(folder), *flags]) == 2
    assert "add --chat" in capsys.readouterr().err


def test_what_is_typed(folder, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "talk.jsonl"
    typed = f'''/set temperature 0
/set
hello \\
there
/undo
/undo
"""two
lines"""
/rates
/retry
/save {saved}
/save {saved}
/frob
/set heat 2
/set seed -1
/system be brief
/retry
/load {tmp_path}/none
/save
/load {saved}
/home/somebody is a folder
/exit
never asked
'''
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", str(folder), "--max-tokens", "6", "--seed", "3"]) == 1  # something was refused
    out, err = capsys.readouterr()
    record = json.loads(saved.read_text())["messages"]
    assert [entry["content"] for entry in record if entry["role"] == "user"] == ["two\nlines"]
    assert out.count("\n") >= 4 and "/system TEXT" not in out
    lines = [line for line in err.splitlines() if not line.startswith(("loading", "loaded"))]
    for wanted in (
        "temperature 0, top_k 0, top_p 0.95, min_p 0, repetition_penalty 1, seed 3",
        "error: nothing has been asked yet",
        "rates are shown",
        f"wrote {saved}: 2 messages",
        "there is no command `/frob`",
        "there is no setting `heat`",
        "seed is -1",
        "a new conversation, with this system message",
        "none",
        "error: /save needs the name of a file",
    ):
        assert any(wanted in line for line in lines), (wanted, lines)


def test_a_model_without_a_template_is_refused(tmp_path, capsys):
    save_model(model(), tokenizer(None), tmp_path, {"model": "-", "arguments": {}, "offered": {"context": 256}})
    for verb in (["chat"], ["generate", "--chat", "--prompt", "hello"]):
        assert main([verb[0], str(tmp_path), *verb[1:]]) == 2
        assert "the model has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{", "null", "3"])
def test_arguments_of_the_template_are_an_object(text):
    with pytest.raises(ConfigError, match="template_arguments"):
        TemplateOptions(template_arguments=text)


def test_one_setting_is_changed():
    options = changed(SeededOptions(), "top_k", "3")
    assert options == SeededOptions(top_k=3)
    with pytest.raises(ConfigError, match="give a number"):
        changed(options, "top_p", "much")


def test_entries_are_joined_from_lines():
    lines = iter(["one", "", "two \\", "three", '"""four', "five", '"""', '"""six"""', "seven\\"])
    assert list(terminal.entries(lambda _: next(lines, None))) == ["one", "two \nthree", "four\nfive", "six", "seven\\"]


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_conversation(folder, tmp_path):
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    child, terminal = pty.fork()
    if child == 0:
        command = ["chat", str(folder), "--context", "250", "--max-tokens", "200", "--temperature", "1"]
        os.execve(sys.executable, [sys.executable, "-m", "shoestring", *command], environment)
    seen = b""

    def wait_for(text):
        nonlocal seen
        while text not in seen:
            assert select.select([terminal], [], [], 120)[0], f"never came: {text!r} after {seen!r}"
            seen += os.read(terminal, 65536)
        seen = seen.partition(text)[2]

    try:
        wait_for(b"> ")
        os.write(terminal, b"hello\r")
        wait_for(b"hello\r\n")
        os.write(terminal, b"\x03")  # stops the answer, or, where it has ended, clears the line
        wait_for(b"> ")
        os.write(terminal, b"/help\r")
        wait_for(b"/exit")
        wait_for(b"> ")
        os.write(terminal, b"half a line\x03")
        wait_for(b"> ")
        os.write(terminal, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
        assert (tmp_path / "shoestring" / "questions").read_text().splitlines()[-2:] == ["hello", "/help"]
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)
