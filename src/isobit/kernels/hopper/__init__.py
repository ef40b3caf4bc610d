"""The operations on Hopper GPUs, in Triton, Gluon and DeepGEMM.

Bytes of the quantisers equal the CPU's; bits of products do not, since tensor cores round partial
sums.  On both, a row's bits depend on that row alone, so rollout and training agree.
"""
