"""The half of install.py that puts this repository into a host (ComfyUI or a webui), as a link or a copy.

A host needs this file in the same folder as install.py. Only the standard library is needed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NAME = "tome_core"  # our folder in a host
COPY = "copied_by_install.txt"  # this file in a folder of a host says that we made it and may remove it


class Failure(Exception):
    """The error that ends a command with a sentence for the user; its `code` is the exit code, 2 for a wrong call."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


class Host:
    """A program that takes extensions: the `command` of install.py for it, and its `name` in texts.

    The program's folder has all files of one of the sets `looked_for`, and may be `below` the folder that the user
    names. `place` is the folder for extensions in it. The program needs the files and folders `copied` of this
    repository, and `after` is what the user does then.
    """

    def __init__(self, **facts):
        vars(self).update(facts)


COMFYUI = Host(
    command="comfyui",
    name="ComfyUI",
    # the program, or the folder that its --base-directory and its desktop version work in
    looked_for=(("main.py", "nodes.py", "comfy", "custom_nodes"), ("models", "input", "output", "custom_nodes")),
    below="ComfyUI",  # the portable version has it one folder down
    place="custom_nodes",
    copied=("__init__.py", "comfy_nodes", "tome_core", "locales", "example_workflows", "pyproject.toml", "LICENSE"),
    after="Restart ComfyUI; the nodes are under model/patch/unet.",
)
WEBUI = Host(
    command="webui",
    name="webui",
    # the program (A1111, Forge, reForge, SD.Next), or the folder of its --data-dir
    looked_for=(("launch.py", "webui.py", "modules", "extensions"), ("extensions", "config.json", "models")),
    below="webui",  # the one-click packages of A1111 and Forge have it one folder down
    place="extensions",
    copied=("scripts", "extension", "tome_core", "install.py", "install_hosts.py", "pyproject.toml", "LICENSE"),
    after="Restart the webui; the panel is in txt2img and img2img.",
)


def install_into(host, arguments):
    """Install the repository in a host or uninstall it, print what was done, and return the exit code 0.

    `arguments` are the host's folder, and maybe --uninstall or --copy. Raises Failure if they are wrong, or the folder
    is not the host's, or a file operation failed.
    """
    folders = [argument for argument in arguments if not argument.startswith("-")]
    options = {argument for argument in arguments if argument.startswith("-")}
    if len(folders) != 1 or options - {"--uninstall", "--copy"}:
        raise Failure(f"usage: python install.py {host.command} DIR [--uninstall] [--copy]", 2)
    where = target(host, Path(folders[0]).expanduser())
    try:
        if "--uninstall" not in options:
            print(link_or_copy(host, where, "--copy" in options))
        elif os.path.lexists(where):
            remove(where)
            print(f"Removed {where}. Restart {host.name}.")
        else:
            print(f"{where} does not exist: there is nothing to undo.")
    except OSError as error:
        raise Failure(str(error)) from error
    return 0


def target(host, folder):
    """Return the path of our link or copy in a host, which need not exist yet.

    `folder` is the host's, the one above, or that for extensions. Raises Failure if it is none of these.
    """
    above = (folder.absolute().parent,) if folder.name == host.place else ()
    for candidate in (folder, folder / host.below, *above):
        if any(all((candidate / name).exists() for name in wanted) for wanted in host.looked_for):
            return candidate.resolve() / host.place / NAME
    hint = f"give the folder that holds {host.name}'s {host.looked_for[0][0]}"
    if not folder.exists():
        raise Failure(f"{folder} does not exist; {hint}")
    looked_for = ", or for ".join(", ".join(wanted) for wanted in host.looked_for)
    raise Failure(f"{folder} is not a {host.name} folder: looked for {looked_for} in it, and did not find all of "
                  f"either; {hint}")


def link_or_copy(host, where, copy=False):
    """Link the repository to `where`, or copy it if asked or if links are not possible; return a text that says so.

    An earlier link or copy is replaced, but a link to this repository stays unless `copy`. Nothing is done if the
    repository itself lies in the folder of `where`. Raises Failure if install.py did not make what is at `where`.
    """
    if where.parent == ROOT.parent:
        return f"{ROOT} lies in {where.parent} already: there is nothing to do."
    if is_link(where) and where.resolve() == ROOT and not copy:
        return f"{where} is a link to {ROOT} already. {host.after}"
    if os.path.lexists(where):
        remove(where)
    linked = not copy and link(where)
    if not linked:
        copy_to(where, host.copied)
    return f"{'Linked' if linked else 'Copied'} {ROOT} to {where}. {host.after}"


def remove(where):
    """Delete what is at `where`, a link (not its target) or a copy by install.py. Raises Failure if it is neither."""
    if is_link(where):
        # rmdir takes a junction away and leaves what it points to
        where.unlink() if where.is_symlink() else where.rmdir()
    elif (where / COPY).is_file():
        shutil.rmtree(where)
    else:
        raise Failure(f"{where} exists and was not made by install.py; move it away first")


def is_link(where):
    """Tell whether a path is a symbolic link, or a junction of Windows. A path that does not exist is none."""
    try:
        return where.is_symlink() or (os.name == "nt" and bool(os.readlink(where)))
    except OSError:
        return False


def link(where):
    """Make a link to the repository at `where`, on Windows a junction, and return whether this was possible."""
    try:
        if os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(ROOT), str(where))
        else:
            where.symlink_to(ROOT, target_is_directory=True)
    except (OSError, ImportError):
        return False
    return True


def copy_to(where, names):
    """Copy files and folders of the repository, those that exist, into a new folder `where`, and mark it as a copy."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    where.mkdir()
    (where / COPY).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, ignore=ignore)
        elif source.is_file():
            shutil.copy2(source, where / name)
