"""The one command of this repository, and the half of it that makes environments; install_hosts.py is the other half.

People run `python install.py demo`, `page`, `gpu` or `test`: a private environment `.venv` beside this file is made and
filled once, and the command runs in it. `webui` and `comfyui` put us into a host. Hosts run this file bare when they
install the extension and with every launch: it then has nothing to do and says nothing. Only the standard library and
pip are needed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import signal
import subprocess  # noqa: TID251 - environments, pip, and the command that the user asked for
import sys
from importlib.util import find_spec
from pathlib import Path

from install_hosts import COMFYUI, ROOT, WEBUI, Failure, install_into

OWNER = "tome_core.txt"  # this file in an environment says that it was made here and may be made again
# MB that pip downloads for an extra, torch apart: from wheels and installed folders on Linux, rounded up
SIZES = {"demo": 120, "page": 60, "benchmarks": 20, "test": 70}
DOWNLOADS = """python install.py {command} fills a private environment, {folder}, and asks pip for
torch ({torch}) and up to {rest} MB more, less what is there and what pip's cache has.
Ctrl-C is safe and the same command goes on: complete files are in pip's cache."""
TORCH_TO_COME = """0.1 to 0.2 GB on Windows and macOS; 2 to 4 GB on Linux, with CUDA, or 0.2 GB without it, if
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu is set"""
NO_VENV = ("this Python ({python}) cannot make environments: its 'venv' or 'ensurepip' is missing. "
           "On Debian or Ubuntu: sudo apt install python3-venv; elsewhere use the Python from python.org.")


def requirements(project, extras):
    """Return a parsed pyproject.toml's dependencies and those of `extras`, as requirement lines, each once.

    Raises Failure if pyproject.toml lacks an extra.
    """
    optional = project["project"].get("optional-dependencies", {})
    missing = [extra for extra in extras if extra not in optional]
    if missing:
        raise Failure(f"pyproject.toml has no optional-dependencies {missing[0]!r}; it has {', '.join(optional)}")
    lines = [*project["project"].get("dependencies", []), *(line for extra in extras for line in optional[extra])]
    return list(dict.fromkeys(lines))


def satisfies(version, requirement):
    """Tell whether a version ("2.13.0+cpu") meets a requirement line ("torch>=2.4"). Pre-releases can."""
    specifier = import_vendored("packaging.requirements").Requirement(requirement).specifier
    return specifier.contains(version, prereleases=True)


def fingerprint(python, lines):
    """Return a hash of a Python version's text and of requirement lines, to see if an environment is up to date."""
    return hashlib.sha256("\n".join([python, *lines]).encode()).hexdigest()


def import_vendored(name):
    """Import and return a module that Python may lack, or else pip's own copy. Raises Failure without either."""
    for candidate in (name, f"pip._vendor.{name}"):
        try:
            return importlib.import_module(candidate)
        except ImportError:
            continue
    raise Failure(f"this Python ({sys.executable}) has neither {name!r} nor pip; install pip: "
                  "python -m ensurepip, or on Debian and Ubuntu: sudo apt install python3-pip")


def read_project(path):
    """Return the pyproject.toml at a path, parsed to a dict."""
    toml = import_vendored("tomllib" if sys.version_info >= (3, 11) else "tomli")
    with open(path, "rb") as file:
        return toml.load(file)


def reusable_torch(requirement):
    """Return the folder of packages that holds this Python's torch; None if none meets the line. Imports no torch."""
    from importlib import metadata  # takes as long as all other imports together, and a host's call needs none of it

    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(torch.locate_file(""))).resolve() if satisfies(torch.version, requirement) else None


def venv_python(folder):
    """Return the path of the Python in an environment's folder."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def is_usable(folder):
    """Tell whether an environment's folder exists, and its Python runs, has pip and has this Python's version."""
    if not venv_python(folder).exists():
        return False
    command = [str(venv_python(folder)), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "{}.{}".format(*sys.version_info[:2])


def make_environment(folder, torch_folder):
    """Make an environment in `folder`. An earlier environment there that install.py made is deleted.

    `torch_folder` has packages with torch, which the environment can import; None for none. Raises Failure if
    environments cannot be made, or `folder` was not made by install.py.
    """
    if not find_spec("venv") or not find_spec("ensurepip"):
        raise Failure(NO_VENV.format(python=sys.executable))
    if folder.exists() and not (folder / OWNER).exists():
        raise Failure(f"{folder} exists, was not made by install.py and does not run under this Python; "
                      "move it away, or call install.py with the Python it belongs to")
    import venv  # which a Linux may lack

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
    """Return a line for a .pth file that makes `folder` importable; ASCII, because Pythons decode it differently."""
    return f"import sys; sys.path.append({str(folder)!a})\n"


def environment(extras, no_deps=(), command=None):
    """Return the path of a Python that has `extras` of pyproject.toml installed, in the environment `.venv`.

    Environment and packages are installed if they are missing or out of date. `no_deps` are requirement lines that are
    installed without their own dependencies. `command` is the command's name, for the text; None for the last extra's.
    Raises Failure if the installation failed or was stopped.
    """
    lines = requirements(read_project(ROOT / "pyproject.toml"), extras)
    folder = ROOT / ".venv"
    python, stamp = str(venv_python(folder)), folder / f"installed-{'-'.join(extras)}.txt"
    torch_folder = reusable_torch(next(line for line in lines if re.match(r"torch\b", line)))
    mark = fingerprint(sys.version, [*lines, *no_deps, str(torch_folder)])
    if stamp.exists() and stamp.read_text() == mark and os.path.exists(python):
        return python
    try:
        torch = f"taken from {torch_folder}, nothing to download" if torch_folder else TORCH_TO_COME
        rest = sum(SIZES[extra] for extra in extras)
        print(DOWNLOADS.format(command=command or extras[-1], folder=folder, torch=torch, rest=rest))
        if not is_usable(folder):
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
    """Run ``pip install`` by a Python, with arguments and the user's own pip settings. Raises Failure if it fails."""
    code = run([python, "-m", "pip", "install", "--disable-pip-version-check", *arguments])
    if code:
        raise Failure(f"pip could not install what is needed (exit code {code}, its reason is above); "
                      "the next call goes on from here")


def run(command, **options):
    """Run a command to its end and return its exit code. Options are those of ``subprocess.Popen``.

    SIGTERM is passed on to the command. After Ctrl-C the command has ten seconds to end before it is terminated, and
    KeyboardInterrupt is raised. The command's output shows letters as numbers if the terminal cannot show them.
    """
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


# --- the commands -----------------------------------------------------------------------------------------------------


def demo(arguments):
    """pictures with and without merging, side by side (options: install.py demo --help)"""
    # Not `-m demo`: that would look into the current folder first, which is the user's.
    return run([environment(["demo"]), str(ROOT / "demo"), *arguments])


def page(arguments):
    """a page in the browser to try the settings on (options: install.py page --help)"""
    return run([environment(["demo", "page"]), str(ROOT / "demo" / "page.py"), *arguments])


def gpu(arguments):
    """what merging costs and gains on this graphics card (options: install.py gpu --help)"""
    return run([environment(["benchmarks"], command="gpu"), str(ROOT / "benchmarks" / "gpu.py"), *arguments])


def test(arguments):
    """ruff and the quick tests; --all: every test; other arguments go to pytest"""
    lines = (ROOT / "tests" / "requirements-no-deps.txt").read_text(encoding="utf-8").splitlines()
    no_deps = [line for line in lines if line and not line.startswith("#")]
    python = environment(["demo", "benchmarks", "test"], no_deps)
    style = run([python, "-m", "ruff", "check", "."], cwd=ROOT)
    return run([python, "-m", "pytest", *tests_to_run(arguments)], cwd=ROOT) or style


def tests_to_run(arguments):
    """Return pytest's arguments for the command `test`: the given ones other than --all, if there are any.

    Else --all means the arguments for all tests, and no argument those for the quick tests.
    """
    others = [argument for argument in arguments if argument != "--all"]
    if others:
        return others
    # a file at a time, those with slow tests first: a test runs on one thread
    processes = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile", "--no-loadscope-reorder"]
    return processes if arguments else [*processes, "--quick"]


def comfyui(arguments):
    """the nodes into a ComfyUI: comfyui DIR (undone by --uninstall)"""
    return install_into(COMFYUI, arguments)


def webui(arguments):
    """the extension into A1111, Forge, reForge or SD.Next: webui DIR (undone by --uninstall)"""
    return install_into(WEBUI, arguments)


REQUIRED_PYTHON = (3, 10)
COMMANDS = {"demo": demo, "page": page, "gpu": gpu, "test": test, "webui": webui, "comfyui": comfyui}


def usage():
    """Return the text that lists the commands, each with its docstring."""
    lines = "\n".join(f"  python install.py {name:8}{command.__doc__}" for name, command in COMMANDS.items())
    return f"usage:\n{lines}\n  python install.py         nothing: hosts call it so"


def main(arguments):
    """Run the command that the arguments name, and return its exit code; without arguments do nothing and return 0.

    The code is 1 if a command fails with a sentence for the user, 2 for a wrong call, 130 if the user stopped it, else
    the command's own. ``--help`` prints the usage.
    """
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
