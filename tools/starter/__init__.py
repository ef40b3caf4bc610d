"""How the starter model was made: its tokenizer, its text, its figures and its card."""
