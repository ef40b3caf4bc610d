"""What is quantised and how: formats, scales, quantised tensors, and the precision flow."""
