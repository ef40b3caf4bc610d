"""What maintainers of Isobit run from the repository's root; nothing of it is in the wheel."""
