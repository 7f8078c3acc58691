"""Hosts run this file bare when they install the extension: it has nothing to do and says nothing.

People run `python install.py demo`, `page`, `gpu` or `test`: a private environment `.venv` beside this file is made and
filled once, and the command runs in it. `webui` and `comfyui` put us into a host. Only the standard library and pip
are needed. What Python has not imported by itself is imported inside the functions, because a host starts this file
with every launch.
"""

from __future__ import annotations

import os
import sys


class Failure(Exception):
    """A sentence for the user; `code` is the exit code, 2 for a wrong call."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


def root():
    from pathlib import Path

    return Path(__file__).resolve().parent


# --- a private environment, and what runs in it: demo, page, gpu, test ------------------------------------------------

OWNER = "tome_core.txt"  # this file in an environment says that it was made here and may be made again
# MB that pip downloads for an extra, torch apart: from wheels and installed folders on Linux, rounded up
SIZES = {"demo": 120, "page": 60, "benchmarks": 20, "test": 70}
DOWNLOADS = """python install.py {command} fills a private environment, {folder}, and asks pip for:
  torch: {torch}
  the rest: up to {rest} MB, less what is there and what pip's cache has
Ctrl-C is safe and the same command goes on: files that came whole are in pip's cache; the one under way starts again
(torch with CUDA is the largest)."""
TORCH_TO_COME = """0.1 to 0.2 GB on Windows and macOS; 2 to 4 GB on Linux, with CUDA, or 0.2 GB without it, where
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu is set; nothing where install.py is called with a Python
    that has torch"""
NO_VENV = (
    "this Python ({python}) cannot make environments: its 'venv' or 'ensurepip' is missing. "
    "On Debian or Ubuntu: sudo apt install python3-venv; elsewhere use the Python from python.org."
)


def requirements(project, extras):
    """The requirement lines of a parsed pyproject.toml: dependencies, then those of each extra, without repeats.

    Raises Failure for an extra that the file does not have.
    """
    optional = project["project"].get("optional-dependencies", {})
    missing = [extra for extra in extras if extra not in optional]
    if missing:
        raise Failure(f"pyproject.toml has no optional-dependencies {missing[0]!r}; it has {', '.join(optional)}")
    lines = [*project["project"].get("dependencies", []), *(line for extra in extras for line in optional[extra])]
    return list(dict.fromkeys(lines))


def satisfies(version, requirement):
    """Whether a version ("2.13.0+cpu") meets a requirement line ("torch>=2.4")."""
    specifier = import_vendored("packaging.requirements").Requirement(requirement).specifier
    return specifier.contains(version, prereleases=True)


def fingerprint(python, lines):
    """Says whether an environment is up to date: a hash of the interpreter's version and what was installed."""
    import hashlib

    return hashlib.sha256("\n".join([python, *lines]).encode()).hexdigest()


def import_vendored(name):
    """A module that Python 3.10 lacks and pip brings along: `name`, else pip's own copy."""
    import importlib

    for candidate in (name, f"pip._vendor.{name}"):
        try:
            return importlib.import_module(candidate)
        except ImportError:
            continue
    raise Failure(f"this Python ({sys.executable}) has neither {name!r} nor pip; install pip: "
                  "python -m ensurepip, or on Debian and Ubuntu: sudo apt install python3-pip")


def read_project(path):
    """A parsed pyproject.toml."""
    toml = import_vendored("tomllib" if sys.version_info >= (3, 11) else "tomli")
    with open(path, "rb") as file:
        return toml.load(file)


def reusable_torch(requirement):
    """Folder of a torch in this interpreter that meets `requirement`, found without importing it; else None."""
    from importlib import metadata
    from pathlib import Path

    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(torch.locate_file(""))).resolve() if satisfies(torch.version, requirement) else None


def venv_python(folder):
    """Path of an environment's interpreter."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def is_usable(folder):
    """Whether the environment is there, runs, has pip, and is of this Python's version."""
    import subprocess

    if not venv_python(folder).exists():
        return False
    command = [str(venv_python(folder)), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() == "{}.{}".format(*sys.version_info[:2])


def has_torch(folder, requirement):
    """Whether the environment has, or sees, a torch that meets `requirement`."""
    import subprocess

    command = [str(venv_python(folder)), "-c", "from importlib import metadata; print(metadata.version('torch'))"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and satisfies(answer.stdout.strip(), requirement)


def make_environment(folder, torch_folder):
    """Make `folder` anew; with `torch_folder`, packages beside that torch are visible from inside."""
    from importlib.util import find_spec

    if not find_spec("venv") or not find_spec("ensurepip"):
        raise Failure(NO_VENV.format(python=sys.executable))
    if folder.exists() and not (folder / OWNER).exists():
        raise Failure(f"{folder} exists, was not made by install.py and does not run under this Python; "
                      "move it away, or call install.py with the Python it belongs to")
    import shutil
    import subprocess
    import venv

    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / OWNER).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    # An environment can see its base interpreter's packages, but not those of another environment it is made from.
    foreign = torch_folder is not None and sys.prefix != sys.base_prefix
    print("Making the environment ...", flush=True)
    builder = venv.EnvBuilder(system_site_packages=torch_folder is not None and not foreign, with_pip=True,
                              symlinks=os.name != "nt")
    try:
        builder.create(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        raise Failure(f"{folder} could not be made ({error}). {NO_VENV.format(python=sys.executable)}") from error
    if foreign:
        (next(folder.glob("**/site-packages")) / "torch_of_parent.pth").write_text(path_line(torch_folder))


def path_line(folder):
    """A line for a .pth file that makes the packages in `folder` visible; ASCII, because Pythons differ in how they
    decode such a file.
    """
    return f"import sys; sys.path.append({str(folder)!a})\n"


def environment(extras, no_deps=(), command=None):
    """The interpreter of an environment that has `extras` installed; the second call needs no pip.

    no_deps: requirement lines installed without their own dependencies. command: whose environment it is; without it
    the last extra has its name.
    """
    import re

    lines = requirements(read_project(root() / "pyproject.toml"), extras)
    folder = root() / ".venv"
    python, stamp = str(venv_python(folder)), folder / f"installed-{'-'.join(extras)}.txt"
    torch_line = next(line for line in lines if re.match(r"torch\b", line))
    torch_folder = reusable_torch(torch_line)
    mark = fingerprint(sys.version, [*lines, *no_deps, str(torch_folder)])
    if stamp.exists() and stamp.read_text() == mark and os.path.exists(python):
        return python
    try:
        usable, torch = is_usable(folder), TORCH_TO_COME
        if usable and has_torch(folder, torch_line):
            torch = "there already"
        elif torch_folder and not usable:
            torch = f"taken from {torch_folder}, nothing to download"
        rest = sum(SIZES[extra] for extra in extras)
        print(DOWNLOADS.format(command=command or extras[-1], folder=folder, torch=torch, rest=rest))
        if not usable:
            make_environment(folder, torch_folder)
        print("Installing what is needed ...", flush=True)
        pip(python, lines)
        if no_deps:
            pip(python, ["--no-deps", *no_deps])
    except KeyboardInterrupt:
        raise Failure("stopped; the same command goes on with what is there", 130) from None
    stamp.write_text(mark)
    return python


def pip(python, arguments):
    """`pip install` in the environment; the user's own pip settings apply. Raises Failure if it fails."""
    code = run([python, "-m", "pip", "install", "--disable-pip-version-check", *arguments])
    if code:
        raise Failure(f"pip could not install what is needed (exit code {code}, its reason is above); "
                      "the next call goes on from here")


def run(command, **options):
    """Run a command to its end and give its exit code; on Ctrl-C it gets ten seconds to end by itself.

    SIGTERM is passed on to it, and waited for. It, too, writes letters that the output cannot show as numbers.
    """
    import signal
    import subprocess

    environment = {"PYTHONIOENCODING": ":backslashreplace", **os.environ}
    with subprocess.Popen(command, env=environment, **options) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def demo(arguments):
    """pictures with and without merging, side by side (options: install.py demo --help)"""
    # Not `-m demo`: that would look into the current folder first, which is the user's.
    return run([environment(["demo"]), str(root() / "demo"), *arguments])


def page(arguments):
    """a page in the browser to try the settings on (options: install.py page --help)"""
    return run([environment(["demo", "page"]), str(root() / "demo" / "page.py"), *arguments])


def gpu(arguments):
    """what merging costs and gains on this graphics card (options: install.py gpu --help)"""
    return run([environment(["benchmarks"], command="gpu"), str(root() / "benchmarks" / "gpu.py"), *arguments])


def test(arguments):
    """ruff and the quick tests; --all: every test; other arguments go to pytest"""
    lines = (root() / "tests" / "requirements-no-deps.txt").read_text(encoding="utf-8").splitlines()
    no_deps = [line for line in lines if line and not line.startswith("#")]
    python = environment(["demo", "benchmarks", "test"], no_deps)
    style = run([python, "-m", "ruff", "check", "."], cwd=root())
    return run([python, "-m", "pytest", *tests_to_run(arguments)], cwd=root()) or style


def tests_to_run(arguments):
    """pytest's arguments: the quick tests, with --all every one, in as many processes as there are cores, up to four;
    what somebody says beside that is passed on as it is.
    """
    others = [one for one in arguments if one != "--all"]
    if others:
        return others
    # a file at a time, those with slow tests first: a test runs on one thread
    processes = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile", "--no-loadscope-reorder"]
    return processes if arguments else [*processes, "--quick"]


# --- a place in a host: webui, comfyui --------------------------------------------------------------------------------

NAME = "tome_core"  # our folder in a host
COPY = "copied_by_install.txt"  # this file in a folder of a host says that we made it and may remove it


class Host:
    """A program that takes extensions. looked_for: sets of names, any of which together are the program and nothing
    else; below: a folder it may lie in; place: its folder for extensions; copied: what it needs of ours; after: a hint.
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
    copied=("scripts", "extension", "tome_core", "install.py", "pyproject.toml", "LICENSE"),
    after="Restart the webui; the panel is in txt2img and img2img.",
)


def comfyui(arguments):
    """the nodes into a ComfyUI: comfyui DIR (undone by --uninstall)"""
    return place(COMFYUI, arguments)


def webui(arguments):
    """the extension into A1111, Forge, reForge or SD.Next: webui DIR (undone by --uninstall)"""
    return place(WEBUI, arguments)


def place(host, arguments):
    """Put the repository into a host's folder for extensions, or take it out again."""
    from pathlib import Path

    folders = [one for one in arguments if not one.startswith("-")]
    options = {one for one in arguments if one.startswith("-")}
    if len(folders) != 1 or options - {"--uninstall", "--copy"}:
        raise Failure(f"usage: python install.py {host.command} DIR [--uninstall] [--copy]", 2)
    where = target(host, Path(folders[0]).expanduser())
    try:
        print(take_out(host, where) if "--uninstall" in options else put(host, where, "--copy" in options))
    except OSError as error:
        raise Failure(str(error)) from error
    return 0


def target(host, folder):
    """Where in the host's folder the repository goes. Raises Failure for a folder that is not the host."""
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


def put(host, where, copy=False):
    """Link the repository to `where`, or copy it where links are not possible. Gives what was done."""
    if where.parent == root().parent:
        return f"{root()} lies in {where.parent} already: there is nothing to do."
    if is_link(where) and where.resolve() == root() and not copy:
        return f"{where} is a link to {root()} already. {host.after}"
    if os.path.lexists(where):
        remove(where)
    linked = not copy and link(where)
    if not linked:
        copy_to(where, host.copied)
    return f"{'Linked' if linked else 'Copied'} {root()} to {where}. {host.after}"


def take_out(host, where):
    """Undo `put`. Gives what was done."""
    if not os.path.lexists(where):
        return f"{where} does not exist: there is nothing to undo."
    remove(where)
    return f"Removed {where}. Restart {host.name}."


def remove(where):
    """Take away a link, or a copy made by us. Raises Failure for anything else."""
    import shutil

    if is_link(where):
        # rmdir takes a junction away and leaves what it points to
        where.unlink() if where.is_symlink() else where.rmdir()
    elif (where / COPY).is_file():
        shutil.rmtree(where)
    else:
        raise Failure(f"{where} exists and was not made by install.py; move it away first")


def is_link(where):
    """A symbolic link, or a junction, which Windows has instead."""
    try:
        return where.is_symlink() or (os.name == "nt" and bool(os.readlink(where)))
    except OSError:
        return False


def link(where):
    """Make a link to the repository; a junction on Windows, which needs no rights. False where neither is possible."""
    try:
        if os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(root()), str(where))
        else:
            where.symlink_to(root(), target_is_directory=True)
    except (OSError, ImportError):
        return False
    return True


def copy_to(where, names):
    """Copy what a host needs, the engine inside."""
    import shutil

    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    where.mkdir()
    (where / COPY).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    for name in names:
        source = root() / name
        if source.is_dir():
            shutil.copytree(source, where / name, ignore=ignore)
        elif source.is_file():
            shutil.copy2(source, where / name)


# --- the command line -------------------------------------------------------------------------------------------------

REQUIRED_PYTHON = (3, 10)
COMMANDS = {"demo": demo, "page": page, "gpu": gpu, "test": test, "webui": webui, "comfyui": comfyui}


def usage():
    """The commands, a line each."""
    lines = "\n".join(f"  python install.py {name:8}{command.__doc__}" for name, command in COMMANDS.items())
    return f"usage:\n{lines}\n  python install.py         nothing: hosts call it so"


def main(arguments):
    """Gives the exit code: 0 done, 2 wrong call, 130 interrupted, else that of the command."""
    if not arguments:
        return 0
    sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may have letters that the output cannot show
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    try:
        if name not in COMMANDS:
            raise Failure(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}\n{usage()}", 2)
        if sys.version_info < REQUIRED_PYTHON:
            raise Failure("this Python is {}.{}; 3.10 or newer is needed".format(*sys.version_info[:2]))
        return COMMANDS[name](rest)
    except Failure as failure:
        print(f"install.py: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        print("\ninstall.py: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
