"""Datasets: rows, chat templates, tokenizers, and the order in which training visits prompts."""
