"""Isobit: reinforcement learning of language models in 8 bits where the sampled policy and the
trained policy are one function.

The names of the public interface, described in ``docs/api.md``, are loaded when they are first
asked for: importing this package imports no torch.  It must come before the first ``import torch``
of a process to take effect on the OpenMP setting below: idle OpenMP workers spin for so long by
default that, with another busy process on the machine, every parallel operation waits milliseconds
for a worker that is not running.  A short spin keeps the workers warm between two operations
without that cost.
"""

import os
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the aliases mark public names for type checkers; `_modules` reads these lines
    from isobit.algorithms.family import Grpo as Grpo
    from isobit.algorithms.objective import LossOutputs as LossOutputs
    from isobit.api import compare_flows as compare_flows
    from isobit.api import evaluate as evaluate
    from isobit.api import generate as generate
    from isobit.api import sft as sft
    from isobit.api import train as train
    from isobit.api import verify as verify
    from isobit.config.algorithm import GrpoConfig as GrpoConfig
    from isobit.config.load import load_config as load_config
    from isobit.config.precision import PrecisionConfig as PrecisionConfig
    from isobit.config.recipes import RunConfig as RunConfig
    from isobit.config.recipes import SftConfig as SftConfig
    from isobit.config.rollout import RolloutConfig as RolloutConfig
    from isobit.config.training import TrainingConfig as TrainingConfig
    from isobit.models.config import ModelConfig as ModelConfig
    from isobit.models.folder import LoadedModel as LoadedModel
    from isobit.models.folder import load_model as load_model
    from isobit.models.folder import load_policy as load_policy
    from isobit.models.function import is_one_function as is_one_function
    from isobit.models.kv_calibration import calibrate_kv_scales as calibrate_kv_scales
    from isobit.models.policy import Policy as Policy
    from isobit.models.policy import random_policy as random_policy
    from isobit.models.saving import save_policy as save_policy
    from isobit.models.scorer import Scorer as Scorer
    from isobit.observe.report.page import report as report
    from isobit.precision.flow import PrecisionFlow as PrecisionFlow
    from isobit.precision.flow import build_flow as build_flow
    from isobit.precision.flow import describe_flow as describe_flow
    from isobit.proof.verify import VerifyOptions as VerifyOptions
    from isobit.records.batch import PackedBatch as PackedBatch
    from isobit.records.packing import pack as pack
    from isobit.records.packing import sequences_of as sequences_of
    from isobit.records.sequence import TokenSequence as TokenSequence
    from isobit.records.text import Completion as Completion
    from isobit.records.text import Group as Group
    from isobit.records.text import Prompt as Prompt
    from isobit.records.text import SamplingParams as SamplingParams
    from isobit.rewards.grading import grade as grade
    from isobit.rewards.load import load_reward as load_reward
    from isobit.rollout.engine import RolloutEngine as RolloutEngine
    from isobit.rollout.native import NativeEngine as NativeEngine
    from isobit.rollout.requests import Request as Request
    from isobit.training.comparison import Comparison as Comparison
    from isobit.training.step import train_on_groups as train_on_groups
    from isobit.training.supervised import SupervisedObjective as SupervisedObjective
    from isobit.training.supervised import pack_pairs as pack_pairs
    from isobit.training.trainer import Trainer as Trainer
    from isobit.util.errors import IsobitError as IsobitError

spin_count_in_time = "GOMP_SPINCOUNT" in os.environ or "torch" not in sys.modules
"""Whether the setting below can take effect; ``isobit doctor`` asks."""
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"


@cache
def _modules() -> dict[str, str]:
    """The module of each public name, as the imports above say: they are read from this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    imports = re.findall(r"^    from (isobit\.\S+) import (\w+) as \2$", source, re.MULTILINE)
    return {name: module for module, name in imports}


def __getattr__(name: str) -> Any:
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
