"""What several GPUs of one host do together, beside one of them alone."""
