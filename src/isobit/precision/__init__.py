"""What is quantised and how: formats, scales, quantised tensors, the flow of a run and the
comparison of its two sides.
"""
