"""How many calls of our functions, and changes from file to file, a call of one block may take."""

from __future__ import annotations

# of one block and its transformer; a reader follows each by hand
MOST_CALLS, MOST_CHANGES = 17, 10
MOST_CALLS_LEFT_ALONE, MOST_CALLS_SWITCHED_OFF = 12, 8
