"""Writes grammars for answers that call tools in the syntax that the model uses; does not import torch.

With such a grammar, an answer can call only the offered functions, and the arguments of a strict function follow its
schema. Grammars are written in llguidance's variant of Lark's syntax
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.serve.tool_calls import FORMS, Calling, CallParser, Hermes, Mistral
from shoestring.decode.settings.generation import FLEXIBLE_SPACE

ANY_OBJECT = '{"type": "object"}'
"""Schema of the arguments of a function that is not strict."""
_TEXT = r"/(.|\n)*/"
_NO_CALL = r"/([^{\[,;\]\s](.|\n)*)?/"
"""Pattern of text that does not begin like a call, for call syntaxes without a mark at the beginning."""


@dataclass(frozen=True)
class _Writer:
    """Writes the expressions for calls that are used in the rules of a grammar."""

    parser: type[CallParser]
    mark: Callable[[str], str]
    """Returns the symbol for a mark: a special token, or the characters of the mark."""
    arguments: Mapping[str, str]
    """The symbol for the arguments of each function, by the function's name."""
    identifier: str = ""
    """The expression for an identifier that may follow the arguments."""

    def body(self, name: str, begun: str = "") -> str:
        """The expression for a call as a JSON object, without its first characters `begun`, which precede it."""
        head = f'{{"name": "{name}", "{self.parser.key}": '
        assert head.startswith(begun)
        return f'{_text(head[len(begun) :])} {self.arguments[name]} {self.identifier} "}}"'

    def calls(self, begun: str = "") -> str:
        """The expression for the rest of a call after the characters `begun`, of any function whose call begins so."""
        heads = ((name, f'{{"name": "{name}", "{self.parser.key}": ') for name in self.arguments)
        return _any(self.body(name, begun) for name, head in heads if head.startswith(begun))


def call_grammar(calling: Calling, template: str, schemas: Mapping[str, str | None], tokenizer: Tokenizer) -> str:
    """Write the grammar of an answer that may call functions, or must do so if the prompt ends within a call.

    Args:
        template: source of the chat template.
        schemas: JSON schema of the arguments of each function, as text; None for a function that is not strict.
    """
    added = tokenizer.engine.get_added_tokens_decoder()
    numbers = {token.content: number for number, token in added.items()}
    special = {token.content for token in added.values() if token.special}

    def mark(text: str) -> str:
        token = f"<[{numbers[text]}]>" if text in numbers else ""
        return token if text in special else f"({token} | {_text(text)})" if token else _text(text)

    forms = [json.loads(schema or ANY_OBJECT) for schema in schemas.values()]  # own file: checked when it was read
    rules = [
        f"arguments_{number}: %json {json.dumps(form | {'x-guidance': FLEXIBLE_SPACE})}"  # JSON without line breaks
        for number, form in enumerate(forms)
    ]
    arguments = {name: f"arguments_{number}" for number, name in enumerate(schemas)}
    parser = FORMS[calling.form]
    identifier = r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")?' if issubclass(parser, Mistral) else ""
    writer = _Writer(parser, mark, arguments, identifier)
    if issubclass(parser, Hermes):
        rules += _hermes(writer, calling.opening)
    elif issubclass(parser, Mistral):
        rules += _mistral(writer, calling.opening, template)
    else:
        rules += _plain(writer, calling.opening)
    rules += ["text: TEXT", f"TEXT: {_NO_CALL if parser.starts_inside else _TEXT}"]
    if parser.opener in numbers:
        rules.append(f"before_token: TEXT <[{numbers[parser.opener]}]>")
    if parser.opener and parser.opener not in special:  # the text ends as soon as these characters are written
        rules.append(f"before_characters[lazy]: TEXT {_text(parser.opener)}")
    if parser.opener:
        ways = [rule.partition("[")[0].partition(":")[0] for rule in rules if rule.startswith("before_")]
        rules.append(f"before: {_any(ways)}")
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _hermes(writer: _Writer, opening: str) -> list[str]:
    closer = writer.mark(writer.parser.closer)
    rules = [f'call: "\\n" ({writer.calls()}) "\\n" {closer}']
    if not opening:
        return ["start: (before call)* text", *rules]
    begun = opening.removeprefix(f"{writer.parser.opener}\n")
    further = f'("\\n" {writer.mark(writer.parser.opener)} call)*'
    return [f'start: ({writer.calls(begun)}) "\\n" {closer} {further}', *rules]


def _plain(writer: _Writer, opening: str) -> list[str]:
    """Rules for an answer that begins with calls separated by semicolons, or with an array of calls."""
    rules = [f"call: {writer.calls()}", "further: (/; ?/ call)*", 'calls: call further | "[" call (", " call)* "]"']
    if opening:
        return [f"start: ({writer.calls(opening)}) further", *rules]
    return [f"start: calls {'| before calls' if writer.parser.opener else ''} | text", *rules]


def _mistral(writer: _Writer, opening: str, template: str) -> list[str]:
    opener, begun = writer.mark(writer.parser.opener), opening.removeprefix(writer.parser.opener)
    if "[ARGS]" in template:
        between = writer.mark("[ARGS]")
        named = {name: f"{_text(name)} {between} {symbol}" for name, symbol in writer.arguments.items()}
        rules = [f"call: {_any(named.values())}"]
        if not opening:
            return ["start: (before call)* text", *rules]
        first = next((symbol for name, symbol in writer.arguments.items() if begun == f"{name}[ARGS]"), "call")
        return [f"start: {first} ({opener} call)*", *rules]
    space = " " if "[TOOL_CALLS] " in template else ""
    rules = [f"call: {writer.calls()}", 'further: (", " call)* "]"']
    if not opening:
        return [f"start: text | before {_text(f'{space}[')} call further", *rules]
    return [f"start: ({writer.calls(begun.removeprefix(f'{space}['))}) further", *rules]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _any(symbols: Iterable[str]) -> str:
    return " | ".join(symbols)
