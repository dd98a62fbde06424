"""The sink `hub` of `run.sinks`: sends the metrics of a run to the hub while it trains."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring.core.errors import ShoestringError
from shoestring_hub.client.connection import Connection, HubError
from shoestring_hub.client.logins import login_for
from shoestring_hub.client.metrics_log import MetricsLog, SupersededError
from shoestring_hub.client.push import send_files
from shoestring_hub.client.run_files import key_of
from shoestring_hub.protocol import LOG

log = logging.getLogger("shoestring")

PERIOD = 1.0
"""Seconds between two checks of the metrics file for new rows."""
OUTAGE = 5.0
"""Seconds between two attempts while the hub cannot be reached."""
AT_END = 5.0
"""Maximum number of seconds that the end of a run waits for the hub."""
DESCRIBING = ("run.toml", "environment.json", "history.jsonl")
"""Files that are sent at the start; the hub's table of runs takes the settings from them."""


class HubSink:
    """Sends the run's `metrics.jsonl` from a thread. Training never waits for the thread, whose errors are only logged.

    Rows that the hub lacks stay in the file: the thread sends them as soon as the hub answers, and `shoestring hub
    push` sends the rest once the run has ended.

    Raises:
        ConfigError: there is no login to a hub; raised only by the constructor.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        connection = Connection(login_for(), patience=0.0, timeout=AT_END)
        self._log = MetricsLog(connection, key_of(self.folder), name, begin=True)
        self._end, self._until = threading.Event(), math.inf
        self._described = self._away = self._over = False
        self._thread = threading.Thread(target=self._follow, name="hub", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: the row has already been written to the file, from which the thread reads it."""

    def close(self) -> None:
        """Wait at most `AT_END` seconds until the hub has all rows."""
        self._until = time.monotonic() + AT_END
        self._end.set()
        self._thread.join(AT_END)
        if self._thread.is_alive() or self._away:
            log.warning("the hub does not have all metrics yet; send them with: shoestring hub push %s", self.folder)

    def _follow(self) -> None:
        """Send new rows until the run has ended and all rows are sent, or until the time limit at the end is over."""
        ended = False
        while not self._over and not (ended and not self._away) and time.monotonic() < self._until:
            ended = self._end.is_set()
            self._send_new()
            if ended:
                time.sleep(AT_END / 10 if self._away else 0.0)
            else:
                self._end.wait(OUTAGE if self._away else PERIOD)
        self._log.connection.close()

    def _send_new(self) -> None:
        """Send what the hub lacks; if the hub refuses the request, stop sending for good."""
        try:
            if (self.folder / LOG).exists():
                self._log.catch_up(self.folder / LOG)
            if not self._described:
                send_files(self._log.connection, self._log.key, self.folder, DESCRIBING)
                self._described = True
                log.info("hub: %s", self._log.page)
            if self._away:
                log.info("the hub answers again")
            self._away = False
        except Exception as error:  # training continues whatever the error
            reason = error.parts()[1] if isinstance(error, ShoestringError) else f"{type(error).__name__}: {error}"
            self._over = isinstance(error, SupersededError) or (isinstance(error, HubError) and error.is_final)
            if self._over:
                log.warning("no more metrics go to the hub: %s", reason)
            elif not self._away:
                log.warning("metrics wait in %s until the hub answers: %s", self.folder / LOG, reason)
            self._away = True
