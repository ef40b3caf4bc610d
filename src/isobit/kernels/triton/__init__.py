"""Operations in Triton for every NVIDIA GPU since Ampere (sm_80).

No kernel here uses what only later generations have, and ``isobit.kernels.hopper`` takes from here
whatever it has no faster kernel for.  Linears, products of experts, norm, SwiGLU, the embedding,
attention with its Q, K and V, log-probabilities, sampling and the scalar head are whole.  This is
no back end yet, since lm_head, routing, adapters, the KV cache and the optimiser are not here: no
device chooses it.
"""
