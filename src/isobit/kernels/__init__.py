"""The operations, and the protocol through which everything above calls them (``backend.py``).

    backend.py     the protocol ``Backend``, and which back end a device has
    operands.py    what its operations take and return: weights, operands, batches, caches
    sizes.py       bytes that a back end needs, without loading it
    noise.py       noise keys, AdamW's factors and checksums, the same for every back end
    spec/          the CPU specification in torch, which defines an operation's result
    triton/        the same on NVIDIA GPUs since Ampere, in Triton
    hopper/        on Hopper GPUs, of which it is a faster one: Gluon and DeepGEMM

A product's name is DeepGEMM's: precision, operation, layout.  ``fp8`` has E4M3 operands with
scales, ``bf16`` plain ones, and ``grid`` (on the CPU) BF16 or FP32 that was rounded to a grid so
that its sums are exact.  The layout has a letter for each operand as the layer holds it, A before
B: ``n`` as it is in the product, ``t`` transposed.  ``triton_`` means that no library is called.

    nt    Y  = X W^T      FProp: X [M, K], W [N, K]
    nn    dX = dY W       DGrad: dY [M, N], W [N, K]
    tn    dW = dY^T X     WGrad, added to the FP32 gradient: dY [T, N], X [T, K]

FP8 tensor cores read both operands along the contraction.  So DGrad transposes the bytes of W, and
``fp8_gemm_tn`` takes dY^T and X^T as the quantisers of token groups wrote them.
"""
