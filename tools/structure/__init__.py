"""The structure of the source tree in figures, and the limits that ``make lint`` holds it to.

``trace`` runs one step of reinforcement learning and follows its calls, ``source`` reads the text,
``gates.toml`` has the limits and the goals.
"""
