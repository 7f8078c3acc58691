"""``python -m benchmarks.judges``: the small trained models that judge what merging does to pictures.

A checkout has only the demo's. The command brings the others out of the history, all or those that it names, into
benchmarks/judges/. It needs a whole clone, and no network. demo/README.md describes the models.
"""

import argparse
import subprocess  # noqa: TID251 - git has them
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks import report
from benchmarks.results import ROOT
from demo import model

FOLDER = ROOT / "benchmarks" / "judges"
# what git calls their contents, whatever commit or folder had them
BLOBS = {
    "scenes128-b": "bf06ba2f9c88939702d0041a85acbeafacd5f801",
    "scenes128-c": "1798eeaaf27f9ddfb3c569db5d315fdc956dc3ec",
    "scenes-sdxl": "78c1ccfc7bc66a090d5ae4c74d89ad19dd753583",
    "scenes-sdxl-deep": "a96f176eb23c1659500c8b1da8181d3c7722f029",
    "scenes-flux": "8f9191031a9e340dd2efad5e149ad03d377b8420",
    "scenes-flux-deep": "ac47b1e678bd01c14c687efcc9fb3afe8726247d",
}
_NOT_IN_HISTORY = ("the history of this clone has no {}: it is shallow, or no clone. Run git fetch --unshallow, or "
                   "clone without --depth, and then this again")  # fmt: skip


def path_of(name: str) -> Path:
    """Return the path of a judge, in a checkout or not."""
    return FOLDER / f"{name}.safetensors" if name in BLOBS else model.WEIGHTS.with_name(f"{name}.safetensors")


SD = tuple(map(path_of, ("scenes128", "scenes128-b", "scenes128-c")))  # sharp, sharp of another seed, smooth
SDXL = tuple(map(path_of, ("scenes-sdxl", "scenes-sdxl-deep")))
FLUX = tuple(map(path_of, ("scenes-flux", "scenes-flux-deep")))


def check(paths: Iterable[Path]) -> None:
    """Raise FileNotFoundError, which names the command, if one of these paths is a judge's that is not here."""
    missing = [path.stem for path in paths if not path.exists() and path.stem in BLOBS]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)}: not in a checkout; python -m benchmarks.judges "
                                f"{' '.join(missing)} takes them out of a whole clone's history")  # fmt: skip


def bring(name: str) -> Path:
    """Write a judge's file, if it is not here, and return its path. FileNotFoundError: the history lacks it."""
    path = path_of(name)
    if not path.exists():
        done = subprocess.run(["git", "cat-file", "blob", BLOBS[name]], cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            raise FileNotFoundError(_NOT_IN_HISTORY.format(name))
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(done.stdout)
        part.replace(path)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Bring judges; return 0, 2 after an error. arguments: None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges", description=__doc__.partition("\n\n")[2])
    parser.add_argument("names", nargs="*", choices=(*BLOBS, []), metavar="NAME", help=", ".join(BLOBS))

    def execute(options: argparse.Namespace, command: str) -> None:
        for name in options.names or BLOBS:
            print(bring(name).relative_to(ROOT))

    return report.run("judges", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
