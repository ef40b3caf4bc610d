"""The pictures of docs/architecture.md as SVG: ``python -m tools.pictures`` writes them anew.

A picture is read on GitHub and on the site, in light and in dark, so it has a ground of its own.
"""
