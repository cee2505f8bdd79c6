"""Open .excalidraw files in the real Excalidraw and save what it shows: `python tools/check_excalidraw.py FILE ...`.

It needs node with npm, chromium, and a registry of npm packages; the packages (some 250 MB) go to a folder that
`--packages` names, "build/excalidraw" if it is not given, and stay there for the next time. For each FILE it writes
FILE.png and prints what Excalidraw's own `restore` has made of the file. Exit code: 0 if every element was kept as it
was, 1 if one was dropped or changed, 2 if a program is missing or gave no answer.

The tests check the fields of the format without any of this; run it after a change of `excalidraw.py`.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

PACKAGES = ("@excalidraw/excalidraw@0.18.1", "react@19", "react-dom@19", "esbuild@0.28")
ENTRY = """
import { exportToBlob, restore } from "@excalidraw/excalidraw";
const shown = (text) => { document.getElementById("result").textContent = text; };
const run = async () => {
  const given = JSON.parse(document.getElementById("drawing").textContent);
  const { elements, appState, files } = restore(structuredClone(given), null, null, { repairBindings: true });
  const blob = await exportToBlob({ elements, appState, files, mimeType: "image/png", exportPadding: 24 });
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  shown(JSON.stringify({ elements, png: btoa(text) }));
};
run().catch((error) => shown(JSON.stringify({ error: String(error && error.stack) })));
"""
TRIES = 4
"""On a busy machine the browser's clock can run out before a picture is made. That says nothing of the drawing."""
SET_BY_RESTORE = {"index", "versionNonce", "version", "updated", "boundElements", "lastCommittedPoint"}
"""What Excalidraw numbers anew whenever it loads a file."""


def bundle(packages: Path) -> str:
    """Excalidraw and the few lines above as one script."""
    packages.mkdir(parents=True, exist_ok=True)
    entry, script = packages / "entry.mjs", packages / "bundle.js"
    if not (packages / "node_modules").exists():
        (packages / "package.json").write_text("{}", "utf-8")
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES], cwd=packages, check=True)
    entry.write_text(ENTRY, "utf-8")
    esbuild = packages / "node_modules" / ".bin" / "esbuild"
    options = ("--bundle", "--format=iife", "--define:process.env.NODE_ENV='production'", "--define:import.meta={}")
    css = ("--loader:.css=empty", "--loader:.woff2=dataurl", "--conditions=production", "--log-level=error")
    subprocess.run([esbuild, entry, *options, *css, f"--outfile={script}"], cwd=packages, check=True)
    return script.read_text("utf-8")


def opened(script: str, fonts: Path, drawing: str, browser: str) -> dict[str, Any] | None:
    """What Excalidraw makes of the drawing: its elements and a picture. None if the browser left before it was done."""
    data, code = drawing.replace("</", "<\\/"), script.replace("</script", "<\\/script")
    page = (
        '<!doctype html><meta charset="utf-8"><pre id="result"></pre>'
        f'<script id="drawing" type="application/json">{data}</script>'
        f"<script>window.EXCALIDRAW_ASSET_PATH = {json.dumps(fonts.as_uri() + '/')};</script><script>{code}</script>"
    )
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, "utf-8")
        command = [browser, *options, "--virtual-time-budget=300000", file.as_uri()]
        for _ in range(TRIES):
            done = subprocess.run(command, capture_output=True, text=True, timeout=180)
            found = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.DOTALL)
            if found:
                return json.loads(unescape(found[1]))
    return None


def changes(given: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[str]:
    """Elements that were dropped, and fields that were changed."""
    after = {element["id"]: element for element in kept}
    faults = []
    for element in given:
        mine = after.get(element["id"])
        if mine is None:
            faults.append(f"{element['id']}: dropped")
            continue
        for name in element.keys() - SET_BY_RESTORE:
            if mine.get(name) != element[name]:
                faults.append(f"{element['id']}: {name} was {element[name]!r}, is {mine.get(name)!r}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--packages", type=Path, default=Path("build/excalidraw"))
    given = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or shutil.which("npm") is None:
        print("needs chromium (or google-chrome) and npm on the PATH", file=sys.stderr)
        return 2
    packages = given.packages.resolve()
    script, failed = bundle(packages), False
    fonts = packages / "node_modules" / "@excalidraw" / "excalidraw" / "dist" / "prod"
    for file in given.files:
        text = file.read_text("utf-8")
        result = opened(script, fonts, text, browser)
        if result is None:
            print(f"{file}: no answer from the browser in {TRIES} tries; run it again", file=sys.stderr)
            return 2
        faults = [result["error"]] if "error" in result else changes(json.loads(text)["elements"], result["elements"])
        if "png" in result:
            file.with_suffix(".excalidraw.png").write_bytes(base64.b64decode(result["png"]))
        print(f"{file}: {'; '.join(faults) or 'every element kept'}")
        failed = failed or bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
