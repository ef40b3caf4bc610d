"""The house, counted: what a source tree asks of its reader, in figures that can be compared.

    python -m tools.house [TREE ...] [--json] [--list]

``passes`` measures what a token and a weight pass through, ``source`` reads the text.
"""
