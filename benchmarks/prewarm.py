"""Compile DeepGEMM's kernels for a shape in parallel, so that what is timed afterwards finds them
in its cache (DG_JIT_CACHE_DIR).

    python -m benchmarks.prewarm [--shape qwen3-8b] [--processes 14]

A kernel takes nvcc seconds, and a batch size may need another kernel; one process after the other
that is minutes, here half of one.
"""

import argparse
import subprocess
import sys

import torch

from benchmarks.experts import expert_sites
from isobit.kernels.hopper.backend import HopperBackend
from isobit.kernels.hopper.gemm import bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.operands import LinearWeight
from isobit.kernels.triton.experts import choose
from isobit.kernels.triton.linear import linear_input
from isobit.kernels.triton.quantise import QuantRows
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.shapes import model_shape
from isobit.precision.quant_tensor import Format, QuantTensor
from isobit.rollout.graph_runner import graph_sizes

PROMPT_ROWS = [512, 1024, 2048, 4096, 8192, 12288, 16384]
MAX_SEQUENCES = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--part", type=int, help="what one of the processes does")
    arguments = parser.parse_args()
    if arguments.part is not None:
        multiply(arguments.shape, arguments.part, arguments.processes)
        return 0
    command = [sys.executable, "-m", "benchmarks.prewarm", "--shape", arguments.shape]
    command += ["--processes", str(arguments.processes), "--part"]
    parts = [subprocess.Popen([*command, str(part)]) for part in range(arguments.processes)]  # noqa: S603 (this file)
    return max(part.wait() for part in parts)


def multiply(shape: str, part: int, parts: int) -> None:
    """Run this part's share of all products once; their values do not matter."""
    config, device = model_shape(shape), torch.device("cuda")
    sites = decoder_shape(config)
    linears = [
        (linear.rows, linear.in_features) for linear in sites.linears_of(0) if linear.experts == 1
    ]
    sizes = [*graph_sizes(MAX_SEQUENCES), *PROMPT_ROWS]
    head = (config.vocab_size,), config.hidden_size
    work = [(kind, m, *linear) for kind in ("fp8", "bf16") for linear in linears for m in sizes]
    work += [("head", m, *head) for m in graph_sizes(MAX_SEQUENCES)]
    if config.experts is not None:
        work += [(f"experts in {name}", m, (), 0) for name in ("e4m3", "bf16") for m in sizes]
    for kind, m, rows, k in work[part::parts]:
        n = sum(rows)
        if kind.startswith("experts"):
            multiply_experts(config, "e4m3" if kind.endswith("e4m3") else "bf16", m, device)
        elif kind == "fp8":
            blocks = QuantTensor.empty_blocks(n, k, device, rows)
            fp8_gemm_nt(QuantRows.empty(m, k, device), blocks, "power_of_two")
        else:
            a, b = (torch.empty(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
            bf16_gemm_nt(a, b, torch.float32 if kind == "head" else torch.bfloat16)
    torch.cuda.synchronize()


def multiply_experts(
    config: ModelConfig, format: Format, tokens: int, device: torch.device
) -> None:
    """The experts of a layer, with tokens spread over them at random."""
    shape, hidden = config.experts, config.hidden_size
    assert shape is not None
    weights = []
    for site, k in expert_sites(config, format):
        rows = sum(site.parts)
        matrix = (
            QuantTensor.empty_blocks(rows, k, device, site.parts)
            if format == "e4m3"
            else torch.empty(rows, k, dtype=torch.bfloat16, device=device)
        )
        weights.append(LinearWeight(site, matrix))
    gate_up, down = weights
    scores = torch.randn(tokens, shape.count, device=device)
    routing = choose(scores, shape.top_k, shape.renormalise)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    HopperBackend(x.device).experts(linear_input(x, gate_up.site).read, routing, gate_up, down)


if __name__ == "__main__":
    sys.exit(main())
