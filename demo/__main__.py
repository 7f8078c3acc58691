"""`python -m demo`, or `python path/to/demo` from anywhere."""

import sys
from pathlib import Path

if not __package__:
    # Started as a folder, its own modules are on the path; their package is wanted instead.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo.command import main

if __name__ == "__main__":
    sys.exit(main())
