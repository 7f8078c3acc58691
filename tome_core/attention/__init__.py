"""Self-attention with merged keys and values, for attentions whose inside is known.

An attention is known by the function that computes it. To describe one more:

1. derive from `KnownAttention`, or take `ForwardOnStandIn` where everything lies inside one ``forward``;
2. `register` it by that function's name: a host's with the host, what no host owns in a file beside this one;
3. hold it against attention over repeated keys, as ``tests/conformance.py`` does.

Whatever is not known is merged as tomesd merges it, and the report says so.
"""

from . import ldm, processors
from .known import ForwardOnStandIn, KnownAttention, LeftAlone, StandIn
from .registry import known_of, name_of, register

ldm.register()
processors.register()

__all__ = ["ForwardOnStandIn", "KnownAttention", "LeftAlone", "StandIn", "known_of", "name_of", "register"]
