"""The matching methods: each finds, in its own way, which tokens merge.

To add one:

1. write ``tome_core/merging/methods/NAME.py`` with ``match(x, grid, options) -> MergePlan | None``;
2. describe it at the end of that file as ``METHOD = Method("NAME", match)``;
3. add it to the tuple below;
4. run ``python install.py test``: the laws in ``tests/engine/merging/test_methods.py`` and the patch contract run over
   every registered method; ``python -m benchmarks.doc_tables --write`` names it there.
"""

from . import bipartite, cluster
from .base import MatchOptions, Method

METHODS: dict[str, Method] = {
    method.name: method for method in (bipartite.METHOD, cluster.METHOD, cluster.BY_SIMILARITY)
}

__all__ = ["METHODS", "MatchOptions", "Method"]
