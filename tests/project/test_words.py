"""What users read is spelled well, and has no phrase that a reader of English stumbles over."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tome_core.settings import form

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "demo" / "README.md"]
TEXTS = {page.name: page.read_text("utf-8") for page in PAGES}
TEXTS |= {f"setting {field.name}": f"{field.label} {field.help}" for field in form.FIELDS}
TEXTS["nodes"] = (ROOT / "locales" / "en" / "nodeDefs.json").read_text("utf-8")
# phrases that had to be read twice, with what says the same
PHRASES = {
    r"nobody|somebody|anybody|whoever": "name who it is: the user, another extension; or use the passive",
    r"anew": "again",
    r"besides": "also, or in addition",
    r"beside 0": "if it is 0",
    r"bears? (more|less|little|much)": "tolerates",
    r"(is|are|was|were) told (of|about)": "gets, or knows",
    r"hangs? on": "depends on",
    r"where it (is|does|has|can|may) not": "if it does not",
    r"\d+ %": "88%, without a space",
    r"per cent": "%",
}


def test_no_word_is_misspelled():
    done = subprocess.run([sys.executable, "-m", "codespell_lib"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_phrase_that_had_to_be_read_twice_comes_back():
    found = [f"{name}: {hit[0]!r}; write: {better}" for phrase, better in PHRASES.items()
             for name, text in TEXTS.items() for hit in re.finditer(rf"(?i)\b({phrase})(?!\w)", text)]  # fmt: skip
    assert not found, "\n".join(found)
