"""Parses and checks the fields of a request, and encodes its prompts; does not import torch.

Lengths and counts are compared with the size of the context before any text is rendered or encoded.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoestring.core.errors import ConfigError, DataError
from shoestring.decode.serve.answer_format import read_format
from shoestring.decode.serve.call_grammars import call_grammar
from shoestring.decode.serve.conversation import Message, check_length, encode, read_items, read_messages
from shoestring.decode.serve.errors import invalid, too_long
from shoestring.decode.serve.fields import RequestFields, is_text
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_calls import Calling
from shoestring.decode.serve.tool_fields import Tools, read_tools
from shoestring.decode.settings.generation import BIAS, PENALTY, AnswerFormat, LogitChanges, Sampling, SamplingRule

STOPS, STOP_LENGTH = 16, 256
"""Largest number of stop strings, and largest number of characters of one stop string."""
TEXTS = 128
"""Largest number of prompts in a request, and largest number of texts for one prompt."""
BIASES = 1024
"""Largest number of tokens in `logit_bias`."""
TOP = 20
"""Largest number of likeliest tokens that are listed at each position."""

_HARMLESS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)
"""Fields of OpenAI's API that are accepted and ignored."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, as tokens."""

    tokens: Sequence[int]
    text: str = ""
    """The prompt as text; empty unless the answer repeats the prompt."""
    added: int = 0
    """Number of leading tokens that the tokenizer has put before the text; the answer does not repeat these."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out where the answer repeats the prompt."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A parsed and checked request."""

    prompts: Sequence[Prompt]
    count: int
    """Number of texts for each prompt."""
    max_new: int | None
    """Largest number of tokens of a text; None allows as many as the context has room for."""
    sampling: Sampling
    """Sampling settings of the first text of each prompt; further texts of the prompt use the next seeds."""
    stops: Sequence[str]
    """Stop strings."""
    logprobs: int | None
    """Number of likeliest tokens whose log-probabilities are returned; None returns no log-probabilities."""
    changes: LogitChanges = field(default_factory=LogitChanges)
    answer_format: AnswerFormat | None = None
    """Format that the texts must have; None allows any text."""
    format_field: str = ""
    """Field of the request that sets the format; empty if no format is set."""
    calling: Calling | None = None
    """How the answer may call tools; None if it must not call any."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request to /v1/responses that the answer repeats."""
    echo: bool = False
    """Whether the answer repeats the prompt."""
    stream: bool = False
    """Whether the answer is streamed."""
    usage: bool = False
    """Whether the last event of a stream before [DONE] holds the token counts."""
    drafts: bool = False
    """Whether a stream reports which drafted tokens were accepted and which were rejected."""
    model: str | None = None
    """Name of the model or adapter that generates the text; None selects the model."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    stop_token_ids: Sequence[int] = ()
    """Ids of tokens that end the text, in addition to the tokens that end every text."""


def completion(content: Any, served: Served) -> Asked:
    """Parse a request to /v1/completions.

    Raises:
        RequestError: a field is wrong, or not supported.
    """
    fields = RequestFields(content)
    _common(fields, served)
    fields.only("suffix", [""], "text is generated behind the prompt only")
    count = fields.integer("n", 1, 1, TEXTS)
    fields.only("best_of", [1, count], "every text is returned")
    logprobs, echo = fields.integer("logprobs", -1, 0, TOP), fields.flag("echo")
    # One text, a list of texts, the token ids of one text, or a list of the token ids of several texts.
    value = fields.get("prompt")
    if value is None:
        value = ""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= TEXTS:
        raise fields.wrong("prompt", f"is neither a text, nor tokens, nor a list of up to {TEXTS} of them")
    asked = Asked(
        prompts=[_prompt(prompt, fields, served, echo) for prompt in value],
        count=count,
        max_new=fields.integer("max_tokens", 16, 0, served.max_tokens),
        sampling=_sampling(fields, served.defaults.rule),
        changes=_changes(fields, served),
        **read_format(fields),
        logprobs=None if logprobs < 0 else logprobs,
        echo=echo,
        **_shown(fields, served),
        **_streaming(fields),
    )
    fields.finish()
    return _fitting(asked, served, "prompt")


def chat(content: Any, served: Served) -> Asked:
    """Parse a request to /v1/chat/completions.

    Raises:
        RequestError: a field is wrong or not supported, or the model has no chat template.
    """
    if not served.chat:
        raise invalid(f"`{served.name}` has no chat template; use /v1/completions", "messages", "no_chat_template")
    fields = RequestFields(content)
    _common(fields, served)
    fields.only("functions", [[]], "use `tools`")
    fields.only("function_call", ["none", "auto"], "use `tool_choice`")
    fields.only("add_special_tokens", [False], "the chat template writes them")
    fields.only("modalities", [["text"]], "text is all that the model writes")
    for name in ("audio", "web_search_options", "reasoning_effort", "verbosity"):
        fields.only(name, [], "the model knows nothing of it")
    listed, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 0, TOP)
    if top and not listed:
        raise fields.wrong("top_logprobs", "needs `logprobs` to be true")
    limits = [fields.integer(name, -1, 1, served.max_tokens) for name in ("max_completion_tokens", "max_tokens")]
    tools = read_tools(fields)
    prompt, calling = _conversation(fields, "messages", read_messages(fields, served), tools, served)
    asked = Asked(
        prompts=[prompt],
        count=fields.integer("n", 1, 1, TEXTS),
        max_new=next((limit for limit in limits if limit > 0), None),
        sampling=_sampling(fields, served.defaults.rule),
        changes=_changes(fields, served),
        **_format(fields, "response_format", tools, calling, served),
        logprobs=top if listed else None,
        calling=calling,
        **_shown(fields, served),
        **_streaming(fields),
    )
    # A report on drafts counts characters of the accepted tokens, but characters of calls are not shown as text.
    if calling is not None and asked.drafts:
        raise fields.wrong("draft_tokens", "needs a request without `tools`")
    fields.finish()
    return _fitting(asked, served, "messages")


def response(content: Any, served: Served) -> Asked:
    """Parse a request to /v1/responses.

    Raises:
        RequestError: a field is wrong or not supported, or the model has no chat template.
    """
    if not served.chat:
        raise invalid(f"`{served.name}` has no chat template; use /v1/completions", "input", "no_chat_template")
    fields = RequestFields(content)
    _common(fields, served)
    for name in ("previous_response_id", "conversation", "prompt"):
        fields.only(name, [], "nothing is stored; send the whole conversation as `input`")
    fields.only("background", [False], "nothing is stored")
    fields.only("include", [[], ["reasoning.encrypted_content"]], "the answer has nothing further to include")
    fields.only("truncation", ["disabled"], "an input that is too long is refused")
    fields.only("top_logprobs", [0], "use /v1/chat/completions")
    for name in ("reasoning", "context_management", "max_tool_calls"):
        fields.only(name, [], "the model knows nothing of it")
    tools = read_tools(fields, flat=True)
    prompt, calling = _conversation(fields, "input", read_items(fields, served), tools, served)
    limit = fields.integer("max_output_tokens", -1, 1, served.max_tokens)
    sampling, stream = _sampling(fields, served.defaults.rule), fields.flag("stream")
    options = RequestFields(fields.get("stream_options") or {}, "stream_options")
    options.ignore("include_obfuscation")
    options.finish()
    asked = Asked(
        prompts=[prompt],
        count=1,
        max_new=limit if limit > 0 else None,
        sampling=sampling,
        changes=_changes(fields, served),
        **_format(fields, "text", tools, calling, served),
        logprobs=None,
        calling=calling,
        stream=stream,
        repeated={
            "instructions": fields.get("instructions"),
            "max_output_tokens": limit if limit > 0 else None,
            "model": fields.get("model") or served.name,
            "parallel_tool_calls": tools.parallel,
            "temperature": sampling.temperature,
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_p": sampling.top_p,
        },
        **_shown(fields, served),
    )
    fields.finish()
    return _fitting(asked, served, "input")


def _fitting(asked: Asked, served: Served, name: str) -> Asked:
    """Return the request if each of its prompts leaves room for a token in the context; else raise a `RequestError`
    about the field `name`."""
    for prompt in asked.prompts:
        room = served.context - len(prompt.tokens)
        if room < 0 or (room == 0 and asked.max_new != 0):
            raise too_long(served.context, f"{len(prompt.tokens)} tokens", name)
    return asked


def _common(fields: RequestFields, served: Served) -> None:
    """Check the fields that completions and chats share and that do not change the text."""
    fields.only("service_tier", ["auto", "default"], "there is only one")
    fields.only("store", [False], "nothing is stored")
    fields.ignore(*_HARMLESS)


def _sampling(fields: RequestFields, default: SamplingRule) -> Sampling:
    temperature = fields.number("temperature", default.temperature, 0.0, 100.0)
    top_p = fields.number("top_p", default.top_p, 0.0, 1.0)
    seed = fields.integer("seed", -1, -(2**63), 2**64)
    try:
        return Sampling(
            temperature=temperature,
            top_k=max(fields.integer("top_k", default.top_k, -1, 2**31), 0),
            top_p=top_p or 1e-9,  # OpenAI allows 0, which leaves only the likeliest token
            min_p=fields.number("min_p", default.min_p, 0.0, 1.0),
            repetition_penalty=fields.number("repetition_penalty", default.repetition_penalty, 0.01, 100.0),
            seed=seed % 2**63 if fields.get("seed") is not None else secrets.randbits(63),
        )
    except ConfigError as error:
        raise invalid(str(error)) from error


def _changes(fields: RequestFields, served: Served) -> LogitChanges:
    value = fields.get("logit_bias")
    if value is None:
        value = {}
    if not isinstance(value, dict) or len(value) > BIASES:
        raise fields.wrong("logit_bias", f"is not an object of up to {BIASES} tokens")
    inner = RequestFields(value, "logit_bias")
    bias = {_token(name, fields, served): inner.number(name, 0.0, -BIAS, BIAS) for name in value}
    penalties = {
        name: fields.number(name, 0.0, -PENALTY, PENALTY) for name in ("presence_penalty", "frequency_penalty")
    }
    return LogitChanges(bias={token: number for token, number in bias.items() if number}, **penalties)


def _token(name: str, fields: RequestFields, served: Served) -> int:
    """Parse a key of `logit_bias` to a token id."""
    if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < served.vocabulary):
        problem = f"has the token {name[:20]!r}, which is not from 0 to {served.vocabulary - 1}"
        raise fields.wrong("logit_bias", problem)
    return int(name)


def _shown(fields: RequestFields, served: Served) -> dict[str, Any]:
    """Parse the fields that say how a text ends and whether special tokens are shown."""
    ends = fields.get("stop_token_ids") or []
    if not isinstance(ends, list) or len(ends) > STOPS or not all(type(token) is int for token in ends):
        raise fields.wrong("stop_token_ids", f"is not a list of up to {STOPS} tokens")
    if not all(0 <= token < served.vocabulary for token in ends):
        raise fields.wrong("stop_token_ids", f"has a token that is not from 0 to {served.vocabulary - 1}")
    return {
        "model": fields.text("model"),
        "stops": fields.texts("stop", STOPS, STOP_LENGTH),
        "stop_token_ids": ends,
        "skip_special_tokens": fields.flag("skip_special_tokens", default=True),
    }


def _streaming(fields: RequestFields) -> dict[str, Any]:
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "needs `stream` to be true")
    inner = RequestFields({} if options is None else options, "stream_options")
    usage = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.finish()
    drafts = fields.flag("draft_tokens")
    if drafts and (not stream or fields.get("stop")):  # reported drafts could contain a stop string
        raise fields.wrong("draft_tokens", "needs `stream` to be true, and no `stop`")
    return {"stream": stream, "usage": usage, "drafts": drafts}


def _prompt(value: Any, fields: RequestFields, served: Served, echo: bool) -> Prompt:
    """Encode and check one prompt."""
    if isinstance(value, str) and len(value) > served.characters:
        raise too_long(served.context, f"{len(value)} characters", "prompt")
    if isinstance(value, list) and len(value) > served.context:
        raise too_long(served.context, f"{len(value)} tokens", "prompt")
    tokenizer = served.tokenizer
    parse, add = fields.flag("parse_special", default=True), fields.flag("add_special_tokens", default=True)
    if is_text(value):
        try:
            tokens = tokenizer.encode_prompt(value, parse_special=parse, add_special_tokens=add)
        except ConfigError as error:
            raise fields.wrong("prompt", "has no tokens") from error
        except DataError as error:
            raise fields.wrong("prompt", "cannot be encoded by the model's tokenizer") from error
    elif isinstance(value, list) and value and all(type(token) is int for token in value):
        tokens = value
    else:
        raise fields.wrong("prompt", "holds something that is neither a text nor tokens")
    if not all(0 <= token < served.vocabulary for token in tokens):
        raise fields.wrong("prompt", f"has a token that is not from 0 to {served.vocabulary - 1}")
    if not echo:
        return Prompt(tokens=tokens)
    if isinstance(value, str):
        return Prompt(tokens=tokens, text=value, added=len(tokenizer.prefix) if add else 0, skip_special_tokens=False)
    skip = fields.flag("skip_special_tokens", default=True)
    return Prompt(tokens=tokens, text=tokenizer.decode(tokens, skip), skip_special_tokens=skip)


def _conversation(
    fields: RequestFields, name: str, messages: Sequence[Message], tools: Tools, served: Served
) -> tuple[Prompt, Calling | None]:
    """Render messages and tools to the prompt of a chat; also returns how the answer may call the tools.

    Args:
        name: the field that holds the conversation.
    """
    # Further variables of the chat template, such as `enable_thinking`.
    variables = fields.get("chat_template_kwargs")
    if variables is None:
        variables = {}
    are_plain = isinstance(variables, dict) and all(
        value is None or isinstance(value, bool | int | float) or is_text(value) for value in variables.values()
    )
    if not are_plain or variables.keys() & {"messages", "tools", "documents", "add_generation_prompt"}:
        raise fields.wrong("chat_template_kwargs", "is not an object of plain values for variables of the template")
    arguments = variables | ({"tools": tools.offered} if tools.offered else {})
    check_length(messages, arguments, name, served)
    calling = tools.calling(served.template_source) if tools.offered else None
    opening = "" if calling is None else calling.opening
    return Prompt(tokens=encode(messages, arguments, opening, fields, name, served)), calling


def _format(fields: RequestFields, name: str, tools: Tools, calling: Calling | None, served: Served) -> dict[str, Any]:
    """Parse the format of the answer, or write the grammar for tool calls; returns arguments of `Asked`."""
    wanted = read_format(fields, name)
    if calling is None:
        return wanted
    if wanted:
        raise fields.wrong(name, "has a format, and calls of `tools` have another; give one of the two")
    if not tools.constrained:
        return {}
    grammar = call_grammar(calling, served.template_source, tools.schemas, served.tokenizer)
    return {"answer_format": AnswerFormat("grammar", grammar), "format_field": "tools"}
