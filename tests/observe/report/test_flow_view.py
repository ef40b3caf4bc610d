"""The precision flow out of the manifest."""

from pathlib import Path

from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.source import RunRecord

from .run_files import SITES, manifest


def record(run: dict) -> RunRecord:
    return RunRecord(Path("runs/x"), run, {}, (), True, {}, False, ())


def test_equal_layers_are_folded() -> None:
    flow = view_flow(record(manifest()))
    assert flow is not None and flow.verdict == "one function in rollout and training"
    assert [stage.title for stage in flow.stages] == ["", "layers 0 to 2, each", ""]
    assert [site.name for site in flow.stages[1].sites] == ["qkv_proj", "attention"]
    assert flow.stages[1].sites[0].wgrad == "E4M3" and flow.stages[1].sites[1].wgrad == ""


def test_a_layer_of_its_own_stays_apart_and_differences_are_marked() -> None:
    rollout = [
        site | ({"forward": "bf16"} if site["name"].startswith("layers.0") else {})
        for site in SITES
    ]
    precision = {
        "preset": "x",
        "exact": False,
        "differing_sites": ["layers.0.qkv_proj"],
        "rollout": rollout,
        "training": SITES,
    }
    flow = view_flow(record(manifest(precision=precision)))
    assert flow is not None and flow.verdict == f"1 of {len(SITES)} sites differ between the sides"
    assert [stage.title for stage in flow.stages] == ["", "layer 0", "layers 1 to 2, each", ""]
    assert [[site.differs for site in stage.sites] for stage in flow.stages] == [
        [False],
        [True, True],
        [False, False],
        [False],
    ]


def test_no_manifest_no_flow() -> None:
    assert view_flow(record({})) is None
