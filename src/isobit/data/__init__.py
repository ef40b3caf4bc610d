"""Prompts in: dataset rows, chat templates, tokenizers, and the order in which training visits the
prompts.
"""
