"""The environment of the experiment, its data, and the table of its rows."""

import json
from pathlib import Path

import pytest

from experiments.turn_credit import EXAMPLES, KEY, PROMPTS, TURNS, Locks, table, write_data


def test_a_turn_is_rewarded_for_the_lock_that_it_opens() -> None:
    locks = Locks()
    locks.reset(locks="3709")
    told, rewards = [], []
    for digit in (KEY[3], 0, KEY[0], KEY[9], KEY[9]):
        told.append(locks.d(digit))
        rewards.append(locks.get_turn_reward())
    assert told == ["7", "0", "9", "end", "end"]
    assert rewards == [1.0, float(KEY[7] == 0), 1.0, 1.0, 0.0]
    assert sorted(KEY) == list(range(10))


def test_transcripts_show_how_a_call_is_written_and_few_right_dials(tmp_path: Path) -> None:
    write_data(tmp_path)
    transcripts, prompts = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("transcripts", "train")
    )
    assert len(transcripts) == EXAMPLES * (TURNS + 1) and len(prompts) == PROMPTS
    assert {one["completion"] for one in transcripts if one["prompt"].endswith("[end]")} == {"ok"}
    first = [one for one in transcripts if len(one["prompt"]) == 1]
    right = [one["completion"] == f"[d({KEY[int(one['prompt'])]})]" for one in first]
    assert sum(right) / len(right) == pytest.approx(0.28, abs=0.03)
    assert all(one["prompt"] == one["locks"][0] for one in prompts)


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    for arm, gained in {"episode": 1.0, "turn": 2.0}.items():
        for seed in range(2):
            rows = [{"step": n, "episode/turn_rewards": 1 + gained * (n > 1)} for n in range(1, 8)]
            rows[-1]["episode/turn_rewards"] += seed
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{arm}-{seed}.jsonl").write_text(text, encoding="utf-8")
    lines = list(table(tmp_path))
    assert lines[2:] == [
        "| `episode` | 2 | 7 | 25.0% | 52.5% | 50%, 55% | - |",
        "| `turn` | 2 | 7 | 25.0% | 77.5% | 75%, 80% | +25.0 [+25.0, +25.0] |",
    ]
