"""How many calls of our functions, and changes from file to file, a call of one block may take."""

from __future__ import annotations

# of one block and its transformer; a reader follows each by hand
# Of the changes one is for queries, which are made once for a match and its call, and two for what graphs ask: what is
# kept is asked for in one place.
MOST_CALLS, MOST_CHANGES = 40, 18
MOST_CALLS_LEFT_ALONE, MOST_CALLS_SWITCHED_OFF = 8, 8
