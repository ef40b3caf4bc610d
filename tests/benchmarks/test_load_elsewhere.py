"""What other tools make of an exported folder: the part that runs on a CPU."""

import json
from pathlib import Path

from benchmarks.load_elsewhere import make_parser
from isobit.run.export import export, find_source


def test_transformers_and_we_answer_alike(tmp_path: Path) -> None:
    """The starter, whose answer both are sure of, from its FP8 folder."""
    folder = export(find_source("starter", None, print), tmp_path / "fp8", "fp8").folder
    options = [str(folder), "--question", "3+8+2+9=", "--new-tokens", "8", "--out", str(tmp_path)]
    for name in ("transformers", "isobit"):
        arguments = make_parser().parse_args([name, *options])
        arguments.run(arguments)
    theirs, ours = (
        json.loads((tmp_path / f"load-{name}.json").read_text())
        for name in ("transformers", "isobit-cpu")
    )
    assert theirs["token_ids"] == ours["token_ids"] and theirs["answer"] == ours["answer"]
    assert theirs["formats"] == {"bfloat16": 29}
