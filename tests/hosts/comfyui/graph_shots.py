"""The pictures of our graphs: `python -m tests.hosts.comfyui.graph_shots` with COMFYUI_DIR and COMFYUI_PYTHON set.

It starts that ComfyUI with random weights, writes the thumbnails of the example workflows as they open, and the
pictures of docs/comfyui.md after sampling. Needs playwright and a Chromium, as the tests do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from tests.hosts.comfyui.page import GraphPage
from tests.hosts.comfyui.running import ROOT, make_base, run_script, serve
from tests.hosts.comfyui.workflows import WORKFLOWS, made_small, workflow

DOCS = ROOT / "comfy_nodes" / "docs"
RUN = {"graph.png": False, "nodes2.png": True}  # the page's pictures -> are nodes drawn with Vue ("Nodes 2.0")
SIZE = (2200, 1350)
MENUS = (120, 170)  # pixels that the page's own menus take, to the left and above
MARGIN, BADGE = 16, 55  # around the nodes, and what stands above them
THUMBNAIL = 900  # pixels wide; ComfyUI shows them smaller
COLOURS = 256


def shoot(page: GraphPage, path: Path) -> None:
    """The whole graph, without the menus around it."""
    boxes = [node["box"] for node in page.nodes()]
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    right, below = max(box[0] + box[2] for box in boxes), max(box[1] + box[3] for box in boxes)
    page.look_at(left - MENUS[0], top - MENUS[1])
    clip = {"x": MENUS[0] - MARGIN, "y": MENUS[1] - BADGE, "width": right - left + 2 * MARGIN,
            "height": below - top + BADGE + MARGIN}  # fmt: skip
    page.page.screenshot(path=path, clip=clip)


def main() -> None:
    """Write all of them."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    checkout = Path(os.environ["COMFYUI_DIR"])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        base = Path(folder)
        make_base(checkout, base)
        run_script(checkout, "make_checkpoints.py", base / "models" / "checkpoints")
        browser = driver.chromium.launch(executable_path=chromium, headless=True, args=["--no-sandbox"])
        with serve(checkout, base) as comfy:
            page = GraphPage(browser, comfy, SIZE)
            for name in WORKFLOWS:
                page.open(workflow(name))
                shoot(page, base / "one.png")
                with Image.open(base / "one.png") as image:
                    image.convert("RGB").resize((THUMBNAIL, round(THUMBNAIL * image.height / image.width))).save(
                        ROOT / "example_workflows" / f"{name}.jpg", quality=85)  # fmt: skip
            for seed, (name, vue) in enumerate(RUN.items()):
                page = GraphPage(browser, comfy, SIZE, vue)
                page.open(made_small(workflow(WORKFLOWS[0]), steps=4, size=384, seed=seed))
                page.queue()
                shoot(page, DOCS / name)
        browser.close()
    for name in RUN:
        with Image.open(DOCS / name) as image:
            image.convert("RGB").quantize(COLOURS).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main()
