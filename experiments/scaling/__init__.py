"""A simulation of steps on many GPUs, from rates measured on one host."""
