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
_SOURCE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_COPY = re.compile(r'(?<=^version = ")([^"]+)(?="$)', re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+\.\d+")  # what the registry takes, and what a tag is made from


def version(root: Path = ROOT) -> str:
    """The version. Raises ValueError where it is missing or not of the form 1.2.3."""
    found = _SOURCE.findall(_read(root / SOURCE))
    if len(found) != 1 or not _NUMBER.fullmatch(found[0]):
        raise ValueError(f'{SOURCE} has to hold one line like __version__ = "1.2.3", found {found}')
    return found[0]


def write(root: Path = ROOT) -> None:
    """Copy the version into pyproject.toml."""
    text = _read(root / COPY)
    (root / COPY).write_text(_COPY.sub(version(root), text, count=1), encoding="utf-8")


def disagreements(tag: str | None = None, root: Path = ROOT) -> list[str]:
    """A sentence for each place that says another version; with a tag, also where the release is not described."""
    ours, found = version(root), []
    copies = _COPY.findall(_read(root / COPY))
    if copies != [ours]:
        found.append(f"{COPY} says {copies}, {SOURCE} says {ours}: run python -m tests.release --write")
    if tag is not None and tag != f"v{ours}":
        found.append(f"the tag is {tag}, the version is {ours}: tag v{ours}, or change {SOURCE}")
    if not entry(ours, root):
        found.append(f"{CHANGELOG} has no entry under '## {ours}'")
    return found


def entry(number: str, root: Path = ROOT) -> str:
    """What the changelog says of a version, "" where it says nothing."""
    parts = re.split(r"^## +", _read(root / CHANGELOG), flags=re.MULTILINE)
    return next((part.partition("\n")[2].strip() for part in parts[1:] if part.split()[0] == number), "")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


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
