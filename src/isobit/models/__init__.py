"""One decoder and its families, the policy's weights, and Hugging Face folders in and out."""
