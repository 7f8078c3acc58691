"""The matching methods, each of which decides which tokens merge.

To add a method:

1. write ``tome_core/merging/methods/NAME.py`` with ``match(x, grid, options) -> MergePlan | None``;
2. describe it at the end of that file as ``METHOD = Method("NAME", match)``, and add it to the tuple below;
3. run ``python install.py test``: ``tests/engine/merging/test_methods.py`` and the patch contract test every method;
4. run ``python -m benchmarks.doc_tables --write``, which adds the method to the tables in the docs.
"""

from . import bipartite, cluster
from .base import MatchOptions, Method

METHODS: dict[str, Method] = {
    method.name: method for method in (bipartite.METHOD, cluster.METHOD, cluster.BY_SIMILARITY)
}

__all__ = ["METHODS", "MatchOptions", "Method"]
