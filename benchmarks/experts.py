"""The experts of one layer on one Hopper GPU, in FP8 and in BF16: microseconds of routing,
dispatch, grouped GEMMs and what is between them, kernel by kernel.

    python -m benchmarks.experts [--shape qwen3-30b-a3b] [--tokens 16,64,256,8192] [--out FILE]

Random tokens, weights and routers.  ``forward`` is what a decode or prompt step does, ``training``
the saving forward and the backward into FP32 gradients.  Weights of several layers take turns, so
that none is read from the L2 cache.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import kernel_times, make_parser, measure_card, write_json
from isobit.kernels.hopper.backend import HopperBackend
from isobit.kernels.operands import ExpertGradients, LinearInput, LinearWeight
from isobit.kernels.triton.linear import linear_input
from isobit.kernels.triton.quantise import publish
from isobit.models.config import Experts, ModelConfig
from isobit.models.shapes import model_shape
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format

HOPPER = HopperBackend(torch.device("cuda"))
FORMATS: tuple[Format, ...] = ("e4m3", "bf16")
LAYERS, REPEATS, MOST_TRAINED = 3, 5, 16384

Weights = tuple[LinearWeight, LinearWeight]
Work = Callable[[], object]


def expert_sites(config: ModelConfig, format: Format) -> list[tuple[Site, int]]:
    """Gate and up, and down, of all experts, each with the columns of its matrix."""
    assert config.experts is not None
    hidden, width, count = (
        config.hidden_size,
        config.experts.intermediate_size,
        config.experts.count,
    )
    sizes = (("gate_up", (width,) * 2 * count, hidden), ("down", (hidden,) * count, width))
    return [
        (Site(name, "linear", format, "power_of_two", format, format, parts), columns)
        for name, parts, columns in sizes
    ]


def make_weights(config: ModelConfig, format: Format) -> Weights:
    gate_up, down = (
        LinearWeight(site, publish(site, torch.randn(sum(site.parts), k, device="cuda") * 0.02))
        for site, k in expert_sites(config, format)
    )
    return gate_up, down


def make_work(config: ModelConfig, experts_of: Experts, format: Format, tokens: int) -> list[Work]:
    """A forward, and a forward with its backward, over each of the layers in turn."""
    x = torch.randn(tokens, config.hidden_size, device="cuda").bfloat16()
    router = torch.randn(experts_of.count, config.hidden_size, device="cuda").bfloat16()
    layers = [make_weights(config, format) for _ in range(LAYERS)]
    shape = experts_of.top_k, experts_of.renormalise

    def forward() -> None:
        for gate_up, down in layers:
            read = linear_input(x, gate_up.site).read
            HOPPER.experts(read, HOPPER.route(x, router, *shape), gate_up, down)

    if tokens < 1024 or tokens > MOST_TRAINED:
        return [forward]
    columns = config.hidden_size, experts_of.intermediate_size
    pairs = zip(layers[0], columns, strict=True)
    zeros = (torch.zeros(sum(weight.site.parts), k, device="cuda") for weight, k in pairs)
    grads = ExpertGradients(*zeros)

    def training() -> None:
        for gate_up, down in layers:
            read = LinearInput(linear_input(x, gate_up.site).read, x)
            routing = HOPPER.route(x, router, *shape)
            y, saved = HOPPER.experts_saving(read, routing, gate_up, down)
            HOPPER.experts_backward(y, saved, routing, gate_up, down, grads)

    return [forward, training]


def times_of_a_layer(work: Work) -> dict[str, float]:
    """Microseconds by kernel, the longest first."""
    for _ in range(2):
        work()
    found = kernel_times(work, REPEATS)
    return {name: round(time / LAYERS, 2) for name, (time, _) in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="16,64,256,8192")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = model_shape(arguments.shape)
    assert config.experts is not None, "a shape without experts"
    card = measure_card()  # before this process uses the card
    torch.manual_seed(0)
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for format in FORMATS:
            names = ("forward", "training")
            made = make_work(config, config.experts, format, tokens)
            for name, work in zip(names, made, strict=False):
                times = times_of_a_layer(work)
                total = sum(times.values())
                rows.append({"tokens": tokens, "format": format, "pass": name, "kernels": times})
                print(f"{tokens} tokens, {format}, {name}: {total:.0f} us a layer", flush=True)
                for kernel, time in list(times.items())[:16]:
                    print(f"    {time:9.1f}  {kernel}", flush=True)
    write_json(arguments.out, {"card": card, "rows": rows})


if __name__ == "__main__":
    main()
