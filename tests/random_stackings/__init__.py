"""Random models, settings, calls and patches over patches, ComfyUI graphs and webui jobs: a picture, or a sentence.

``python -m tests.random_stackings --count 10000`` draws as many cases. Laws: what raises raises without merging too, or
says with its value what is wrong; pictures have their shape and are finite; once all is off again the model draws the
bits it drew before and nothing of ours is left on it; the random generators are where they were; a case that is drawn
again gives the same bits.
"""
