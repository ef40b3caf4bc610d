"""Graders: what turns a completion into a number, and the care taken when one fails."""
