"""Sends a video file to the hub as a clip of a project or of a run."""

from __future__ import annotations

from pathlib import Path

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign
from shoestring_hub.client.connection import Connection, HubError
from shoestring_hub.client.logins import login_for
from shoestring_hub.client.push import ATTEMPTS, send_chunks, take_snapshot
from shoestring_hub.client.run_files import key_of
from shoestring_hub.protocol import CLIP_LIMIT


def send_clip(
    file: Path, *, run: Path | None = None, project: str = "", title: str = "", patience: float = 60.0
) -> str:
    """Send a video file in checked chunks; an interrupted command continues with the chunks that the hub lacks.

    Args:
        run: folder of the run that the clip belongs to, which must be on the hub; None if it belongs to the project.
        title: name of the clip; defaults to the name of the file.
        patience: seconds for which a request is tried again while the hub cannot be reached.

    Returns:
        A line for the user, which names the page of the clip.

    Raises:
        ConfigError: there is no login, the file cannot be opened, or it is empty or too large.
        DataError: the file keeps changing while it is sent.
        ShoestringError: the hub refuses the clip or cannot be reached.
    """
    connection = Connection(login_for(project), patience)
    facts = {"name": title or Path(file).name, "run": key_of(Path(run)) if run else ""}
    try:
        opened = foreign.open_file(Path(file))
    except OSError as error:
        raise ConfigError(f"cannot open `{file}`: {error.strerror}") from error
    with opened:
        sent = 0
        for _ in range(ATTEMPTS):
            snapshot = take_snapshot(Path(file).name, opened)
            if not 0 < snapshot.size <= CLIP_LIMIT:
                raise ConfigError(f"`{file}` has {figures.size(snapshot.size)}, not 1 B to {figures.size(CLIP_LIMIT)}")
            clip = facts | {"size": snapshot.size, "chunks": snapshot.chunks}
            try:
                answer = connection.ask("POST", "clips", clip)
            except HubError as error:
                if error.status != 409 or "missing" not in error.facts:
                    raise
            else:
                connection.close()
                page = f"{connection.login.address.rstrip('/')}{answer['page']}"
                return f"{page}: {figures.size(sent)} were sent; the hub converts the clip now"
            count, _ = send_chunks(connection, [snapshot])
            sent += count
    raise DataError(f"`{file}` keeps changing while it is sent", hint="send it once it is finished")
