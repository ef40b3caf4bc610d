"""A look at a model folder: what is in it, what FP8 does to its weights, what it takes."""
