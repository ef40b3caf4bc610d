"""The soft punishment of completions that near the length limit (DAPO, arXiv 2503.14476, equation
13).

With L the limit and B the buffer, for a completion of n tokens:

    0                       n <= L - B
    -(n - (L - B)) / B      up to L, where it is -1

times a factor.  It is added to the reward.
"""


def overlong_punishment(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a completion of ``length`` tokens: 0 or below."""
    beyond = min(max(length - (limit - buffer), 0), buffer)
    return -factor * beyond / buffer if beyond else 0.0
