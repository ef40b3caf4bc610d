"""The structure of the source tree in figures, and the limits that ``make lint`` holds it to.

``trace`` runs steps of reinforcement learning and follows their calls with ``watch``; ``source``
and ``subjects`` read the text. ``gates.toml`` has the limits and the goals, ``exceptions.toml``
what is counted by rule and is as it should be.
"""
