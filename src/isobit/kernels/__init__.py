"""The operations, and the seam that everything above calls them through.

    backend.py              the seam: the protocol ``Backend``, its operations by name, and which
                            back end a device has
    operands.py             what passes through it: weights, quantised operands, batches, caches
    sizes.py                what a back end takes, in bytes, without loading it
    trace.py                where a diagnosis looks on as operations run
    adamw.py, noise.py,     what has one definition for every back end
    rope.py
    spec/                   the CPU specification, in torch: what an operation's result is
    hopper/                 the same on Hopper GPUs: Triton, Gluon and DeepGEMM

The two folders are siblings with the same file names, an operation a file.  The rule of exactness
that both keep is in ``backend.py``.

A product's name is DeepGEMM's: precision, operation, layout.  ``fp8`` has E4M3 operands with
scales, ``bf16`` plain ones, and ``grid`` (on the CPU) BF16 or FP32 that was snapped to a grid so
that its sums are exact.  The layout has a letter for each operand as the layer holds it, A before
B: ``n`` as it stands in the product, ``t`` transposed.

    nt    Y  = X W^T      FProp: X [M, K], W [N, K]
    nn    dX = dY W       DGrad: dY [M, N], W [N, K]
    tn    dW = dY^T X     WGrad, added to the FP32 gradient: dY [T, N], X [T, K]

FP8 tensor cores read both operands along the contraction.  So ``fp8_gemm_nn`` transposes the bytes
of W itself, and ``fp8_gemm_tn`` takes dY^T and X^T as the quantisers of token groups wrote them.
``triton_`` in front says that no library is called.
"""
