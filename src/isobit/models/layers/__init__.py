"""The parts of a decoder, one file each: attention, MLP, norm, linear, embedding, head.

A unit knows everything about its part: its masters (names, shapes, the checkpoint's tensors), its
forward, what that saves, its backward, and the bytes of each for the memory plan.  Units compute
through the back end of the weights that they are given, and are the same in rollout, scoring and
training; ``isobit.models.decoder`` runs them.

The residual stream h travels with x, what the unit before has to add to it: the addition, the norm
behind it and the quantisation of that are one operation of a back end.
"""
