"""A page in a real browser, without one of its drivers: the page itself writes down what a test wants to know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CATCH = """<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective));
</script>"""
PROBE = """<script>
const seen = {};
try { %s } catch (error) { faults.push(String(error)); }
document.body.append(Object.assign(document.createElement("pre"),
  { id: "probe", textContent: JSON.stringify({ ...seen, faults }) }));
</script></body>"""


def opened(page: str, script: str, folder: Path, *options: str) -> dict[str, Any]:
    """What `script` has put into `seen` at the end of a copy of the page, and "faults", the errors of all scripts."""
    if BROWSER is None:
        pytest.skip("chromium is not installed")
    file = folder / "page.html"
    file.write_text(page.replace("<head>", f"<head>{CATCH}", 1).replace("</body>", PROBE % script, 1), "utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", *options)
    command = [BROWSER, *flags, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probe is not None, done.stderr[-2000:]
    return json.loads(unescape(probe[1]))
