"""Puts this repository into a ComfyUI's custom_nodes folder, and takes it out again. Standard library alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAME = "tome_core"
ROOT = Path(__file__).resolve().parents[1]
# together they are ComfyUI and nothing else, or the folder its --base-directory and its desktop version work in
PROGRAM = ("main.py", "nodes.py", "comfy", "custom_nodes")
BASE = ("models", "input", "output", "custom_nodes")
COPIED = ("__init__.py", "comfy_nodes", "tome_core", "locales", "example_workflows", "pyproject.toml", "LICENSE")
MARK = "copied_by_install.txt"  # in a copy: made by us, so it may be removed
USAGE = "usage: python install.py comfyui DIR [--uninstall] [--copy]"


class Refusal(Exception):
    """A sentence for the user."""


def main(arguments: list[str]) -> int:
    """Exit code: 0 done, 1 refused, 2 wrong call."""
    folders = [one for one in arguments if not one.startswith("-")]
    options = {one for one in arguments if one.startswith("-")}
    if len(folders) != 1 or options - {"--uninstall", "--copy"}:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        place = target(Path(folders[0]).expanduser())
        print(uninstall(place) if "--uninstall" in options else install(place, copy="--copy" in options))
    except (Refusal, OSError) as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    return 0


def target(folder: Path) -> Path:
    """Where the pack goes. Raises Refusal for a folder that is not ComfyUI."""
    for place in (folder, folder / "ComfyUI"):  # the portable version has it one folder down
        if any(all((place / name).exists() for name in wanted) for wanted in (PROGRAM, BASE)):
            return place.resolve() / "custom_nodes" / NAME
    raise Refusal(
        f"{folder} is not a ComfyUI folder: looked for {', '.join(PROGRAM)} in it, or for {', '.join(BASE)}, and did "
        "not find all of either; give the folder that holds ComfyUI's main.py"
    )


def install(place: Path, copy: bool = False) -> str:
    """Link the repository to `place`, or copy it where links are not possible. Gives what was done."""
    if place.parent == ROOT.parent:
        return f"{ROOT} lies in {place.parent} already: there is nothing to do."
    if is_link(place) and place.resolve() == ROOT and not copy:
        return f"{place} is a link to {ROOT} already. Restart ComfyUI if it does not show the nodes."
    if os.path.lexists(place):
        remove(place)
    how = "copied" if copy or not link(place) else "linked"
    if how == "copied":
        copy_to(place)
    return f"{how.capitalize()} {ROOT} to {place}. Restart ComfyUI; the nodes are under model/patch/unet."


def uninstall(place: Path) -> str:
    """Undo `install`. Gives what was done."""
    if not os.path.lexists(place):
        return f"{place} does not exist: there is nothing to undo."
    remove(place)
    return f"Removed {place}. Restart ComfyUI."


def remove(place: Path) -> None:
    """Take away a link, or a copy made by us. Raises Refusal for anything else."""
    if is_link(place):
        # rmdir takes a junction away and leaves what it points to
        place.unlink() if place.is_symlink() else place.rmdir()
    elif (place / MARK).is_file():
        shutil.rmtree(place)
    else:
        raise Refusal(f"{place} exists and was not made by install.py; move it away first")


def is_link(place: Path) -> bool:
    """A symbolic link, or a junction, which Windows has instead."""
    if place.is_symlink():
        return True
    try:
        return os.name == "nt" and bool(os.readlink(place))
    except OSError:
        return False


def link(place: Path) -> bool:
    """Make a link to the repository; a junction on Windows, which needs no rights. False where neither is possible."""
    try:
        if os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(ROOT), str(place))
        else:
            place.symlink_to(ROOT, target_is_directory=True)
    except (OSError, ImportError):
        return False
    return True


def copy_to(place: Path) -> None:
    """Copy what the pack needs, the engine inside."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    place.mkdir()
    (place / MARK).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=ignore)
        elif source.is_file():
            shutil.copy2(source, place / name)
