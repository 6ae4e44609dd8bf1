"""A headless Chromium for tests: finds one, opens a page in it without network, and says what the
page shows.

Talks the DevTools protocol over the browser's own pipe, so that nothing but a browser has to be
installed. `scripts/get_browser.py` fetches one where there is none.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from support import ROOT

FETCHED = ROOT / ".browser" / "chromium"
"""Where `scripts/get_browser.py` puts it."""
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # as root in a container there is none to be had; the pages are our own
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SECONDS = 60

MEASURE = """(() => {
  const box = (element) => { const r = element.getBoundingClientRect();
    return {text: element.textContent.trim(),
      left: r.left, right: r.right, top: r.top, bottom: r.bottom}; };
  return {
    background: getComputedStyle(document.body).backgroundColor,
    width: innerWidth, page_width: document.documentElement.scrollWidth,
    page_height: document.documentElement.scrollHeight,
    charts: [...document.querySelectorAll("svg")].map((svg) => ({
      ...box(svg), text: svg.getAttribute("aria-label"),
      texts: [...svg.querySelectorAll("text")].map(box),
      shapes: [...svg.querySelectorAll("path, rect")].map(box)})),
    images: [...document.querySelectorAll("img")].map(
      (img) => ({...box(img), natural: img.naturalWidth})),
    blocks: [...document.querySelectorAll(
      "h1, h2, h3, p, th, td, .card b, .card span, figure, .figure, .load > b, .content"
    )].map((element) => ({
      ...box(element), clipped: element.scrollWidth > element.clientWidth + 1})),
  };
})()"""
"""What a person would look at, in CSS pixels."""


class Page:
    """An open page."""

    def __init__(self, process: subprocess.Popen, write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._number, self._buffer, self._session = 0, b"", None
        self.events: list[dict] = []
        """All that the browser reported, in order."""

    def start(self) -> None:
        """Open an empty page, and let it report everything."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1000, dark: bool = False) -> None:
        """Load a file at a width in CSS pixels, in light or dark mode."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")

    def measure(self) -> dict:
        """Geometry of the page: see MEASURE."""
        return self.call("Runtime.evaluate", expression=MEASURE, returnByValue=True)["result"][
            "value"
        ]

    def screenshot(self, target: Path) -> None:
        """A PNG of the whole page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[dict]:
        """What the browser's console would show: messages, exceptions, failed loads."""
        methods = {
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Network.loadingFailed",
        }
        return [event for event in self.events if event["method"] in methods]

    def requests(self) -> list[str]:
        """What the page asked for, `data:` URIs left out."""
        asked = [
            e["params"]["request"]["url"]
            for e in self.events
            if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("data:")]

    def call(self, method: str, **params: object) -> dict:
        """Send a command; -> its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda message: message.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _wait(self, is_it) -> dict:
        end = time.monotonic() + SECONDS
        while not is_it(message := self._receive(end)):
            if "method" in message:
                self.events.append(message)
        return message

    def _receive(self, end: float) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, (
                f"the browser {'left' if ready else 'is silent'}: status {self._process.poll()}"
            )
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def find_browser() -> str | None:
    """The program that `ISOBATCH_BROWSER` names, the fetched one, or one in PATH; None if there is
    none.
    """
    candidates = [os.environ.get("ISOBATCH_BROWSER"), str(FETCHED), *NAMES]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


@contextmanager
def open_browser(program: str, profile: Path):
    """A `Page` of a browser that ends with the block."""
    (from_test, write), (read, to_test) = os.pipe(), os.pipe()
    # the browser reads commands from descriptor 3 and answers on 4
    redirected = ["bash", "-c", f'exec "$@" 3<&{from_test} 4>&{to_test}', "bash"]
    process = subprocess.Popen(
        [*redirected, program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(from_test, to_test),
        stderr=subprocess.DEVNULL,
    )
    os.close(from_test)
    os.close(to_test)
    try:
        page = Page(process, write, read)
        page.start()
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
