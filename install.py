"""Hosts run this file bare when they install the extension: it has nothing to do and says nothing.

People run `python install.py demo` or `python install.py test`: a private environment `.venv` beside this file is
made and filled once, and the command runs in it. Only the standard library and pip are needed. Imports are inside
the functions, because a host starts this file with every launch.
"""

from __future__ import annotations

import sys

REQUIRED_PYTHON = (3, 10)
OWNER = "tome_core.txt"  # this file in an environment says that it was made here and may be made again
NO_VENV = (
    "this Python ({python}) cannot make environments: its 'venv' or 'ensurepip' is missing. "
    "On Debian or Ubuntu: sudo apt install python3-venv; elsewhere use the Python from python.org."
)


class Failure(Exception):
    """A sentence for the user; `code` is the exit code, 2 for a wrong call."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


def root():
    from pathlib import Path

    return Path(__file__).resolve().parent


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


def satisfied(version, requirement):
    """Whether a version ("2.13.0+cpu") meets a requirement line ("torch>=2.4")."""
    specifier = vendored("packaging.requirements").Requirement(requirement).specifier
    return specifier.contains(version, prereleases=True)


def fingerprint(python, lines):
    """Says whether an environment is up to date: a hash of the interpreter's version and what was installed."""
    import hashlib

    return hashlib.sha256("\n".join([python, *lines]).encode()).hexdigest()


def vendored(name):
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
    toml = vendored("tomllib" if sys.version_info >= (3, 11) else "tomli")
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
    return Path(str(torch.locate_file(""))).resolve() if satisfied(torch.version, requirement) else None


def venv_python(folder):
    """Path of an environment's interpreter."""
    import os

    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def is_usable(folder):
    """Whether the environment is there, runs, has pip, and is of this Python's version."""
    import subprocess

    if not venv_python(folder).exists():
        return False
    command = [str(venv_python(folder)), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() == "{}.{}".format(*sys.version_info[:2])


def make_environment(folder, torch_folder):
    """Make `folder` anew; with `torch_folder`, packages beside that torch are visible from inside."""
    from importlib.util import find_spec

    if not find_spec("venv") or not find_spec("ensurepip"):
        raise Failure(NO_VENV.format(python=sys.executable))
    if folder.exists() and not (folder / OWNER).exists():
        raise Failure(f"{folder} exists, was not made by install.py and does not run under this Python; "
                      "move it away, or call install.py with the Python it belongs to")
    import os
    import shutil
    import subprocess
    import venv

    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / OWNER).write_text("Made by install.py of tome_core, which may remove it and make it again.\n")
    # An environment can see its base interpreter's packages, but not those of another environment it is made from.
    foreign = torch_folder is not None and sys.prefix != sys.base_prefix
    print(f"Making a private environment in {folder} ...", flush=True)
    builder = venv.EnvBuilder(system_site_packages=torch_folder is not None and not foreign, with_pip=True,
                              symlinks=os.name != "nt")
    try:
        builder.create(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        raise Failure(f"{folder} could not be made ({error}). {NO_VENV.format(python=sys.executable)}") from error
    if foreign:
        link = next(folder.glob("**/site-packages")) / "torch_of_parent.pth"
        link.write_text(f"{torch_folder}\n", encoding="utf-8")


def environment(extras, no_deps=()):
    """The interpreter of an environment that has `extras` installed; the second call needs no pip.

    `no_deps`: requirement lines installed without their own dependencies.
    """
    import re

    lines = requirements(read_project(root() / "pyproject.toml"), extras)
    folder = root() / ".venv"
    stamp = folder / f"installed-{'-'.join(extras)}.txt"
    torch_folder = reusable_torch(next(line for line in lines if re.match(r"torch\b", line)))
    mark = fingerprint(sys.version, [*lines, *no_deps, str(torch_folder)])
    if stamp.exists() and stamp.read_text() == mark and venv_python(folder).exists():
        return str(venv_python(folder))
    if not is_usable(folder):
        print(f"torch is taken from {torch_folder}." if torch_folder else
              "torch will be downloaded, which can take a while. (A Python that has it already would be reused.)")
        make_environment(folder, torch_folder)
    python = str(venv_python(folder))
    print("Installing what is needed ...", flush=True)
    pip(python, lines)
    if no_deps:
        pip(python, ["--no-deps", *no_deps])
    stamp.write_text(mark)
    return python


def pip(python, arguments):
    """`pip install` in the environment; the user's own pip settings apply. Raises Failure if it fails."""
    code = run([python, "-m", "pip", "install", "--disable-pip-version-check", *arguments])
    if code:
        raise Failure(f"pip could not install what is needed (exit code {code}, its reason is above); "
                      "the next call goes on from here")


def run(command, **options):
    """Run a command to its end and give its exit code; on Ctrl-C it gets ten seconds to end by itself."""
    import subprocess

    with subprocess.Popen(command, **options) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()
            raise


def demo(arguments):
    """pictures with and without merging, side by side (options: install.py demo --help)"""
    # Not `-m demo`: that would look into the current folder first, which is the user's.
    return run([environment(["demo"]), str(root() / "demo"), *arguments])


def test(arguments):
    """ruff and the tests; further arguments go to pytest"""
    lines = (root() / "tests" / "requirements-no-deps.txt").read_text(encoding="utf-8").splitlines()
    no_deps = [line for line in lines if line and not line.startswith("#")]
    python = environment(["demo", "test"], no_deps)
    style = run([python, "-m", "ruff", "check", "."], cwd=root())
    return run([python, "-m", "pytest", *arguments], cwd=root()) or style


def comfyui(arguments):
    """the nodes into a ComfyUI: comfyui DIR (undone by --uninstall)"""
    return place("comfyui", arguments)


def webui(arguments):
    """the extension into A1111, Forge or reForge: webui DIR (undone by --uninstall)"""
    return place("webui", arguments)


def place(host, arguments):
    """Put the repository into a host's folder, or take it out."""
    places = part("install_places.py")
    return places.main(places.HOSTS[host], arguments)


def part(path):
    """A module of this repository by its file: without the package around it, which imports torch."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.removesuffix(".py"), root() / path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMANDS = {"demo": demo, "test": test, "webui": webui, "comfyui": comfyui}


def usage():
    """The commands, a line each."""
    lines = "\n".join(f"  python install.py {name:8}{command.__doc__}" for name, command in COMMANDS.items())
    return f"usage:\n{lines}\n  python install.py         nothing: hosts call it so"


def main(arguments):
    """Gives the exit code: 0 done, 2 wrong call, 130 interrupted, else that of the command."""
    if not arguments:
        return 0
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
