"""The precision flow of a run's manifest: the format of each site on both sides, with equal layers
folded into one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from isobit.observe.run_record import RunRecord

_FORMATS = {"e4m3": "E4M3", "int8": "INT8", "bf16": "BF16", "fp32": "FP32"}


@dataclass(frozen=True, slots=True)
class SiteView:
    """One site: its formats in the rollout, in the training forward and of its gradients, which are
    empty where it has none.
    """

    name: str
    rollout: str
    training: str
    dgrad: str
    wgrad: str
    detail: str
    """What its scales span; empty where it has none."""

    @property
    def differs(self) -> bool:
        """Whether rollout and training compute it in two formats."""
        return self.rollout != self.training


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive sites: a run of equal layers, or those outside the layers, without a title."""

    title: str
    sites: tuple[SiteView, ...]


@dataclass(frozen=True, slots=True)
class FlowView:
    name: str
    verdict: str
    exact: bool
    stages: tuple[Stage, ...]


def view_flow(record: RunRecord) -> FlowView | None:
    """The flow in the manifest; None where there is none."""
    rollout, training = (
        {str(site["name"]): site for site in sites if isinstance(site, dict) and "name" in site}
        if isinstance(sites := record.setting("precision", side), list)
        else {}
        for side in ("rollout", "training")
    )
    if not rollout:
        return None
    exact = bool(record.setting("precision", "exact"))
    differing = record.setting("precision", "differing_sites") or []
    verdict = (
        "one function in rollout and training"
        if exact
        else f"{len(differing)} of {len(rollout)} sites differ between the sides"
    )
    has_adapters = any(site.get("kind") == "adapter" for site in rollout.values())
    layers = [
        (layer, tuple(_view(rollout[name], training.get(name, {}), has_adapters) for name in names))
        for layer, names in groupby(rollout, key=lambda name: _split(name)[0])
    ]
    stages = []
    for (in_layers, views), same in groupby(layers, lambda one: (one[0] is not None, one[1])):
        numbers = [layer for layer, _ in same]
        several = f"layers {numbers[0]} to {numbers[-1]}, each"
        title = several if len(numbers) > 1 else f"layer {numbers[0]}"
        stages.append(Stage(title if in_layers else "", views))
    return FlowView(record.flow or "", verdict, exact, tuple(stages))


def _split(name: str) -> tuple[int | None, str]:
    """``layers.3.qkv_proj`` -> 3 and ``qkv_proj``; any other name -> None and itself."""
    parts = name.split(".", 2)
    in_layer = len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal()
    return (int(parts[1]), parts[2]) if in_layer else (None, name)


def _view(
    site: Mapping[str, Any], training: Mapping[str, Any], has_adapters: bool = False
) -> SiteView:
    rollout, forward, dgrad, wgrad = (
        "" if name is None else _FORMATS.get(str(name), str(name))
        for name in (site.get("forward"), *map(training.get, ("forward", "dgrad", "wgrad")))
    )
    if has_adapters and site.get("kind") == "linear":
        wgrad = ""  # the matrix is frozen
    scales = ", FP32 scales" if site.get("scales") == "fp32" else ""
    of_linears = {"E4M3": f"1\u00d7128 by 128\u00d7128{scales}", "INT8": "Hadamard, a scale a row"}
    detail = of_linears.get(rollout, "")
    if detail and site.get("kind") != "linear":
        detail = "a scale a tensor" if site.get("per_tensor") else "a scale a token and head"
    return SiteView(_split(str(site["name"]))[1], rollout, forward, dgrad, wgrad, detail)
