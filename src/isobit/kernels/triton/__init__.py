"""Operations in Triton for every NVIDIA GPU since Ampere (sm_80).

No kernel here uses what only later generations have, and ``isobit.kernels.hopper`` takes from here
whatever it has no faster kernel for.  This is no back end yet, since lm_head and the optimiser are
not here: no device chooses it.
"""
