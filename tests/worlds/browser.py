"""Opens pages in a real browser, headless, without a network; for tests.

opened = open_page(browser(), path, probe="return document.title", work=tmp_path)
opened.answer      what the probe returned, after the page's scripts have run
opened.console     everything that was written to the console
opened.resources   addresses of all that the page loaded, or tried to
"""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

PROBE = """
<pre id="answer-of-the-probe"></pre>
<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
async function probe() { %s }
(async () => {
  const answer = {};
  try {
    for (let tries = 0; !document.documentElement.dataset.ready && tries < 500; tries++)
      await new Promise((resolve) => setTimeout(resolve, 20));
    answer.ready = document.documentElement.dataset.ready || "never";
    answer.value = await probe();
  } catch (error) { errors.push(String(error.stack || error)); }
  answer.errors = errors;
  answer.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.getElementById("answer-of-the-probe").textContent = JSON.stringify(answer);
})();
</script>
"""

NARROWEST = 500
"""Pixels: a window of the browser is no narrower, whatever it is asked for; a narrower page lies in a frame of it."""

FRAME = """<!DOCTYPE html>
<html><body style="margin: 0">
<iframe style="border: 0; width: %dpx; height: %dpx" srcdoc="%s"></iframe>
<pre id="answer-of-the-probe"></pre>
<script>
(async () => {
  const answer = () => frames[0].document.getElementById("answer-of-the-probe")?.textContent;
  while (!answer()) await new Promise((resolve) => setTimeout(resolve, 20));
  document.getElementById("answer-of-the-probe").textContent = answer();
})();
</script>
</body></html>
"""


@dataclass(frozen=True)
class Opened:
    answer: Any
    console: list[str]
    resources: list[str]
    ready: str
    """"yes" once the page has drawn what it has to draw."""


def browser() -> str:
    """The program; a test that needs it fails where there is none, and says what to do."""
    named = os.environ.get("HF_LONGCTX_BROWSER")
    path = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        tried = f"HF_LONGCTX_BROWSER={named} is no program" if named else f"none of {', '.join(NAMES)} is on the PATH"
        pytest.fail(
            f"this test opens a page in a browser, and {tried}. Install one (Debian, Ubuntu: apt-get install chromium), or set "
            'HF_LONGCTX_BROWSER=/path/to/chrome, or leave these tests out with -m "not browser"',
            pytrace=False,
        )
    return path


def open_page(
    program: str,
    page: Path,
    work: Path,
    probe: str = "",
    *,
    size: tuple[int, int] = (1280, 1600),
    screenshot: Path | None = None,
    dark: bool = False,
) -> Opened:
    """Opens a copy of the page that also runs `probe`, the body of an async function, when the page is ready.

    Time in the page is virtual: it does not pass while a script runs, so a busy machine fails no test.
    """
    text = page.read_text(encoding="utf-8")
    assert text.count("</body>") == 1
    copy = work / f"{page.stem}-probed.html"
    text = text.replace("</body>", PROBE % probe + "</body>")
    copy.write_text(text if size[0] >= NARROWEST else FRAME % (*size, escape(text)), encoding="utf-8")
    ran = subprocess.run(
        [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=30000",
            "--enable-logging=stderr",
            f"--user-data-dir={work / 'profile'}",
            f"--window-size={max(size[0], NARROWEST)},{size[1]}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *([f"--screenshot={screenshot}"] if screenshot else []),
            "--dump-dom",
            copy.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )
    match = re.search(r'<pre id="answer-of-the-probe">(.+?)</pre>', ran.stdout, re.S)
    assert ran.returncode == 0, f"the browser ended with {ran.returncode}:\n{ran.stderr[-3000:]}"
    assert match, f"the probe gave no answer:\n{ran.stderr[-3000:]}"
    answer = json.loads(unescape(match.group(1)))
    assert not answer["errors"], answer["errors"]
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    return Opened(answer.get("value"), console, answer["resources"], answer["ready"])
