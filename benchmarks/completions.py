"""Asks a server for a text, as OpenAI's clients do."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen


def complete(address: tuple[str, int], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request to /v1/completions."""
    url, headers = f"http://{address[0]}:{address[1]}/v1/completions", {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=600) as answer:
        return json.load(answer)
