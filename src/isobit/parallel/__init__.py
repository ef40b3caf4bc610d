"""Several processes: which rows each owns, what they exchange, and the order of sums."""
