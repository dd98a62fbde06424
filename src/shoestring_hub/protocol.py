"""Constants and rules that the client and the server of the hub share: sizes, limits, and valid paths in a run folder.

A file is transferred in chunks of `CHUNK` bytes, each named by its SHA-256. A push that was interrupted therefore sends
only the missing chunks, and chunks may arrive twice and in any order. `metrics.jsonl` grows while a run trains and is
rewritten when the run resumes, so it is transferred as a log: a request replaces all bytes from `at` on, and the hub
carries the request out only if its log still has the size and the attempt number that the client last saw.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath

CHUNK = 4 << 20
"""Size of the chunks of a file, in bytes; the last one may be shorter."""
LOG = "metrics.jsonl"
"""Name of the file that is transferred as a log."""
LOG_PART = 1 << 20
"""Maximum number of bytes of a log in one request."""
BATCH = 32 << 20
"""Approximate number of bytes of files that are read, sent and committed together."""
PATH_LIMIT = 1000
"""Maximum length of a path inside a run folder, in characters."""
FILES_LIMIT = 10_000
"""Maximum number of files of a run."""
CLIP_LIMIT = 2 << 30
"""Maximum size of a clip as it is sent, in bytes."""
CHECKPOINTS = "checkpoints/"
"""Folder inside a run folder that is sent only on request."""
DIGEST = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[0-9a-f]{32}")
"""Pattern of a run's key, which the client draws at random at the first push and stores in the run folder."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def digest(data: bytes | memoryview) -> str:
    """The name of a chunk: SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def fault_of_path(path: str) -> str:
    """The reason why a path is not valid for a file in a run folder; empty if the path is valid."""
    if len(path) > PATH_LIMIT:
        return f"it has more than {PATH_LIMIT} characters"
    if _CONTROL.search(path):
        return "it holds control characters, or bytes that are not UTF-8"
    parts = path.split("/")
    if path != PurePosixPath(path).as_posix() or path.startswith("/") or not {"", ".", ".."}.isdisjoint(parts):
        return "it is not a path below the run folder"
    if any(len(part.encode()) > 255 for part in parts):
        return "it has a name of more than 255 bytes"
    return ""
