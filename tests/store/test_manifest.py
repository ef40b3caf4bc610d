"""The manifest holds what is needed to understand a run later."""

import json
import platform
from collections.abc import Callable

import torch

from isobit.config.recipes import RunConfig
from isobit.run.resolved import resolve
from isobit.run.rl_run import prepare_rl
from isobit.store.manifest import manifest

MakeConfig = Callable[..., RunConfig]


def test_versions_device_machine_and_configuration(make_config: MakeConfig) -> None:
    config = make_config()
    content = json.loads(
        json.dumps(manifest(prepare_rl(resolve(config)), ["a", "b", "a"]), allow_nan=False)
    )
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert {"isobit", "transformers", "safetensors", "datasets", "numpy"} <= set(
        content["versions"]
    )
    assert (
        content["device"]["type"] == "cpu"
        and content["device"]["threads"] == torch.get_num_threads()
    )
    assert content["machine"]["cores"] >= 1 and content["machine"]["processor"]
    assert content["machine"]["processes"] == 3
    assert content["machine"]["hosts"] == {"a": 2, "b": 1}
    assert RunConfig.model_validate(content["config"]) == config
    assert content["engine"] == {"kv_pages": 4 * 256, "page_tokens": 64}, (
        "as many as the largest batch of the longest sequences needs: the recipe names none"
    )
    assert content["precision"]["exact"] is True
    assert [site["name"] for site in content["precision"]["rollout"]] == [
        site["name"] for site in content["precision"]["training"]
    ]
