"""Puts this repository into a host's folder for extensions, and takes it out again. Standard library alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

NAME = "tome_core"
ROOT = Path(__file__).resolve().parent
MARK = "copied_by_install.txt"  # in a copy: made by us, so it may be removed


class Host(NamedTuple):
    """A program that takes extensions. looked_for: sets of names, any of which together are the program and nothing
    else; below: a folder it may lie in; place: its folder for extensions; copied: what it needs of ours; after: a hint.
    """

    command: str
    name: str
    looked_for: tuple[tuple[str, ...], ...]
    below: str
    place: str
    copied: tuple[str, ...]
    after: str


COMFYUI = Host(
    "comfyui",
    "ComfyUI",
    # the program, or the folder that its --base-directory and its desktop version work in
    (("main.py", "nodes.py", "comfy", "custom_nodes"), ("models", "input", "output", "custom_nodes")),
    "ComfyUI",  # the portable version has it one folder down
    "custom_nodes",
    ("__init__.py", "comfy_nodes", "tome_core", "locales", "example_workflows", "pyproject.toml", "LICENSE"),
    "Restart ComfyUI; the nodes are under model/patch/unet.",
)
WEBUI = Host(
    "webui",
    "webui",
    # the program (A1111, Forge, reForge), or the folder of its --data-dir
    (("launch.py", "webui.py", "modules", "extensions"), ("extensions", "config.json", "models")),
    "webui",  # the one-click packages of A1111 and Forge have it one folder down
    "extensions",
    ("scripts", "extension", "tome_core", "install.py", "pyproject.toml", "LICENSE"),
    "Restart the webui; the panel is in txt2img and img2img.",
)
HOSTS = {host.command: host for host in (COMFYUI, WEBUI)}


class Refusal(Exception):
    """A sentence for the user."""


def main(host: Host, arguments: list[str]) -> int:
    """Exit code: 0 done, 1 refused, 2 wrong call."""
    folders = [one for one in arguments if not one.startswith("-")]
    options = {one for one in arguments if one.startswith("-")}
    if len(folders) != 1 or options - {"--uninstall", "--copy"}:
        print(f"usage: python install.py {host.command} DIR [--uninstall] [--copy]", file=sys.stderr)
        return 2
    try:
        place = target(host, Path(folders[0]).expanduser())
        print(uninstall(host, place) if "--uninstall" in options else install(host, place, "--copy" in options))
    except (Refusal, OSError) as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    return 0


def target(host: Host, folder: Path) -> Path:
    """Where the repository goes. Raises Refusal for a folder that is not the host."""
    for place in (folder, folder / host.below):
        if any(all((place / name).exists() for name in wanted) for wanted in host.looked_for):
            return place.resolve() / host.place / NAME
    looked_for = ", or for ".join(", ".join(wanted) for wanted in host.looked_for)
    raise Refusal(
        f"{folder} is not a {host.name} folder: looked for {looked_for} in it, and did not find all of either; give "
        f"the folder that holds {host.name}'s {host.looked_for[0][0]}"
    )


def install(host: Host, place: Path, copy: bool = False) -> str:
    """Link the repository to `place`, or copy it where links are not possible. Gives what was done."""
    if place.parent == ROOT.parent:
        return f"{ROOT} lies in {place.parent} already: there is nothing to do."
    if is_link(place) and place.resolve() == ROOT and not copy:
        return f"{place} is a link to {ROOT} already. {host.after}"
    if os.path.lexists(place):
        remove(place)
    how = "copied" if copy or not link(place) else "linked"
    if how == "copied":
        copy_to(place, host.copied)
    return f"{how.capitalize()} {ROOT} to {place}. {host.after}"


def uninstall(host: Host, place: Path) -> str:
    """Undo `install`. Gives what was done."""
    if not os.path.lexists(place):
        return f"{place} does not exist: there is nothing to undo."
    remove(place)
    return f"Removed {place}. Restart {host.name}."


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


def copy_to(place: Path, names: tuple[str, ...]) -> None:
    """Copy what a host needs, the engine inside."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    place.mkdir()
    (place / MARK).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=ignore)
        elif source.is_file():
            shutil.copy2(source, place / name)
