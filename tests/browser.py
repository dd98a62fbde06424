"""Chromium without a window, driven through its debugging pipe."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; CI installs one")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
    "about:blank",
)
# What no scrolling of its containers brings into view: elements, and texts, which may be wider than their element.
CUT = """(() => {
  const cut = [], shows = (node) => `${node.nodeName} ${node.className ?? ""} ${node.textContent.trim().slice(0, 40)}`;
  const reached = (box, from) => {
    for (let at = from; at && at !== document.body; at = at.parentElement) {
      const across = getComputedStyle(at).overflowX, frame = at.getBoundingClientRect();
      if (across === "auto" || across === "scroll") box = frame;
      else if (across !== "visible" && (box.right > frame.right + 1 || box.left < frame.left - 1)) return false;
    }
    return box.right <= document.documentElement.clientWidth + 1 && box.left >= -1;
  };
  const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    const text = node.nodeType === Node.TEXT_NODE, element = text ? node.parentElement : node;
    if (element.closest(".unseen, script") || (text && !node.textContent.trim())) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = text ? [...range.getClientRects()] : [node.getBoundingClientRect()];
    if (boxes.some((box) => box.width && box.height && !reached(box, element))) cut.push(shows(node));
  }
  return cut;
})()"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """One page. Messages end with a null byte: the browser reads them from descriptor 3 and writes them to 4."""

    def __init__(self, width=900, height=760, mobile=False):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self.out = os.pipe()
        self.into, ours = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{ours}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", command, CHROMIUM, f"--user-data-dir={self.profile.name}", *FLAGS],
            pass_fds=(theirs, ours),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self.held, self.numbers, self.session = b"", itertools.count(1), None
        self.problems = []  # what the page logged as an error, and what its policy refused
        self.prefetches = []  # what becomes of pages that speculation rules name, once `Preload.enable` was called
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def call(self, method, **parameters):
        """The result of a command of the DevTools protocol."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(answer["params"])
            elif answer.get("method") == "Preload.prefetchStatusUpdated":
                self.prefetches.append((answer["params"]["prefetchUrl"], answer["params"]["status"]))

    def _next(self):
        while b"\0" not in self.held:
            part = os.read(self.into, 1 << 20)
            assert part, "the browser has ended"
            self.held += part
        first, self.held = self.held.split(b"\0", 1)
        return json.loads(first)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression, seconds=15.0):
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def press(self, key):
        code, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def point(self, selector):
        """The middle of an element, after scrolling it into view."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{ block: 'center' }})")
        return self.value(f"(({{ x, y, width, height }}) => [x + width / 2, y + height / 2])({box})")

    def mouse(self, kind, x, y):
        """A mouse event: `mouseMoved`, `mousePressed` or `mouseReleased`."""
        button = "none" if kind == "mouseMoved" else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def click(self, selector):
        x, y = self.point(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def write(self, text):
        self.call("Input.insertText", text=text)

    def cut(self):
        """Elements and texts that are cut at the left or right: no scrolling brings all of them into view."""
        return self.value(CUT)

    def dark(self, on=True):
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.profile.cleanup()
