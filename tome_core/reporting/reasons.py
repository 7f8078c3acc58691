"""Why a call was left alone, in the words of more than one room."""

NO_GRID = "the tokens are not the picture's grid"
TOO_SMALL = "the grid is too small for the ratio to remove a token"
MASKED = "an attention mask came along"
REPLACED = "something else runs in its place"
OTHER_PARTS = "its rule merges other parts"
OF_OTHERS = "keys and values are not the picture's tokens"
