"""What people run beside merging: foreign things times models times orders, held to the same few laws.

`things` is the table of what is put beside us, and how each is put on and taken off by those who know nothing of
merging; `models` is the table of models. `test_beside.py` multiplies them. A new thing is a row, and so is a model.
"""
