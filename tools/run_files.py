"""What the files of a run's directory say that is the same whenever it is done, and where two runs
differ in it: weights, digests, completions, rewards, figures; not times, rates, paths, versions.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, dict[str, Any]]
"""File -> place and key in it -> the value there, or the SHA-256 of what is there."""

LEFT_OUT = re.compile(r"^(time|tokens_per_s|waiting|memory)/|(^|\.)(\w*seconds|gpu_memory)(\.|$)")
"""Keys that have another value each time."""
MANIFEST = re.compile(
    r"^(bits\.(device|arithmetic)$|model\.(?!folder)|(data|inputs|precision|config)\.)"
)
"""Keys of run.json that stay where code moves."""


def digest(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested tables, under the path of its keys; a long list as its digest."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and len(text := json.dumps(value)) > 200:
        yield name, digest(text.encode())
    else:
        yield name, value


def values(table: Any, kept: str | re.Pattern[str] = "") -> dict[str, Any]:
    """Those of a JSON object that are the same each time, under keys in which ``kept`` is found."""
    return {
        key: value
        for key, value in flat(table)
        if re.search(kept, key) and not LEFT_OUT.search(key)
    }


def read_steps(content: bytes) -> dict[str, Any]:
    """Values of JSON lines under their step and key; ``step 2 again`` is its second line."""
    found: dict[str, Any] = {}
    places: set[str] = set()
    for line in content.splitlines():
        table = json.loads(line)
        place = f"step {table.pop('step')}"
        while place in places:
            place += " again"
        places.add(place)
        found |= {f"{place}, {key}": value for key, value in values(table).items()}
    return found


def read_lines(content: bytes) -> dict[str, Any]:
    """The SHA-256 of all lines, and of each step's or, where they name none, of each."""
    parts: dict[str, bytes] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        step = json.loads(line).get("step")
        place = f"line {number}" if step is None else f"step {step}"
        parts[place] = parts.get(place, b"") + line
    digests = {f"{place}, SHA-256": digest(part) for place, part in parts.items()}
    return {**digests, "SHA-256": digest(content)}


def read_file(path: Path) -> dict[str, Any]:
    """What is compared of one file, by its name."""
    content = path.read_bytes()
    match path.name:
        case "metrics.jsonl":
            return read_steps(content)
        case "digests.jsonl":
            return {**read_steps(content), "SHA-256": digest(content)}
        case "completions.jsonl" | "rewards.jsonl":
            return read_lines(content)
        case "summary.json":
            return values(json.loads(content))
        case "run.json":
            return values(json.loads(content), MANIFEST)
        case "state.json":
            return values(json.loads(content), r"^(?!files\.)")  # sizes: times are written there
    return {"SHA-256": digest(content)}


def read_run(folder: Path, output: str) -> Record:
    """All files of a run's directory but its lock, TensorBoard's events, which have times, and the
    manifests of checkpoints, which have versions and sizes.
    """
    found: Record = {}
    for path in sorted((folder / output).rglob("*")):
        name = path.relative_to(folder).as_posix()
        left_out = path.name in (".lock", "manifest.json") or "/tensorboard/" in name
        if path.is_file() and not left_out:
            found[name] = read_file(path)
    return found


def differences(one: Record, other: Record, words: tuple[str, str]) -> Iterator[str]:
    """A line for each file that one side lacks, and each value that is another."""
    for file in sorted(one.keys() | other.keys()):
        if file not in one or file not in other:
            yield f"{file}: only {words[0] if file in one else words[1]}"
            continue
        for key in {**one[file], **other[file]}:
            sides = [json.dumps(s[key]) if key in s else "none" for s in (one[file], other[file])]
            if sides[0] != sides[1]:
                yield f"{file}, {key}: {sides[0]} {words[0]}, {sides[1]} {words[1]}"
