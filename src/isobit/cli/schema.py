"""``isobit schema``: the JSON schema of a recipe, for editors, or the keys of all recipes as a
page.
"""

import json
from argparse import ArgumentParser
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Print the schema or the page."""
    from isobit.config.json_schema import RECIPES, json_schema
    from isobit.config.page import configuration_page

    parser = ArgumentParser(
        prog="isobit schema",
        description="Print the JSON schema of a recipe, from which editors complete it.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=RECIPES,
        default="train",
        help="whose recipe; by default train",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the keys of all recipes as a page instead"
    )
    options = parser.parse_args(arguments)
    if options.markdown:
        print(configuration_page(), end="")
    else:
        print(json.dumps(json_schema(RECIPES[options.command]), indent=2))
    return 0
