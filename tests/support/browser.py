"""A real headless Chromium that opens a page, acts on it by a script, and gives back what the page then says."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=6000",
)
CHROMIUM = shutil.which("chromium")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian's package)")

DRIVER = """<script>
const said = {}, faults = [];
addEventListener("error", (event) => faults.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => faults.push("csp " + event.violatedDirective));
const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
const set = (selector, value, kind) => { const e = document.querySelector(selector); if (e.type === "checkbox") e.checked = value; else e.value = value; e.dispatchEvent(new Event(kind)); };
setTimeout(async () => {
  try { %s } catch (error) { faults.push(String(error)); }
  const result = document.createElement("pre");
  result.id = "said"; result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify({ said, faults }))));
  document.body.append(result);
}, 100);
</script></body>"""  # noqa: E501 - JavaScript


def drive(page, script, folder):
    """Open `page`, HTML, act on it by `script`, which puts what it sees into ``said``; returns that.

    Fails where the page logs an error or breaks its own content policy.
    """
    target = folder / "driven.html"
    target.write_text(page.replace("</body>", DRIVER % script))
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1200,900", "--dump-dom", target.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    result = re.search(r'<pre id="said">([^<]*)</pre>', done.stdout)
    assert result, done.stderr[-2000:]
    found = json.loads(base64.b64decode(result[1]))
    assert not found["faults"], found["faults"]
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line], done.stderr
    return found["said"]
