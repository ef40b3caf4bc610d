"""Isobit: reinforcement learning of language models in FP8 where the sampled policy and the trained
policy are one function.

The names of the public interface, described in ``docs/api.md``, are loaded when they are first
asked for: importing this package imports no torch.  It must come before the first ``import torch``
of a process to take effect on the OpenMP setting below: idle OpenMP workers spin for so long by
default that, with another busy process on the machine, every parallel operation waits milliseconds
for a worker that is not running.  A short spin keeps the workers warm between two operations
without that cost.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the aliases mark public names for type checkers
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
    from isobit.config.recipes import RunConfig as RunConfig
    from isobit.config.recipes import SftConfig as SftConfig
    from isobit.config.tables import PrecisionConfig as PrecisionConfig
    from isobit.config.tables import RolloutConfig as RolloutConfig
    from isobit.config.tables import TrainingConfig as TrainingConfig
    from isobit.models.config import ModelConfig as ModelConfig
    from isobit.models.folder import LoadedModel as LoadedModel
    from isobit.models.folder import load_model as load_model
    from isobit.models.folder import load_policy as load_policy
    from isobit.models.policy import Policy as Policy
    from isobit.models.policy import random_policy as random_policy
    from isobit.models.policy_share import is_one_function as is_one_function
    from isobit.models.saving import save_policy as save_policy
    from isobit.models.scorer import Scorer as Scorer
    from isobit.models.scorer import calibrate_kv_scales as calibrate_kv_scales
    from isobit.observe.report.page import report as report
    from isobit.precision.flow import PrecisionFlow as PrecisionFlow
    from isobit.precision.flow import build_flow as build_flow
    from isobit.precision.flow import describe_flow as describe_flow
    from isobit.proof.verify import VerifyOptions as VerifyOptions
    from isobit.records.batch import PackedBatch as PackedBatch
    from isobit.records.batch import pack as pack
    from isobit.records.batch import sequences_of as sequences_of
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

_HOMES = {
    "algorithms.family": ("Grpo",),
    "algorithms.objective": ("LossOutputs",),
    "api": (
        "compare_flows",
        "evaluate",
        "generate",
        "sft",
        "train",
        "verify",
    ),
    "config.algorithm": ("GrpoConfig",),
    "config.load": ("load_config",),
    "config.recipes": (
        "RunConfig",
        "SftConfig",
    ),
    "config.tables": (
        "PrecisionConfig",
        "RolloutConfig",
        "TrainingConfig",
    ),
    "models.config": ("ModelConfig",),
    "models.folder": (
        "LoadedModel",
        "load_model",
        "load_policy",
    ),
    "models.policy_share": ("is_one_function",),
    "models.policy": (
        "Policy",
        "random_policy",
    ),
    "models.saving": ("save_policy",),
    "models.scorer": ("Scorer", "calibrate_kv_scales"),
    "observe.report.page": ("report",),
    "precision.flow": (
        "PrecisionFlow",
        "build_flow",
        "describe_flow",
    ),
    "proof.verify": ("VerifyOptions",),
    "records.batch": (
        "PackedBatch",
        "pack",
        "sequences_of",
    ),
    "records.sequence": ("TokenSequence",),
    "records.text": (
        "Completion",
        "Group",
        "Prompt",
        "SamplingParams",
    ),
    "rewards.grading": ("grade",),
    "rewards.load": ("load_reward",),
    "rollout.engine": (
        "Request",
        "RolloutEngine",
    ),
    "rollout.native": ("NativeEngine",),
    "training.comparison": ("Comparison",),
    "training.step": ("train_on_groups",),
    "training.supervised": (
        "SupervisedObjective",
        "pack_pairs",
    ),
    "training.trainer": ("Trainer",),
    "util.errors": ("IsobitError",),
}
"""Where each public name is defined, as the imports above say to type checkers."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"isobit.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
