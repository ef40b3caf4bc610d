"""Launchers: the processes of a run, started on this machine or on a Ray cluster."""
