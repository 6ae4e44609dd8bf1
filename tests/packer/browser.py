"""A headless Chromium for tests: finds one, opens a page without network, and says what it shows.

Drives the program itself by its command line, so nothing else has to be installed. `scripts/get_browser.py` fetches one
where there is none.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FETCHED = Path(__file__).parents[2] / ".browser" / "chromium"
"""Where `scripts/get_browser.py` puts it."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root in a container there is none to be had; the pages are our own
    "--disable-gpu",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"
SECONDS = 60

MEASURE = """<script>addEventListener("load", () => {
  const box = (element) => { const r = element.getBoundingClientRect();
    return {text: element.textContent.trim(), left: r.left, right: r.right, top: r.top, bottom: r.bottom}; };
  const shown = {
    background: getComputedStyle(document.body).backgroundColor,
    width: innerWidth, page_width: document.documentElement.scrollWidth,
    page_height: document.documentElement.scrollHeight,
    loaded: performance.getEntriesByType("resource").map((e) => e.name).filter((name) => !name.startsWith("data:")),
    charts: [...document.querySelectorAll("svg")].map((svg) => ({...box(svg), text: svg.getAttribute("aria-label"),
      texts: [...svg.querySelectorAll("text")].map(box),
      shapes: [...svg.querySelectorAll("path, rect")].map(box)})),
    images: [...document.querySelectorAll("img")].map((img) => ({...box(img), natural: img.naturalWidth})),
    blocks: [...document.querySelectorAll("h1, h2, h3, p, th, td, .card b, .card span, figure, .figure")].map(
      (element) => ({...box(element), clipped: element.scrollWidth > element.clientWidth + 1})),
  };
  document.body.innerHTML = ""; document.body.dataset.shown = btoa(unescape(encodeURIComponent(JSON.stringify(shown))));
});</script>"""
"""Runs in a copy of the page, which has no scripts of its own, and leaves what it measured in the DOM."""


@dataclass(frozen=True)
class Browser:
    """A Chromium program."""

    program: str

    def measure(self, page: Path, folder: Path, *, width: int = 1000) -> dict:
        """Geometry of a page in CSS pixels, as MEASURE says; `console` are the messages that it caused."""
        copy = folder / f"measured-{page.name}"
        copy.write_text(page.read_text("utf-8").replace("</body>", MEASURE + "</body>"), "utf-8")
        done = self._run(folder, f"--window-size={width},900", LIGHT, "--dump-dom", copy.as_uri())
        import base64

        encoded = done.stdout.split('data-shown="')[1].split('"')[0]
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return json.loads(base64.b64decode(encoded)) | {"console": console}

    def screenshot(self, page: Path, target: Path, *, width: int = 1000, height: int = 900, dark: bool = False) -> None:
        """A PNG of the page's upper `height` CSS pixels."""
        scheme = DARK if dark else LIGHT
        size = f"--window-size={width},{height}"
        self._run(target.parent, size, scheme, f"--screenshot={target}", page.as_uri())

    def _run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
        command = [self.program, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)


def find_browser() -> Browser | None:
    """The browser that `ISOBATCH_BROWSER` names, the fetched one, or one in PATH; None if there is none."""
    candidates = [os.environ.get("ISOBATCH_BROWSER"), str(FETCHED), *NAMES]
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    return None if found is None else Browser(found)
