"""``docs/metrics.md`` and what runs write: neither knows a figure that the other lacks."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig
from isobit.run.rl.loop import train
from isobit.run.sft.loop import sft

ON_A_GPU = {
    "memory/rollout_peak_gib",
    "memory/training_peak_gib",
    "time/offload_s",
}  # (tests/run/test_turns.py writes them)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def written(folder: Path) -> set[str]:
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    names = {name for line in lines for name in line if name != "step"}
    return {re.sub(r"@\d+$", "@K", re.sub(r"^eval/held_out/", "eval/SET/", name)) for name in names}


def test_every_figure_is_on_the_page_and_the_page_has_no_other(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(evaluation={"temperature": 1.0, "samples": 2})
    train(config)
    examples = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    supervised = {
        "model": config.model,
        "output": tmp_path / "sft",
        "data": {
            "train": examples,
            "eval": {"held_out": examples | {"path": "starter:held_out.jsonl"}},
        },
        "training": {"steps": 1, "prompts_per_step": 2},
    }
    sft(SftConfig.model_validate(supervised))
    documented = re.findall(
        r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(documented) == len(set(documented))
    assert written(config.output) | written(tmp_path / "sft") | ON_A_GPU == set(documented)


def test_every_row_says_all_that_the_head_promises() -> None:
    rows = re.findall(r"^\| (?:`|metric ).*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells[:4]), row
