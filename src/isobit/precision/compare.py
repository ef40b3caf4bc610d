"""The comparison of the rollout graph with the training-forward graph, and a flow as lines of text.

Jet-RL's condition (arXiv 2601.14243, section 4.1) is that inference quantises the same sites in the
same way as the training forward does.  Peers find out at run time, from a drifting metric; here the
two graphs are compared before the first token.
"""

from dataclasses import dataclass
from itertools import groupby

from isobit.precision.flow import Graph, PrecisionFlow, Site


@dataclass(frozen=True, slots=True)
class Difference:
    """A site whose forward formats differ between the sides; ``None`` where a side lacks it."""

    name: str
    rollout: Site | None
    training: Site | None


def graph_differences(rollout: Graph, training: Graph) -> list[Difference]:
    """Every site that the two sides do not compute in the same formats, in the order of the forward
    pass.
    """
    by_name = {site.name: site for site in training.sites}
    differences = []
    for site in rollout.sites:
        other = by_name.pop(site.name, None)
        if other is None or other.forward_formats != site.forward_formats:
            differences.append(Difference(site.name, site, other))
    return differences + [Difference(name, None, site) for name, site in by_name.items()]


def describe_flow(flow: PrecisionFlow) -> list[str]:
    """The flow as text: a line a site, equal layers folded together, then whether
    the sides are one function.
    """
    training = {site.name: site for site in flow.training.sites}
    rows = [
        (site.name, _formats(site), _formats(training[site.name])) for site in flow.rollout.sites
    ]
    layers: dict[int, list[tuple[str, str, str]]] = {}
    for name, a, b in rows:
        if name.startswith("layers."):
            layers.setdefault(int(name.split(".")[1]), []).append((name.split(".", 2)[2], a, b))
    lines = [_line(*rows[0])]
    for key, members in groupby(layers.items(), key=lambda item: item[1]):
        numbers = [layer for layer, _ in members]
        span = f"layers.{numbers[0]}" if len(numbers) == 1 else f"layers.{numbers[0]}-{numbers[-1]}"
        lines += [_line(f"{span}.{name}", a, b) for name, a, b in key]
    lines += [_line(*row) for row in rows[1:] if not row[0].startswith("layers.")]
    differing = len(graph_differences(flow.rollout, flow.training))
    total = len(flow.rollout.sites)
    verdict = (
        "one function in rollout and training"
        if flow.exact
        else f"{differing} of {total} sites differ between rollout and training"
    )
    return [*lines, f"{flow.preset}: {verdict}"]


def _formats(site: Site) -> str:
    name = {"e4m3": "E4M3", "bf16": "BF16", "fp32": "FP32"}
    text = name[site.forward]
    if site.kind == "linear":
        if site.forward == "e4m3":
            text += " 1x128 x 128x128" + (", FP32 scales" if site.scales == "fp32" else "")
        text += (
            f"  dgrad {name[site.dgrad or site.forward]}, wgrad {name[site.wgrad or site.forward]}"
        )
    elif site.kind in ("kv_cache", "attention") and site.forward == "e4m3":
        text += ", a scale a token and head"
    return text


def _line(name: str, rollout: str, training: str) -> str:
    return (
        f"{name:28} {rollout}"
        if rollout == training
        else f"{name:28} rollout {rollout} | training {training}"
    )
