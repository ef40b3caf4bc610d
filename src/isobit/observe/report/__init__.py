"""``isobit report``: a run's directory, or several, as one HTML page that needs nothing but a
browser.

    source     the run's files, also where some are missing or torn
    panels     which charts the page has, after the table of metrics; notices; the figures on top
    chart      metrics over steps as the geometry of an SVG chart, with a table of the same numbers
    samples    completions, token by token with their log-probabilities, and the precision flow
    page       all of it through the templates: one run, several runs, a run under way

The page holds no script and refuses to load anything (a Content-Security-Policy of its own); every
text passes through the template's escaping, since prompts, completions and names are data.
"""
