"""The same operations on Hopper GPUs, in Triton and through DeepGEMM: a file here for a file of
``isobit.kernels``.

Bytes of the quantisers equal the CPU's; the bits of a product do not (tensor cores round their
partial sums).  What holds on both is that a row's bits depend on that row alone, so rollout and
training agree.
"""
