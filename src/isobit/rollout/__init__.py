"""The native engine: from prompts to completions with the rollout side of a policy.

``engine`` is the loop; ``executor`` and ``pipeline`` are its two ways to take a step.
``scheduler`` decides who takes part in a forward, over the bookkeeping of ``pages`` and the states
in ``sequence``; ``batch`` makes the tensors, ``runner`` puts them through the model, ``sampler``
draws the tokens, ``stops`` ends texts.
"""
