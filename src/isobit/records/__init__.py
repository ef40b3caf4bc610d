"""What passes between the rooms, from a prompt to a gradient.

``text`` and ``sequence`` hold no tensors: prompts, completions and groups, and what was sampled,
token by token; ``messages`` reads chats as people and datasets write them.  ``wire`` sends and
stores groups.  ``packing`` makes of their sequences each ``batch`` that the trainer sees.
``rollout`` makes completions, ``rewards`` grades them, ``training`` packs their sequences and
learns from them; none of the three imports another.
"""
