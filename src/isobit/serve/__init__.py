"""An OpenAI-compatible server on the native engine.

``protocol`` is what is asked and answered, ``app`` the routes, ``engine`` the thread in which the
engine runs, ``scoring`` the log-probabilities of tokens that are given.
"""
