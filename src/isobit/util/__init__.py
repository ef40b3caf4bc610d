"""What every other package may import: errors, files, the terminal, users' code."""
