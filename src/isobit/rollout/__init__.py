"""From prompts to completions: what every engine offers, and the engines.

``engine`` is the protocol, and ``generate`` the loop over it; ``request`` is what is asked for and
``progress`` what was done.  ``shared`` is ``generate`` by all ranks of a world, between whose
engines half-done samples move (``sample_state``); ``WorkQueue`` is what they tell one another.
``native`` is the engine over the project's own kernels; another one is a file beside it.
"""
