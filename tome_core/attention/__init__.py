"""Self-attention with merged keys and values (`merged`), its correction, and support for the attentions of hosts."""
