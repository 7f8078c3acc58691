"""What a user does on the page of app.py, in a browser that playwright drives."""

from __future__ import annotations

import json

from playwright.sync_api import TimeoutError


class Page:
    """The controls whose ids begin with `prefix`."""

    def __init__(self, page, prefix="script_txt2img_"):
        self.page, self.prefix = page, prefix

    def at(self, name, inside=""):
        return self.page.locator(f"#{self.prefix}{name} {inside}".strip()).first

    def below(self, prefix):
        """The same page, its names meaning other controls."""
        return Page(self.page, prefix)

    def check(self, name, on=True):
        self.at(name, "input[type=checkbox]").set_checked(on)

    def number(self, name, value):
        box = self.at(name, "input[type=number]")
        box.fill(str(value))
        box.press("Tab")

    def key(self, name, key):
        """Move a slider's knob from where it is."""
        self.at(name, "input[type=range]").press(key)

    def click(self, name, told):
        """Press a button, and give what is told when it has been heard.

        gradio 4 loses a click now and then on a busy machine; a user presses again, and so does this.
        """
        before = self.page.locator(f"#{told}_told textarea").input_value()
        ask = "([id, old]) => {const now = document.querySelector(`#${id}_told textarea`).value;" \
            "return now !== old && now}"  # fmt: skip
        for last in (False, False, False, True):
            self.page.locator(f"#{name}").click()
            try:
                return json.loads(self.page.wait_for_function(ask, arg=[told, before], timeout=30_000).json_value())
            except TimeoutError:
                if last:
                    raise

    def wait_for_number(self, name, value):
        ask = "([id, value]) => document.querySelector(`#${id} input[type=number]`).value == value"
        self.page.wait_for_function(ask, arg=[self.prefix + name, value])

    def generate(self, tab="txt2img"):
        """(what the hooks got that is not at its default, the infotext they wrote)"""
        told = self.click(f"{tab}_generate", tab)
        return told["changed"], told["infotext"]
