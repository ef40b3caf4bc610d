"""Does exact FP8 learn like BF16, on a real checkpoint, and what does a mismatch cost?"""
