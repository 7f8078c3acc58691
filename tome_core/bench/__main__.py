"""`python -m tome_core.bench`: see `command`."""

from .command import main

main()
