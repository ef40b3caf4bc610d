"""What a token, a weight and a run's configuration pass through, and which files three other parts
of a step enter: runs of reinforcement learning on the starter model, with each call of a function
of the package watched (``tools.structure.watch``).

    python -m tools.structure.trace TREE       with TREE's parent folder on PYTHONPATH; prints JSON

Each run has two prompts with two samples each and runs in ``fp8`` on one thread of the CPU, with
rewards that differ, so that every master gets a gradient. The first does one step. The second has
an environment, whose tool every turn but the last calls. The third has a lag of one step. Imports,
class bodies and comprehensions are not calls.

**Prompt to gradient**, in all three. A *container* is a class of the package that holds values
token by token: a public attribute that is named for tokens or log-probabilities (but not for stop
tokens) and holds a tensor or a sequence of numbers; or a dataclass whose fields hold such an
object, alone or in a sequence. A dataclass that also holds a function, or an object of the package
that is no dataclass, is an assembly of parts (a run with its engine) and no container. A file
counts when one of its functions is given or returns a container or a sequence of them (a hand-over,
which is also counted by itself), or runs inside such a call and is given or returns a tensor, a
record of tensors, or a sequence of numbers: kernels, decoder, loss. Counting ends when every master
has a gradient that is not zero, before clipping, AdamW and publishing. Clocks, progress and memory
plans do not count.

**Safetensors to GEMM**, in the first run. From the first matrix that is read to the first call with
one of a function that is named for a ``gemm``, in whatever file it stands. A matrix has two
dimensions of at least 128, which no activation of this run has. A file counts when one of its
functions is given or returns a matrix, or a record, a sequence or a mapping of matrices; or when it
is on the stack of that call and was given an object that holds matrices, at most two objects deep:
the policy, a runner.

**Configuration**, in the first run. From the call of ``isobit.run.loop.train`` to the first matrix
that is read. A file counts when one of its functions is given a recipe or a table of one, also as
``self``. A *climb* is a step of this walk into a file of a higher layer of ``pyproject.toml``.

**Spans** (``SPANS``), in the first run: a checkpoint write, the log of a step, the collection of
its rewards. Each file counts of which a function is called between the call of the span's function
and its return, on the same thread.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.structure.watch import SPANS, Watch

_REWARD = """from itertools import count
from time import sleep
turn = count()
def reward(prompt, completion):
    sleep(0.1)  # so that the run always waits for it, and enters the same files
    return float(next(turn) % 2)
"""
_TOOL = """class Adder:
    def add(self, count: int) -> str:
        '''Adds.

        Args:
            count: a number
        '''
        return "3"
"""


def recipe(folder: Path) -> dict[str, Any]:
    """A step of reinforcement learning on the starter model that works in ``folder``."""
    (folder / "reward.py").write_text(_REWARD)
    return {
        "model": "starter",
        "output": str(folder / "run"),
        "precision": "fp8",
        "threads": 1,
        "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 4}},
        "reward": {"function": f"{folder}/reward.py:reward"},
        "rollout": {"max_new_tokens": 4},
        "training": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
    }


def with_environment(folder: Path) -> dict[str, Any]:
    """The same with a tool."""
    (folder / "tool.py").write_text(_TOOL)
    return recipe(folder) | {
        "output": str(folder / "environment"),
        "environment": {"class": f"{folder}/tool.py:Adder", "max_turns": 2},
        "rollout": {"max_new_tokens": 40},
    }


def with_lag(folder: Path) -> dict[str, Any]:
    """The same with a batch that waits while the next one is sampled."""
    words = recipe(folder) | {"output": str(folder / "lag"), "async": {"lag": 1}}
    words["training"]["steps"] = 2
    return words


@contextmanager
def calls() -> Iterator[None]:
    """Every turn is read as a call of ``add``, since the starter model calls no tools."""
    import isobit.rollout.episodes
    from isobit.data.tool_calls import ToolCall

    read = isobit.rollout.episodes.read_turn

    def calling(*arguments: Any) -> Any:
        return replace(read(*arguments), calls=[ToolCall("add", {"count": 1})])

    isobit.rollout.episodes.read_turn = calling
    try:
        yield
    finally:
        isobit.rollout.episodes.read_turn = read


def watched(tree: Path, words: dict[str, Any], layers: Sequence[Sequence[str]] = ()) -> Watch:
    """Train as a recipe says, with each call watched."""
    import isobit

    watch = Watch(tree, layers)
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        isobit.train(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    if not watch.gradients_are_there:
        raise SystemExit("the masters got no gradients: nothing says where counting should end")
    return watch


def measure(tree: Path, layers: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """Files with the first function that made each count, and containers with their module."""
    import isobit

    found = Path(str(isobit.__file__)).parent
    if found != tree:
        raise SystemExit(f"isobit is imported from {found}; put {tree.parent} on PYTHONPATH")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = watched(tree, recipe(folder), layers)
        with calls():
            environment = watched(tree, with_environment(folder))
        lag = watched(tree, with_lag(folder))
    for span, files in plain.span_files.items():
        if not files:
            raise SystemExit(
                f"no function {SPANS[span].pattern} was called; where the function has another "
                "name now, change it in SPANS of tools/structure/watch.py"
            )
    return {
        "token_files": plain.token_files,
        "hand_overs": plain.hand_overs,
        "containers": plain.containers,
        "weight_files": plain.weight_files,
        "config_files": plain.config_files,
        "climbs": plain.climbs,
        "environment_files": environment.token_files,
        "lag_files": lag.token_files,
        **plain.span_files,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(measure(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2]))))
