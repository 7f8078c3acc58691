"""A script of ours for ComfyUI's page, run by node beside doubles of what the page has."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WEB = Path(__file__).parents[1] / "comfy_nodes" / "web"


def page_with(script: str, app: str, driver: str, folder: Path) -> Callable[[Any], Any]:
    """Runs `driver` on some facts and gives what it prints, both as JSON; skips the test where there is no node.

    script: the name of ours. app: the page's `scripts/app.js`. folder: an empty one for all of it.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which runs the page's script without a page")
    for place in ("scripts", "extensions/pack"):
        (folder / place).mkdir(parents=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "scripts" / "app.js").write_text(app)
    (folder / "driver.js").write_text(driver)
    shutil.copy(WEB / script, folder / "extensions" / "pack")

    def run(facts: Any) -> Any:
        command = [node, "driver.js", json.dumps(facts)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
