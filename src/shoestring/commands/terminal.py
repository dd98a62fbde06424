"""The terminal of `shoestring chat`: reads questions and commands, and prints answers as they are written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.commands.printing import say, write_text
from shoestring.core.errors import ConfigError, ShoestringError, nearest
from shoestring.verbs.chat import changed

if TYPE_CHECKING:
    from shoestring.verbs.chat import Dialogue

PROMPT, CONTINUED = "> ", "… "
QUOTES = '"""'
"""Marks the beginning and the end of a question of several lines."""
HISTORY = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoestring" / "questions"
"""File with the questions of earlier conversations, which the arrow keys recall."""
REMEMBERED = 1000
"""Maximum number of lines in `HISTORY`."""
HELP = f"""\
Ctrl-C stops an answer, Ctrl-D ends the conversation. A line that ends in \\ continues in the next line, and a question
of several lines may stand between {QUOTES} and {QUOTES}.

/retry              answer the last question again, with a different seed
/undo               forget the last question and its answer
/system TEXT        start a new conversation with this system message; without TEXT, with none
/clear              start a new conversation with the same system message
/save FILE          write the conversation as a file with one chat, which `shoestring train finetune` reads
/load FILE          continue a conversation that was saved
/set NAME VALUE     change temperature, top_k, top_p, min_p, repetition_penalty or seed; without NAME, show them
/rates              show the reading and writing speed after each answer, or hide it
/exit               end the conversation"""


def talk(conversation: Dialogue) -> int:
    """Hold the conversation until the input ends; returns the exit code."""
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    if tty:
        _remember_lines()
        say("Ask something, or type /help.")
    terminal = _Terminal(conversation, rates=tty)
    questions = entries(_typed if tty else _piped)
    while True:
        try:
            question = next(questions, None)
        except KeyboardInterrupt:  # Ctrl-C clears the line, as in a shell
            say("")
            questions = entries(_typed if tty else _piped)
            continue
        if question is None or not terminal.take(question):
            break
    if tty:
        say("")
    return int(terminal.failed and not tty)


class _Terminal:
    """Handles the questions and commands that the user types.

    Args:
        rates: whether to show reading and writing speed after each answer.
    """

    def __init__(self, conversation: Dialogue, rates: bool) -> None:
        self.conversation = conversation
        self.shows_rates = rates
        self.saved: set[Path] = set()
        self.failed = False
        """Whether any question or command was refused."""
        self.commands: dict[str, Callable[[str], object]] = {
            "/help": lambda _: say(HELP),
            "/retry": lambda _: self._show(conversation.retry()),
            "/undo": lambda _: conversation.undo(),
            "/system": self._begin,
            "/clear": lambda _: conversation.begin(conversation.system),
            "/save": self._save,
            "/load": lambda name: conversation.load(_path(name, "/load")),
            "/set": self._set,
            "/rates": self._toggle_rates,
        }

    def take(self, entry: str) -> bool:
        """Answer a question, or carry out a command; returns False if the command ends the conversation."""
        word, _, rest = entry.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            return False
        try:
            if word in self.commands:
                self.commands[word](rest.strip())
            elif word.startswith("/") and "/" not in word[1:] and "\n" not in word:
                hint = nearest(word, self.commands) or "/help lists the commands"
                raise ConfigError(f"there is no command `{word}`", hint=hint)
            else:
                self._show(self.conversation.ask(entry))
        except KeyboardInterrupt:  # Ctrl-C before the answer began
            say("")
        except (ShoestringError, OSError) as error:
            self.failed = True
            say(f"error: {error}", sys.stderr)
        return True

    def _show(self, pieces: Generator[str]) -> None:
        """Print an answer while it is generated; Ctrl-C stops the answer."""
        if left_out := self.conversation.left_out:
            say(f"(the model no longer sees the first {left_out} messages, for lack of room)", sys.stderr)
        try:
            with closing(pieces):
                for piece in pieces:
                    write_text(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            write_text(" …")
        finally:
            write_text("\n")
            sys.stdout.flush()
        if self.shows_rates and self.conversation.rates is not None:
            dim, plain = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
            print(f"{dim}({self.conversation.rates}){plain}", file=sys.stderr, flush=True)

    def _begin(self, system: str) -> None:
        self.conversation.begin(system)
        say(f"a new conversation, {'with this system message' if system else 'without a system message'}", sys.stderr)

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        if path.exists() and path not in self.saved:
            raise ConfigError(f"`{path}` already exists", hint="give another name")
        self.conversation.save(path)
        self.saved.add(path)
        say(f"wrote {path}: {len(self.conversation.messages)} messages", sys.stderr)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self.conversation.options = changed(self.conversation.options, name, value.strip())
        numbers = {**vars(self.conversation.rule()), "seed": self.conversation.options.seed}
        say(", ".join(f"{setting} {number:g}" for setting, number in numbers.items()), sys.stderr)

    def _toggle_rates(self, _: str) -> None:
        self.shows_rates = not self.shows_rates
        say(f"rates are {'shown' if self.shows_rates else 'hidden'}", sys.stderr)


def _path(name: str, command: str) -> Path:
    if not name:
        raise ConfigError(f"{command} needs the name of a file", hint=f"{command} chat.jsonl")
    return Path(name).expanduser()


def entries(read: Callable[[str], str | None]) -> Iterator[str]:
    """Yield the user's entries, which may consist of several lines; empty entries are skipped.

    Args:
        read: function that shows the prompt that it gets, and returns the next line, or None at the end of the input.
    """
    while (line := read(PROMPT)) is not None:
        lines = [line]
        if line.startswith(QUOTES):
            lines = [line.removeprefix(QUOTES)]
            while QUOTES not in lines[-1] and (line := read(CONTINUED)) is not None:
                lines.append(line)
            lines[-1] = lines[-1].partition(QUOTES)[0]
        else:
            while lines[-1].endswith("\\") and (line := read(CONTINUED)) is not None:
                lines[-1] = lines[-1][:-1]
                lines.append(line)
        if entry := "\n".join(lines).strip():
            yield entry


def _typed(prompt: str) -> str | None:
    """Read a line from the terminal."""
    try:
        return input(prompt)
    except EOFError:
        return None


def _piped(_: str) -> str | None:
    """Read a line from a file or a pipe."""
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _remember_lines() -> None:
    """Let the arrow keys recall lines that were typed before, in earlier conversations too."""
    try:
        import readline
    except ImportError:  # some builds of Python lack readline
        return
    import atexit

    with suppress(OSError):
        HISTORY.parent.mkdir(parents=True, exist_ok=True)
        HISTORY.touch(mode=0o600)
        readline.read_history_file(HISTORY)
    readline.set_history_length(REMEMBERED)

    def write() -> None:
        with suppress(OSError):
            readline.write_history_file(HISTORY)

    atexit.register(write)
