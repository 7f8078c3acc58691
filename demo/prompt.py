"""Prompts of the embedded model: at most one word for each attribute of a scene. Needs no torch, for quick checks."""

ATTRIBUTES = {
    "sky": ("day", "sunset", "night", "dawn", "storm"),
    "ground": ("sea", "meadow", "desert", "snow"),
    "body": ("nobody", "left", "right"),  # the sun or the moon: none, or on which side
    "mountains": ("flat", "hills", "peaks"),
    "shape": ("empty", "ball", "box", "cone", "tree"),
    "colour": ("red", "yellow", "blue", "white", "green"),
}
SIZES = tuple(len(values) for values in ATTRIBUTES.values())
NULL_TOKEN = sum(SIZES)  # "no prompt": the unconditional half of classifier-free guidance
VOCABULARY = NULL_TOKEN + 1
OFFSETS = [sum(SIZES[:place]) for place in range(len(SIZES))]  # every value of every attribute has a token of its own
ATTRIBUTE_OF = {word: name for name, words in ATTRIBUTES.items() for word in words}
# What a prompt leaves open. The null token is no choice here: in training it replaced all six or none.
DEFAULTS = {"sky": "day", "ground": "meadow", "body": "nobody", "mountains": "flat", "colour": "red"}
PROMPTS = (
    "sunset sea peaks left red ball",
    "day meadow hills right yellow tree",
    "night snow peaks right blue cone",
    "dawn desert hills left green box",
    "day sea hills left white tree",
    "storm meadow peaks right red cone",
)


def known_words() -> str:
    """Return one line with all words that a prompt may use: ``attribute: word, word; attribute: ...``."""
    return "; ".join(f"{name}: {', '.join(words)}" for name, words in ATTRIBUTES.items())


def parse(prompt: str) -> dict[str, str]:
    """Return the word for each attribute: "night red" gives {"sky": "night", "colour": "red", "shape": "ball", ...}.

    Words may be separated by spaces or commas, in any order and case. What is left out gets a default; a prompt
    that names a colour and no shape means a ball, and without either an empty scene. Raises ValueError, listing
    the known words, for an unknown word and for two different words of one attribute.
    """
    chosen: dict[str, str] = {}
    for word in prompt.lower().replace(",", " ").split():
        if word not in ATTRIBUTE_OF:
            raise ValueError(f"the embedded model does not know the word {word!r} in the prompt {prompt!r}; "
                             f"it knows {known_words()}")
        name = ATTRIBUTE_OF[word]
        if chosen.get(name, word) != word:
            raise ValueError(f"the prompt {prompt!r} names two values for {name}, {chosen[name]!r} and {word!r}; "
                             f"keep one of them (it knows {known_words()})")
        chosen[name] = word
    shape = "ball" if "colour" in chosen else "empty"
    return {name: chosen.get(name) or DEFAULTS.get(name, shape) for name in ATTRIBUTES}


def tokens(prompt: str) -> list[int]:
    """Return a prompt's six token ids, in the order of ATTRIBUTES. Raises ValueError as `parse` does."""
    words = parse(prompt)
    return [first + ATTRIBUTES[name].index(words[name]) for name, first in zip(ATTRIBUTES, OFFSETS, strict=True)]
