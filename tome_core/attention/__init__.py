"""Self-attention with merged keys and values (`merged`), its correction, and what is known of hosts' attentions.

An attention is known by the function that it calls (`functions`); if it computes its scores by hand, by a description
(`by_hand`).
"""
