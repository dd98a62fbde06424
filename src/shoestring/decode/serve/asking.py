"""What a client asks for: the fields of a request, checked, and its prompts as tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.decode.request import Request
from shoestring.decode.serve.errors import RequestError, invalid
from shoestring.decode.serve.fields import Fields, is_text
from shoestring.decode.serve.served import Served
from shoestring.decode.settings import Sampling

STOPS, STOP_LENGTH = 16, 256
"""The most stop strings, and their most characters."""
TEXTS = 128
"""The most texts of one prompt."""
TOP = 20
"""The most alternatives of a token that are listed."""
ROLES = ("system", "developer", "user", "assistant")

_HARMLESS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
)
"""Fields that change no text here."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to continue."""

    tokens: Sequence[int]
    text: str = ""
    """What `echo` repeats."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for."""

    prompts: Sequence[Prompt]
    count: int
    """Texts of each prompt."""
    max_new: int | None
    """None is as many tokens as there is room for."""
    sampling: Sampling
    """Of the first text of each prompt; the seeds of the others follow its."""
    stops: Sequence[str]
    logprobs: int | None
    chat: bool = False
    echo: bool = False
    stream: bool = False
    usage: bool = False
    """A stream ends with the usage."""
    drafts: bool = False
    """A stream tells which drafted tokens were accepted and rejected."""

    def requests(self, served: Served) -> list[Request]:
        """What the engine is asked for: all texts of the first prompt, then those of the second, …

        A text that would be longer than the context has room for ends there, as its `finish_reason` says.

        Raises:
            RequestError: a prompt leaves no room.
        """
        found = []
        for prompt in self.prompts:
            room, most = served.context - len(prompt.tokens), self.max_new
            if room < 0 or (room == 0 and most != 0):
                raise invalid(
                    f"the prompt has {len(prompt.tokens)} tokens, which leaves no room in the context of "
                    f"{served.context}",
                    "messages" if self.chat else "prompt",
                    "context_length_exceeded",
                )
            wanted = min(served.max_tokens if most is None else most, room)
            for number in range(self.count):
                sampling = replace(self.sampling, seed=(self.sampling.seed + number) % 2**63)
                found.append(
                    Request(
                        tokens=prompt.tokens,
                        max_new=wanted,
                        sampling=sampling,
                        stop=served.stop,
                        logprobs=self.logprobs,
                        prompt_logprobs=self.echo and self.logprobs is not None,
                    )
                )
        return found


def completion(content: Any, served: Served) -> Asked:
    """Of /v1/completions.

    Raises:
        RequestError: a field is wrong, or not supported.
    """
    fields = Fields(content)
    _common(fields, served)
    fields.only("suffix", [""], "text is generated behind the prompt only")
    count = fields.integer("n", 1, 1, TEXTS)
    fields.only("best_of", [1, count], "every text is returned")
    logprobs = fields.integer("logprobs", -1, 0, TOP)
    asked = Asked(
        prompts=_prompts(fields, served),
        count=count,
        max_new=fields.integer("max_tokens", 16, 0, served.max_tokens),
        sampling=_sampling(fields),
        stops=fields.texts("stop", STOPS, STOP_LENGTH),
        logprobs=None if logprobs < 0 else logprobs,
        echo=fields.flag("echo"),
        **_streaming(fields),
    )
    fields.finish()
    return asked


def chat(content: Any, served: Served) -> Asked:
    """Of /v1/chat/completions.

    Raises:
        RequestError: a field is wrong or not supported, or the model has no chat template.
    """
    if served.template is None:
        raise invalid(f"`{served.name}` has no chat template; use /v1/completions", "messages", "no_chat_template")
    fields = Fields(content)
    _common(fields, served)
    for name in ("tools", "functions"):
        fields.only(name, [[]], "this server calls no tools")
    for name in ("tool_choice", "function_call"):
        fields.only(name, ["none", "auto"], "this server calls no tools")
    fields.only("response_format", [{"type": "text"}], "text is not constrained to a format")
    fields.only("modalities", [["text"]], "text is all that the model writes")
    for name in ("audio", "web_search_options", "reasoning_effort", "verbosity"):
        fields.only(name, [], "the model knows nothing of it")
    listed, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 0, TOP)
    if top and not listed:
        raise fields.wrong("top_logprobs", "needs `logprobs` to be true")
    limits = [fields.integer(name, -1, 1, served.max_tokens) for name in ("max_completion_tokens", "max_tokens")]
    arguments = _template_arguments(fields)
    asked = Asked(
        prompts=[Prompt(tokens=_conversation(fields, served, arguments))],
        count=fields.integer("n", 1, 1, TEXTS),
        max_new=next((limit for limit in limits if limit > 0), None),
        sampling=_sampling(fields),
        stops=fields.texts("stop", STOPS, STOP_LENGTH),
        logprobs=top if listed else None,
        chat=True,
        **_streaming(fields),
    )
    fields.finish()
    return asked


def _common(fields: Fields, served: Served) -> None:
    """What both kinds have and nothing more is made of."""
    name = fields.text("model")
    if name is not None and name != served.name:
        raise RequestError(
            404, f"there is no model `{name[:100]}`; this is `{served.name}`", param="model", code="model_not_found"
        )
    for penalty in ("frequency_penalty", "presence_penalty"):
        fields.only(penalty, [0, 0.0], "use `repetition_penalty`")
    fields.only("logit_bias", [{}], "probabilities are the model's own")
    fields.only("service_tier", ["auto", "default"], "there is only one")
    fields.only("store", [False], "nothing is stored")
    fields.ignore(*_HARMLESS)


def _sampling(fields: Fields) -> Sampling:
    temperature, top_p = fields.number("temperature", 1.0, 0.0, 100.0), fields.number("top_p", 1.0, 0.0, 1.0)
    seed = fields.integer("seed", -1, -(2**63), 2**64)
    return Sampling(
        temperature=temperature,
        top_k=max(fields.integer("top_k", 0, -1, 2**31), 0),
        top_p=top_p or 1e-9,  # OpenAI allows 0, which leaves the likeliest token
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        seed=seed % 2**63 if fields.get("seed") is not None else secrets.randbits(63),
    )


def _streaming(fields: Fields) -> dict[str, bool]:
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "needs `stream` to be true")
    inner = Fields({} if options is None else options, "stream_options")
    usage = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.finish()
    drafts = fields.flag("draft_tokens")
    if drafts and (not stream or fields.get("stop")):  # drafted tokens could be those of a stop string
        raise fields.wrong("draft_tokens", "needs `stream` to be true, and no `stop`")
    return {"stream": stream, "usage": usage, "drafts": drafts}


def _prompts(fields: Fields, served: Served) -> list[Prompt]:
    """One text, several, the tokens of one, or those of several."""
    value = fields.get("prompt")
    if value is None:
        value = ""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= TEXTS:
        raise fields.wrong("prompt", f"is neither a text, nor tokens, nor a list of up to {TEXTS} of them")
    return [_prompt(each, fields, served) for each in value]


def _prompt(value: Any, fields: Fields, served: Served) -> Prompt:
    tokenizer = served.tokenizer
    if is_text(value):
        return Prompt(tokens=tokenizer.encode_prompt(value), text=value)
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise fields.wrong("prompt", "holds something that is neither a text nor tokens")
    if not all(0 <= token < tokenizer.vocab_size for token in value):
        raise fields.wrong("prompt", f"has a token that is not from 0 to {tokenizer.vocab_size - 1}")
    return Prompt(tokens=value, text=tokenizer.decode(value))


def _conversation(fields: Fields, served: Served, arguments: Mapping[str, Any]) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "is not a list of at least one message")
    found = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    assert served.template is not None
    try:
        return served.template.encode(found, arguments) or [served.tokenizer.end_of_text]
    except ConfigError as error:
        raise fields.wrong("messages", f"is not accepted: {error}") from error


def _message(content: Any, where: str) -> dict[str, str]:
    fields = Fields(content, where)
    role = fields.get("role")
    if role not in ROLES:
        raise fields.wrong("role", f"is not one of {', '.join(ROLES)}")
    value = fields.get("content")
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise fields.wrong("content", "is neither a text nor a list of parts")
    found = {
        "role": "system" if role == "developer" else role,
        "content": "".join(_part(each, fields) for each in parts),
    }
    if (name := fields.text("name")) is not None:
        found["name"] = name
    for other in ("tool_calls", "function_call", "audio"):
        fields.only(other, [[]], "text is all that a message holds")
    fields.ignore("refusal", "annotations")
    fields.finish()
    return found


def _part(part: Any, fields: Fields) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not is_text(text):
        raise fields.wrong("content", "holds a part that is not text")
    return text


def _template_arguments(fields: Fields) -> dict[str, Any]:
    """Further variables of the chat template, such as `enable_thinking`."""
    values = fields.get("chat_template_kwargs")
    if values is None:
        return {}
    plain = isinstance(values, dict) and all(
        value is None or isinstance(value, bool | int | float) or is_text(value) for value in values.values()
    )
    if not plain or values.keys() & {"messages", "tools", "documents", "add_generation_prompt"}:
        raise fields.wrong("chat_template_kwargs", "is not an object of plain values for variables of the template")
    return values
