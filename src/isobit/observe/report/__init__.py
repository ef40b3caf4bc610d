"""``isobit report``: a run's directory, or several, as one HTML page that needs nothing but a
browser.

    source        the run's files, also where some are missing or torn
    axis          ticks, and numbers as a reader takes them
    series        figures over steps, long runs put together into points
    chart         points as the geometry of an SVG chart, with the table that says the same
    panels        which charts the page has
    notices       what to know before looking at them
    tiles         the figures on top
    flow_view     the precision flow from the manifest, equal layers folded
    samples       completions, token by token with their log-probabilities
    settings      the configuration, what was changed first
    page          all of it through ``report.html``
    comparison    several runs through ``comparison.html``
    watching      the page of a run under way, again and again

The page holds no script and refuses to load anything (a Content-Security-Policy of its own); every
text passes through the template's escaping, since prompts, completions and names are data.
"""
