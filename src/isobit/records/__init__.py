"""What passes between the rooms, from a prompt to a gradient.

``text`` and ``sequence`` hold no tensors: prompts, completions and groups, and what was sampled,
token by token.  ``batch`` is what a micro-batch of the trainer sees.  ``rollout`` makes
completions, ``rewards`` grades them, ``training`` packs their sequences and learns from them; none
of the three imports another.
"""
