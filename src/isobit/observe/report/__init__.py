"""``isobit report``: a run's directory as one HTML page that needs nothing but a browser.

    source        the run's files, also where some are missing or torn
    axis          ticks, and numbers as a reader takes them
    series        figures over steps, long runs put together into points
    chart         points as the geometry of an SVG chart, with the table that says the same
    panels        which charts the page has
    flow_view     the precision flow from the manifest, equal layers folded
    samples       completions, token by token with their log-probabilities
    page          all of it through ``report.html``, the one template

The page holds no script and refuses to load anything (a Content-Security-Policy of its own); every
text passes through the template's escaping, since prompts, completions and names are data.
"""
