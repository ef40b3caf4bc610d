"""One operation a file: the CPU specification, and in time its other back ends beside it.

The rule of this room: in the forward, an output row's bits depend on that row's inputs alone, never
on its place in the batch, the number of rows, the number of threads or the vector width.  Products
are made exact (so that their order is free), sums that are not exact follow a fixed order, and only
element-wise operations that were measured to be position-independent are used: `exp` and `log` are;
`exp2`, `silu` and `sigmoid` are not.
"""
