"""``python -m tests.beside --count 3000``: that many random pairs of foreign things beside merging."""

from __future__ import annotations

import sys

from tests.beside.pairs import COMMAND, run
from tests.random_stackings.__main__ import in_silence, main

if __name__ == "__main__":
    in_silence()
    sys.exit(main(None, run, COMMAND))
