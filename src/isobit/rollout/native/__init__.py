"""The native engine: continuous batching with the rollout side of a policy.

``engine`` takes requests and tells what happens to them; ``works`` is what it has on the device;
``executor`` and ``pipeline`` are the two ways to take a step.  ``scheduler`` decides who takes part
in a forward, over the books of ``pages`` and the states in ``sequence``; ``limits`` is what could
never be served.  ``batch`` makes the tensors, ``runner`` puts them through the model, ``sampler``
draws the tokens, ``stops`` ends texts, ``stream`` tells them as they grow.
"""
