"""Self-attention with merged keys and values (`merged`), its correction, and support for the attentions of hosts.

An attention that calls an attention function needs no description: `functions` tests that function. An attention that
computes its scores by hand needs a description (`by_hand`).
"""
