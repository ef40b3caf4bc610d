"""``isobit report``: the directory of a run, or of several, as one HTML page without scripts.

``source`` reads a run's files, ``panels`` selects charts, notices and headline figures, ``chart``
computes an SVG chart, ``samples`` selects completions and the precision flow, and ``page`` renders
the templates.
"""
