"""The version of a release: written once, in ``tome_core/__init__.py``.

``python -m tests.release`` prints it; ``--write`` copies it into pyproject.toml, which ComfyUI's registry and Manager
read as text; ``--tag v0.1.0`` fails unless a tag, pyproject.toml and the changelog agree with it. Needs no torch.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, COPY, CHANGELOG = Path("tome_core", "__init__.py"), Path("pyproject.toml"), Path("CHANGELOG.md")
_COPY = re.compile(r'(?<=^version = ")([^"]+)(?="$)', re.MULTILINE)


def version(root: Path = ROOT) -> str:
    """The version, which has the form 1.2.3: the registry takes no other."""
    text = (root / SOURCE).read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)[1]


def write(root: Path = ROOT) -> None:
    """Copy the version into pyproject.toml."""
    text = (root / COPY).read_text(encoding="utf-8")
    (root / COPY).write_text(_COPY.sub(version(root), text, count=1), encoding="utf-8")


def disagreements(tag: str | None = None, root: Path = ROOT) -> list[str]:
    """A sentence for each place that says another version, and if the changelog does not describe this one."""
    ours, found = version(root), []
    copies = _COPY.findall((root / COPY).read_text(encoding="utf-8"))
    if copies != [ours]:
        found.append(f"{COPY} says {copies}, {SOURCE} says {ours}: run python -m tests.release --write")
    if tag is not None and tag != f"v{ours}":
        found.append(f"the tag is {tag}, the version is {ours}: tag v{ours}, or change {SOURCE}")
    entry = re.compile(rf"^## +{re.escape(ours)}\b.*\n\s*[^#\s]", re.MULTILINE)
    if not entry.search((root / CHANGELOG).read_text(encoding="utf-8")):
        found.append(f"{CHANGELOG} has no entry under '## {ours}'")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the version, copy it, or hold a tag against it."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="copy the version into pyproject.toml")
    what.add_argument("--tag", metavar="TAG", help="fail unless TAG is the version's and all places agree")
    options = parser.parse_args(arguments)
    if options.write:
        write()
    found = disagreements(options.tag)
    if found:
        parser.exit(1, "\n".join(found) + "\n")
    print(version())


if __name__ == "__main__":
    main()
