"""``isobit rollout FOLDER``: completes prompts, and prints completions or writes JSON lines."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.options import (
    SAMPLING,
    Command,
    also_keys,
    check_new,
    option,
    path_value,
    set_threads,
    whole,
)
from isobit.cli.start import obey_as_rank, start_ranks, starting
from isobit.config.base import MAX_BATCH
from isobit.config.commands import GenerationConfig
from isobit.util.disk_space import LineFile, disk_errors
from isobit.util.terminal import counted, say

if TYPE_CHECKING:
    from isobit.parallel.world import World
    from isobit.records.text import Group

_COMMAND = Command(
    "rollout",
    "Complete prompts with a model folder, in any precision.",
    [
        *SAMPLING,
        [
            option("--prompt TEXT", "the text to complete"),
            option(
                "--data FILE", "a JSONL, CSV or Parquet file with a column `prompt`", path_value
            ),
        ],
        option("--max-new-tokens N", "longest completion", key="rollout.max_new_tokens"),
        option(
            "--temperature T",
            "0 is greedy; by default 0 for one sample, 1 for several",
            key="rollout.temperature",
        ),
        option(
            "--top-p P",
            "draw from the likeliest tokens of that probability together",
            key="rollout.top_p",
        ),
        option(
            "--samples N",
            "completions of each prompt, by default 1",
            whole(1, MAX_BATCH),
            default=1,
        ),
        option("--no-chat", "take the text as it stands, without the tokenizer's chat template"),
        option(
            "--out FILE.jsonl",
            "write JSON lines there, with tokens and log-probabilities",
            path_value,
        ),
    ],
    also_keys("precision and rollout"),
)


def run_rollout(arguments: Sequence[str]) -> int:
    """Generate, and print or write. Raises IsobitError for unusable input before generating."""
    return obey_as_rank(arguments, _rollout)


def _rollout(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _COMMAND.read_some(arguments)
    is_first = world is None or world.rank == 0
    if options.out is not None and is_first:
        check_new(options.out)
    settings = _COMMAND.settings(GenerationConfig, options, overrides)
    if world is None and settings.cluster.rollout_tp > 1:
        start_ranks("rollout", arguments, settings.cluster.rollout_tp, options.threads)
        return 0
    if options.out is None or not is_first:
        groups = _generate(options, settings, world)
        if is_first:
            _print(groups)
        return 0
    with _writing(options.out) as take:
        groups = _generate(options, settings, world, take)
    made = counted(sum(len(group.completions) for group in groups), "completions")
    print(f"{made} in {options.out}")
    return 0


@contextmanager
def _writing(out: Path) -> "Iterator[Callable[[Group], None]]":
    """A function that writes the lines of each group. The file is made before anything is
    generated, keeps what was written before an error, and is removed if that is nothing. Raises
    StorageError.
    """
    from isobit.commands.rollout import completion_lines

    again = "generate again, into another file"
    with disk_errors(out.parent, out.name, again=again):
        out.open("xb").close()
        file = LineFile(out, again)

    def take(group: "Group") -> None:
        for line in completion_lines(group):
            file.write(line)

    try:
        yield take
    except BaseException:
        if out.stat().st_size == 0:
            out.unlink()
        else:
            say(f"the completions of the first prompts are in {out}")
        raise
    finally:
        file.close()


def _generate(
    options: Namespace,
    settings: GenerationConfig,
    world: "World | None",
    take: "Callable[[Group], None] | None" = None,
) -> "list[Group]":
    set_threads(options)

    from isobit.config.data import file_rows

    with starting():
        from isobit.commands.rollout import rollout_folder
        from isobit.observe.console import Console, terminal_on
        from isobit.parallel.world import ALONE

    with Console(terminal_on("stderr")).generating("rollout") as progress:
        return rollout_folder(
            Path(options.folder),
            prompts=[options.prompt] if options.data is None else file_rows(options.data),
            settings=settings,
            samples=options.samples,
            seed=options.seed,
            chat=not options.no_chat,
            progress=progress,
            world=world or ALONE,
            take=take,
        )


def _print(groups: "Sequence[Group]") -> None:
    from isobit.observe.console import printable

    for group in groups:
        for sample, completion in enumerate(group.completions):
            print(
                f"[{group.prompt.id}, sample {sample}: {counted(completion.length, 'tokens')}, "
                f"{completion.finish_reason}]"
            )
            episode = completion.episode
            for message in episode.messages[:-1] if episode is not None else ():
                print(f"{message['role']}: {printable(message['content'])}")
            print(printable(completion.text))
