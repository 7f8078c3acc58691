"""demo/README.md's picture of the page: `python -m demo.page_shots ADDRESS`, while `install.py page` serves it there.

Needs playwright and a Chromium, as the tests do.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from PIL import Image

PATH = Path(__file__).with_name("page.png")
WIDTH = 1280
COLOURS = 256  # a page of flat areas and small pictures; as many colours keep the file small


def shoot(address: str, path: Path) -> None:
    """Compare the strengths that the page offers, and write a picture of it down to the difference."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, headless=True, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        page.set_default_timeout(600_000)
        page.goto(address, wait_until="domcontentloaded")
        page.locator("#plot circle.now").wait_for()
        page.get_by_text("Compare strengths").click()
        page.locator("#compare").click()
        page.locator("#says", has_text="Done.").wait_for()
        page.locator("#maps img").first.wait_for()
        page.wait_for_timeout(3000)  # the pictures are drawn; nothing tells when, because hidden ones never are
        below = page.locator("#difference").bounding_box()
        page.screenshot(path=path, full_page=True,
                        clip={"x": 0, "y": 0, "width": WIDTH, "height": below["y"] + below["height"] + 16})  # fmt: skip
        browser.close()
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Write the picture and say where."""
    parser = argparse.ArgumentParser(prog="python -m demo.page_shots", description=__doc__.splitlines()[0])
    parser.add_argument("address", help="such as http://127.0.0.1:7860")
    parser.add_argument("--output", type=Path, default=PATH, metavar="PNG")
    options = parser.parse_args(arguments)
    shoot(options.address, options.output)
    print(f"{options.output}: {options.output.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
