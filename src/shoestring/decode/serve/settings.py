"""The documented import path of the server's settings, which `decode.settings.serving` defines."""

from __future__ import annotations

from shoestring.decode.settings.serving import Serving, is_loopback, read_keys

__all__ = ["Serving", "is_loopback", "read_keys"]
