"""Recipes: tables, TOML files, dotted overrides, and errors that name the key. Imports no torch."""
