"""The figures that the simulation stands on, each with where it was measured; what is marked as
assumed was not.

Rates are bytes a second, times seconds.  Qwen3-8B's shape in ``fp8`` on one H200 unless it says
otherwise; rows and tables are those of docs/performance.md.
"""

# The card and its links.
MEMORY_GIB = 139.2
"""Of a card, for a process: benchmarks/memory.py."""
KV_READ = 3.98e12
"""Of decode attention, 256 sequences of 2,048: "Attention kernels"."""
EXCHANGE = 312e9
"""NVLink, out of one GPU, a layer's gradients of 8B between two by the copy engines: 386 MB in
1.23 ms (``benchmarks.parallel links``).  Assumed to be the same among eight.
"""
GATHER = 244e9
"""NVLink, into one GPU, the published bytes of 8B: 4.73 GB in 19.4 ms (the same place)."""
SLOWED = 0.64 / EXCHANGE
"""Seconds that computation loses for each byte that travels beside it: with two GPUs a round of
16,384 tokens took 54.9 ms more than with one (``benchmarks.parallel train``), of which the ordered
sum is 20.1, the embedding 4.0, and 48.4 of the transfer were hidden.  Assumed to be the same for
bytes that leave by a NIC.
"""
NIC = 50e9
"""One NIC of 400 Gb/s a GPU, its nominal rate: assumed."""
HOST_NETWORK = 1e9
"""What a rank receives of records (tokens, log-probabilities) over the hosts' own network: assumed.
"""
RECORD_TOKEN = 0.035e-6
"""Host time of a token that another rank drew, to make its records: `python -m benchmarks.scaling
records` on an AMD EPYC core.
"""
MESSAGE = {"nvlink": 5e-6, "nic": 10e-6}
"""Of each message, beside its bytes, one after the other on each link: assumed."""
GPUS_A_HOST = 8

# Decoding: what a step takes beside reading K and V.
DECODE = {1: 3.7e-3, 8: 3.5e-3, 32: 3.3e-3, 64: 3.2e-3, 128: 5.2e-3, 256: 6.0e-3}
"""By sequences: steps of 1, 8, 32 and 128 (h200-measurements.md, second round), of 64 and 256 (case
``8k`` and ``short``, whole calls), less K and V at ``KV_READ``; in between on a line.
"""
DECODE_32B = 22.2e-3
"""Qwen3-32B, 256 sequences: case ``short``, as above.  Assumed: at other numbers of sequences in
the proportions of 8B.
"""
DECODE_30B_A3B = 13.5e-3
"""Qwen3-30B-A3B, 256 sequences: case ``short``, as above."""
EXPERTS_SHARE = 0.65
"""Of that, reading the experts' weights: assumed.  Fewer sequences read fewer experts."""
PREFILL = 1 / 67_168
"""A token of a prompt or of a sample that moved: case ``prefill``.  Assumed: in proportion to the
parameters that a token goes through.
"""

# Training.
PASS_TFLOPS = {"none": 778.0, "mlp": 708.0, "full": 620.0}
"""Model TFLOP/s of forward and backward by ``training.recompute``: 4,096 x 2; ``full`` from
16,384 x 1 in proportion to ``mlp``.  Assumed: larger dense models reach the same.
"""
EXPERTS_TFLOPS = 480.0
"""Of a mixture, nothing recomputed: moe-2.7b, 4,096 x 4.  Assumed: Qwen3-30B-A3B reaches it too."""
BACKWARD_SHARE = 0.707
"""Of a pass: case ``2k``, 25.3 of 35.8 s."""
LAYER_ADD = 0.474e-3
"""The ordered sum of the slices that a rank receives of one layer: two H200s (the same place).
Assumed: in proportion to parameters, whatever the number of slices (all of them together are a
whole layer).
"""
LAYER_NUMBERS = 192.9e6
"""Parameters of that layer."""
OPTIMISER, PUBLISH, OTHER = 0.045, 0.0149, 0.70
"""Case ``2k``.  The first two are shared by the ranks; ``OTHER`` (cache and graphs given back and
made again) is not.
"""
PARAMETERS_8B = 8.19e9
