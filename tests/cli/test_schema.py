import json

import pytest

from isobit.cli.main import main
from isobit.config.json_schema import RECIPES, json_schema
from isobit.config.page import configuration_page


@pytest.mark.parametrize("command", RECIPES)
def test_the_schema_of_a_recipe_is_printed(command, capsys):
    assert main(["schema", command]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(RECIPES[command])


def test_the_page_is_printed(capsys):
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == configuration_page()
