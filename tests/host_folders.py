"""What install.py does in a host's folder, as laws: a host's own test says which host, and what works there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import install_hosts as install

ROOT = Path(__file__).parents[1]


def call_install(
    *arguments: object, cwd: Path = ROOT, root: Path = ROOT, options: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """options: Python's."""
    command = [sys.executable, *options, str(root / "install.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def make_folder(host: install.Host, parent: Path) -> Path:
    """A folder like the host's, in a path that no module name could be made of."""
    made = parent / "a host v0.33.0"
    for name in host.looked_for[0]:
        if name.endswith(".py"):
            made.mkdir(exist_ok=True)
            (made / name).touch()
        else:
            (made / name).mkdir(parents=True)
    return made


class Installed:
    """The laws. host: which; a subclass has a fixture `works` as well, which looks at the place where it was put."""

    host: install.Host

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return make_folder(self.host, tmp_path)

    @pytest.fixture
    def place(self, folder: Path) -> Path:
        return folder / self.host.place / "tome_core"

    @pytest.mark.parametrize("options", [(), ("--copy",)], ids=["link", "copy"])
    def test_it_is_put_there_and_taken_away(self, folder, place, works: Callable, options):
        for _ in range(2):  # again is no mistake
            done = call_install(self.host.command, folder, *options)
            assert done.returncode == 0 and str(place) in done.stdout, done.stderr
        assert place.is_symlink() != bool(options)
        works(place)
        done = call_install(self.host.command, folder, "--uninstall")
        assert done.returncode == 0 and not os.path.lexists(place)
        assert all((ROOT / name).exists() for name in self.host.copied)
        assert "nothing to undo" in call_install(self.host.command, folder, "--uninstall").stdout

    def test_where_links_are_not_possible_it_is_copied(self, folder, works: Callable, monkeypatch):
        monkeypatch.setattr(Path, "symlink_to", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no right")))
        place = install.target(self.host, folder)
        assert "Copied" in install.put(self.host, place)
        works(place)

    def test_another_folder_is_refused_with_what_was_looked_for(self, tmp_path):
        done = call_install(self.host.command, tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert all(name in done.stderr for name in self.host.looked_for[0])
        assert not list(tmp_path.iterdir())

    def test_a_folder_of_somebody_else_is_not_replaced(self, folder, place):
        place.mkdir()
        (place / "mine.txt").touch()
        for options in ((), ("--uninstall",), ("--copy",)):
            done = call_install(self.host.command, folder, *options)
            assert done.returncode == 1 and "was not made by install.py" in done.stderr
        assert (place / "mine.txt").exists()

    def test_it_may_be_one_folder_down(self, folder, tmp_path):
        folder.rename(tmp_path / self.host.below)
        assert install.target(self.host, tmp_path).parent == (tmp_path / self.host.below / self.host.place).resolve()
