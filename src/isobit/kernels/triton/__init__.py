"""Operations in Triton for every NVIDIA GPU since Ampere (sm_80).

No kernel here needs what only later generations have.  Operations that multiply take the products
of a back end (``products``): those of this folder, or of ``isobit.kernels.hopper``, whose back end
is this one with others.
"""
