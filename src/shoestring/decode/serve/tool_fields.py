"""Parses the fields of a request that offer tools to the model: `tools`, `tool_choice` and `parallel_tool_calls`; does
not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.decode.schema_forms import written
from shoestring.decode.serve.fields import RequestFields, is_text
from shoestring.decode.serve.tool_calls import FORMS, Calling, find_form

TOOLS = 128
"""Largest number of tools in a request."""
SCHEMA = 65_536
"""Largest number of characters of the schemas of all strict functions."""
DEPTH = 64
"""Largest depth of nested lists and objects in a schema, or in the arguments of a call."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tools:
    """The tools that a request offers."""

    offered: Sequence[dict[str, Any]]
    """The tools that the chat template gets, in the format of /v1/chat/completions; empty if no tool may be called."""
    choice: str
    """`none`, `auto`, `required`, or the name of the function to be called, preceded by a colon."""
    parallel: bool
    """Whether an answer may have several calls."""
    schemas: Mapping[str, str | None]
    """JSON of the schema of the arguments of each function, rewritten for a grammar; None if the function is not
    strict."""

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrains the answer: a function is strict, or there must be a call."""
        return any(schema is not None for schema in self.schemas.values()) or self.choice not in ("auto", "none")

    def calling(self, template: str) -> Calling:
        """How the answer may call the tools that are offered.

        Args:
            template: source of the chat template.
        """
        form, names = find_form(template), [tool["function"]["name"] for tool in self.offered]
        opening = ""
        if self.choice != "auto":
            only = names[0] if len(names) == 1 else None
            opening = FORMS[form].opening(template, self.choice[1:] if self.choice[0] == ":" else only)
        single = not self.parallel or self.choice[0] == ":"
        return Calling(form=form, names=names, opening=opening, single=single)


def read_tools(fields: RequestFields, *, flat: bool = False) -> Tools:
    """Parse the fields about tools.

    Args:
        flat: whether tools and choices hold the fields of their function directly, as in /v1/responses, and not in an
            object `function`, as in chats.

    Raises:
        RequestError: a field is wrong or not supported.
    """
    value = fields.get("tools")
    if value is not None and not isinstance(value, list):
        raise fields.wrong("tools", "is not a list")
    if value is not None and len(value) > TOOLS:
        raise fields.wrong("tools", f"has more than {TOOLS} tools")
    tools, schemas = list[dict[str, Any]](), dict[str, str | None]()
    for number, tool in enumerate(value or []):
        definition, schema = _tool(tool, f"tools[{number}]", flat)
        tools.append(definition)
        schemas[definition["function"]["name"]] = schema
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", "has two functions of the same name")
    choice = _choice(fields, names, flat)
    if sum(len(schema or "") for schema in schemas.values()) > SCHEMA:
        raise fields.wrong("tools", f"has strict functions whose schemas have more than {SCHEMA} characters together")
    offered = [] if choice == "none" else tools
    return Tools(offered, choice, fields.flag("parallel_tool_calls", default=True), schemas if offered else {})


def find_problem(value: Any) -> str | None:
    """Find a problem in a schema or in the arguments of a call: text that cannot be encoded, or too many levels of
    nested lists and objects; None if there is no problem."""
    level = [value]
    for _ in range(DEPTH + 1):
        texts = [entry for entry in level if isinstance(entry, str)]
        texts += [key for entry in level if isinstance(entry, dict) for key in entry]
        if not all(map(is_text, texts)):
            return "holds text that is not of valid Unicode characters"
        inner = [
            entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, dict | list)
        ]
        level = [entry for entries in inner for entry in entries]
        if not inner:
            return None
    return f"is nested more than {DEPTH} levels deep"


def _tool(content: Any, where: str, flat: bool) -> tuple[dict[str, Any], str | None]:
    """Parse one tool; returns it in the format of /v1/chat/completions, and the schema of its arguments if it is
    strict."""
    tool = RequestFields(content, where)
    if tool.get("type") != "function":
        raise tool.wrong("type", "is not `function`, the only type of tools that is supported")
    function = tool if flat else RequestFields(tool.get("function"), f"{where}.function")
    definition: dict[str, Any] = {"name": _name(function)}
    if (description := function.text("description")) is not None:
        definition["description"] = description
    if (parameters := function.get("parameters")) is not None:
        if not isinstance(parameters, dict):
            raise function.wrong("parameters", "is not an object")
        if (problem := find_problem(parameters)) is not None:
            raise function.wrong("parameters", problem)
        definition["parameters"] = parameters
    schema = None
    if function.flag("strict"):
        try:
            schema = written({"type": "object"} | (parameters or {}))
        except ConfigError as error:
            raise function.wrong("parameters", f"is not supported with `strict`: {error}") from error
    function.finish()
    tool.finish()
    return {"type": "function", "function": definition}, schema


def _name(fields: RequestFields) -> str:
    name = fields.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise fields.wrong("name", "is not a name of 1 to 64 letters, digits, underscores and hyphens")
    return name


def _choice(fields: RequestFields, names: Sequence[str], flat: bool) -> str:
    """Parse `tool_choice`; see `Tools.choice`."""
    value = fields.get("tool_choice")
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in _CHOICES:
            raise fields.wrong("tool_choice", f"is not one of {', '.join(_CHOICES)}, or a function")
        if value == "required" and not names:
            raise fields.wrong("tool_choice", "requires a call, but there are no `tools`")
        return value
    choice = RequestFields(value, "tool_choice")
    if choice.get("type") != "function":
        raise choice.wrong("type", "is not `function`, the only type of choices that is supported")
    function = choice if flat else RequestFields(choice.get("function"), "tool_choice.function")
    name = _name(function)
    if name not in names:
        raise function.wrong("name", "is not a function in `tools`")
    function.finish()
    choice.finish()
    return f":{name}"
