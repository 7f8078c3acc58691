"""The version, as hosts read it: ``python -m tests.project.release`` prints it, ``--tag`` compares its places."""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, COPY, CHANGELOG = Path("tome_core", "__init__.py"), Path("pyproject.toml"), Path("CHANGELOG.md")


def version() -> str:
    """The version, which has the form 1.2.3: the registry takes no other."""
    text = (ROOT / SOURCE).read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)[1]


def disagreements(tag: str | None = None) -> list[str]:
    """A sentence for each place with another version, and one if the changelog lacks this version."""
    ours, sentences = version(), []
    if f'\nversion = "{ours}"\n' not in (ROOT / COPY).read_text(encoding="utf-8"):
        sentences.append(f"{COPY} does not say {ours}, as {SOURCE} does: change one of them")
    if tag is not None and tag != f"v{ours}":
        sentences.append(f"the tag is {tag}, the version is {ours}: tag v{ours}, or change {SOURCE}")
    entry = re.compile(rf"^## +{re.escape(ours)}\b.*\n\s*[^#\s]", re.MULTILINE)
    if not entry.search((ROOT / CHANGELOG).read_text(encoding="utf-8")):
        sentences.append(f"{CHANGELOG} has no entry under '## {ours}'")
    return sentences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.project.release", description=__doc__.splitlines()[0])
    parser.add_argument("--tag", metavar="TAG", help="fail unless TAG is the version's and all places agree")
    if sentences := disagreements(parser.parse_args().tag):
        parser.exit(1, "\n".join(sentences) + "\n")
    print(version())
