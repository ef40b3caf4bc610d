"""Supervised fine-tuning from start to end: what ``isobit sft`` runs."""
