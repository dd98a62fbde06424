"""Parses the fields of a request that say which format its answer must have; does not import torch."""

from __future__ import annotations

import json
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.decode.schema_forms import written
from shoestring.decode.serve.fields import RequestFields, is_text
from shoestring.decode.serve.tool_fields import find_problem
from shoestring.decode.settings.generation import AnswerFormat

SCHEMA, EXPRESSION, CHOICES = 65_536, 4096, 1024
"""Largest number of characters of a schema and of a regular expression, and largest number of choices."""
_OBJECT = '{"type": "object"}'


def read_format(fields: RequestFields, name: str = "response_format") -> dict[str, Any]:
    """Parse `response_format` of OpenAI's API and `structured_outputs` of vLLM's.

    Args:
        name: the field that holds the format; for /v1/responses, the object that holds the field `format`.

    Returns:
        The arguments `answer_format` and `format_field` of `Asked`; empty if the request sets no format.

    Raises:
        RequestError: a field is wrong or not supported, or there are two formats.
    """
    where = "text.format" if name == "text" else name
    wanted, other = _wanted(fields, name, where), _structured(fields)
    if wanted is not None and other is not None:
        raise fields.wrong("structured_outputs", f"gives a format, and `{where}` gives another")
    if wanted is None and other is None:
        return {}
    return {"answer_format": wanted or other, "format_field": "structured_outputs" if wanted is None else where}


def _wanted(fields: RequestFields, name: str, where: str) -> AnswerFormat | None:
    """Parse `response_format`, or `text.format` of /v1/responses, where the schema is not in a separate object."""
    flat = name == "text"
    value = fields.get(name)
    if value is not None and flat:
        outer = RequestFields(value, name)
        value = outer.get("format")
        outer.only("verbosity", [], "the model knows nothing of it")
        outer.finish()
    if value is None:
        return None
    content = RequestFields(value, where)
    kind, answer_format = content.get("type"), None
    if kind == "json_object":
        answer_format = AnswerFormat("json_schema", _OBJECT)
    elif kind == "json_schema":
        inner = content if flat else RequestFields(content.get("json_schema"), f"{where}.json_schema")
        inner.text("name"), inner.text("description"), inner.flag("strict")  # no effect: always strict
        answer_format = _schema(inner, "schema", inner.get("schema"))
        inner.finish()
    elif kind != "text":
        raise content.wrong("type", "is not `text`, `json_object` or `json_schema`")
    content.finish()
    return answer_format


def _structured(fields: RequestFields) -> AnswerFormat | None:
    value = fields.get("structured_outputs")
    if value is None:
        return None
    content = RequestFields(value, "structured_outputs")
    schema, expression, choice = (content.get(name) for name in ("json", "regex", "choice"))
    content.finish()
    if sum(wanted is not None for wanted in (schema, expression, choice)) != 1:
        raise fields.wrong("structured_outputs", "does not have one of `json`, `regex` and `choice`")
    if schema is not None:
        return _schema(content, "json", schema)
    if expression is not None:
        if not is_text(expression) or not 0 < len(expression) <= EXPRESSION:
            raise content.wrong("regex", f"is not a regular expression of 1 to {EXPRESSION} characters")
        return AnswerFormat("regex", expression)
    texts = isinstance(choice, list) and all(is_text(text) and text for text in choice)
    if not texts or not 0 < len(choice) <= CHOICES or sum(map(len, choice)) > SCHEMA:
        raise content.wrong("choice", f"is not a list of 1 to {CHOICES} texts, of {SCHEMA} characters together")
    return AnswerFormat("choice", json.dumps(choice))


def _schema(fields: RequestFields, name: str, value: Any) -> AnswerFormat:
    """Check and rewrite a schema; whether llguidance can compile it is checked later."""
    if isinstance(value, str):
        if len(value) > SCHEMA:
            raise fields.wrong(name, f"has more than {SCHEMA} characters")
        try:
            value = json.loads(value)  # own file: a field of a request, whose length is checked
        except (ValueError, RecursionError) as error:
            raise fields.wrong(name, "is neither a schema nor the JSON of one") from error
    if not isinstance(value, dict):
        raise fields.wrong(name, "is not an object")
    if (problem := find_problem(value)) is not None:
        raise fields.wrong(name, problem)
    if len(json.dumps(value)) > SCHEMA:
        raise fields.wrong(name, f"has more than {SCHEMA} characters")
    try:
        return AnswerFormat("json_schema", written(value))
    except ConfigError as error:
        raise fields.wrong(name, f"is not supported: {error}") from error
