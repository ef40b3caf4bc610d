"""The precision flow from the manifest: what each site computes in on both sides, equal layers
folded into one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from isobit.observe.report.source import RunRecord

_FORMATS = {"e4m3": "E4M3", "bf16": "BF16", "fp32": "FP32"}


@dataclass(frozen=True, slots=True)
class SiteView:
    """One site: its format in the rollout, in the training forward, and those of the gradients
    (empty where there are none).
    """

    name: str
    kind: str
    rollout: str
    training: str
    dgrad: str
    wgrad: str
    detail: str

    @property
    def differs(self) -> bool:
        """Whether rollout and training compute it in two formats."""
        return self.rollout != self.training


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive sites: a run of equal layers, or what stands before and after the layers (no
    title).
    """

    title: str
    sites: tuple[SiteView, ...]


@dataclass(frozen=True, slots=True)
class FlowView:
    """The flow as the page shows it."""

    preset: str
    verdict: str
    exact: bool
    stages: tuple[Stage, ...]


def view_flow(record: RunRecord) -> FlowView | None:
    """The flow in the manifest; None where there is none."""
    sites = [
        site
        for site in record.setting("precision", "rollout") or ()
        if isinstance(site, dict) and "name" in site
    ]
    if not sites:
        return None
    training = {
        site["name"]: site
        for site in record.setting("precision", "training") or ()
        if isinstance(site, dict) and "name" in site
    }
    exact = bool(record.setting("precision", "exact"))
    differing = record.setting("precision", "differing_sites") or []
    verdict = (
        "one function in rollout and training"
        if exact
        else f"{len(differing)} of {len(sites)} sites differ between the sides"
    )
    return FlowView(
        str(record.setting("precision", "preset")),
        verdict,
        exact,
        _stages(sites, training),
    )


def _stages(
    sites: Sequence[Mapping[str, Any]], training: Mapping[str, Mapping[str, Any]]
) -> tuple[Stage, ...]:
    """Sites in the order of the forward pass, each layer a stage, equal neighbours joined."""
    layers: list[tuple[int | None, tuple[SiteView, ...]]] = []
    for layer, members in groupby(sites, key=lambda site: _layer_of(str(site["name"]))):
        layers.append(
            (layer, tuple(_view(site, training.get(site["name"], {})) for site in members))
        )
    stages = []
    for (in_layer, views), same in groupby(layers, key=lambda item: (item[0] is not None, item[1])):
        numbers = [layer for layer, _ in same]
        span = (
            f"layer {numbers[0]}"
            if len(numbers) == 1
            else f"layers {numbers[0]} to {numbers[-1]}, each"
        )
        stages.append(Stage(span if in_layer else "", views))
    return tuple(stages)


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return (
        int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal() else None
    )


def _view(site: Mapping[str, Any], training: Mapping[str, Any]) -> SiteView:
    name = str(site["name"])
    return SiteView(
        name=name if _layer_of(name) is None else name.split(".", 2)[2],
        kind=str(site.get("kind", "")),
        rollout=_format(site.get("forward")),
        training=_format(training.get("forward")),
        dgrad=_format(training.get("dgrad")),
        wgrad=_format(training.get("wgrad")),
        detail=_detail(site),
    )


def _format(name: Any) -> str:
    return "" if name is None else _FORMATS.get(str(name), str(name))


def _detail(site: Mapping[str, Any]) -> str:
    """How the scales lie, where there are any."""
    if site.get("forward") != "e4m3":
        return ""
    if site.get("kind") == "linear":
        return "1\u00d7128 by 128\u00d7128" + (
            ", FP32 scales" if site.get("scales") == "fp32" else ""
        )
    return "a scale a token and head"
