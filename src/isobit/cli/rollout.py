"""``isobit rollout FOLDER``: completions of a text or of a file's prompts, printed or written as
JSON lines.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.arguments import (
    check_new,
    folder_parser,
    given,
    set_threads,
    settings_from,
    whole,
)
from isobit.cli.ranks import obey_as_rank, start_ranks
from isobit.cli.waiting import starting
from isobit.config.limits import MAX_BATCH

if TYPE_CHECKING:
    from isobit.config.commands import GenerationConfig
    from isobit.parallel.world import World
    from isobit.records.text import Group


def run(arguments: Sequence[str]) -> int:
    """Generate, and print or write.  Raises IsobitError for anything that cannot be used, before
    anything is generated.
    """
    return obey_as_rank(arguments, _rollout)


def _rollout(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _parser().parse_known_args(arguments)
    is_first = world is None or world.rank == 0
    if options.out is not None and is_first:
        check_new(options.out)

    from isobit.config.commands import GenerationConfig

    limits = given(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    settings = settings_from(
        GenerationConfig, {"precision": options.precision, "rollout": limits}, overrides
    )
    if world is None and settings.cluster.rollout_tp > 1:
        start_ranks("rollout", arguments, settings.cluster.rollout_tp, options.threads)
        return 0
    groups = _generate(options, settings, world)
    if not is_first:
        return 0
    if options.out is None:
        _print(groups)
        return 0

    from isobit.run.rollout import completion_lines

    with options.out.open("x", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in completion_lines(groups))
    print(f"{sum(len(group.completions) for group in groups)} completions in {options.out}")
    return 0


def _generate(
    options: Namespace, settings: "GenerationConfig", world: "World | None"
) -> "list[Group]":
    set_threads(options)

    from rich.console import Console as Terminal

    from isobit.config.data import JsonlData

    with starting():
        from isobit.observe.console import Console
        from isobit.parallel.world import ALONE
        from isobit.run.rollout import rollout_folder

    with Console(Terminal(stderr=True)).generating("rollout") as progress:
        return rollout_folder(
            Path(options.folder),
            prompts=[options.prompt] if options.data is None else JsonlData(path=options.data),
            settings=settings,
            samples=options.samples,
            seed=options.seed,
            chat=not options.no_chat,
            progress=progress,
            world=world or ALONE,
        )


def _print(groups: "Sequence[Group]") -> None:
    from isobit.observe.console import printable

    for group in groups:
        for sample, completion in enumerate(group.completions):
            print(
                f"[{group.prompt.id}, sample {sample}: {len(completion.token_ids)} tokens, "
                f"{completion.finish_reason}]"
            )
            print(printable(completion.text))


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "rollout",
        "Complete prompts with a model folder, in any precision.",
        "precision and rollout",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="the text to complete")
    prompts.add_argument(
        "--data", metavar="FILE.jsonl", type=Path, help="a JSONL file with a column `prompt`"
    )
    parser.add_argument("--max-new-tokens", metavar="N", help="longest completion")
    parser.add_argument("--temperature", metavar="T", help="0 is greedy; by default 1")
    parser.add_argument(
        "--top-p", metavar="P", help="draw from the likeliest tokens of that probability together"
    )
    parser.add_argument(
        "--samples",
        type=whole(1, MAX_BATCH),
        default=1,
        metavar="N",
        help="completions of each prompt, by default 1",
    )
    parser.add_argument(
        "--no-chat",
        action="store_true",
        help="take the text as it stands, without the tokenizer's chat template",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.jsonl",
        type=Path,
        help="write JSON lines there, with tokens and log-probabilities",
    )
    return parser
