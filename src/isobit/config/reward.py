"""The table ``reward``: the rewards, the processes that compute them, and how many may fail.

[reward]                              [reward.parts.correct]
function = "mine.py:score"            function = "math_verify"
options = { strict = true }           [reward.parts.helpful]
                                      model = "my-reward-model"
                                      weight = 0.1
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from isobit.config.base import MAX_FACTOR, HomeName, Strict

WHOLE = "reward"
"""The name of the only reward where there are no parts."""
DEFAULT_FUNCTION = "reasoning_gym"
CODE_SECONDS = 5.0
"""The default of the option ``seconds`` of the grader ``code``."""
JUDGE_SECONDS = 60.0
"""The same of ``timeout_s`` of ``llm_judge``."""
ScoringPreset: TypeAlias = Literal["fp8", "int8", "bf16"]
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class RewardPart(Strict):
    function: HomeName | None = None
    """The function of this part, as in ``reward.function``."""
    model: HomeName | None = None
    """The reward model of this part, as in ``reward.model``."""
    model_precision: ScoringPreset | None = None
    """Precision of its decoder, by default ``reward.model_precision``."""
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Weight in the sum: negative for a penalty, 0 for a metric without effect on training."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments; "env:NAME" is an environment variable's value and is not written
    anywhere.
    """


class RewardConfig(Strict):
    function: HomeName = DEFAULT_FUNCTION
    """A built-in grader (``reasoning_gym`` is the task's own scorer), ``module:function`` or
    ``path/to/file.py:function``; the names of its parameters determine how it is called.
    """
    options: dict[str, Any] = Field(default={})
    """Keyword arguments; "env:NAME" is an environment variable's value and is not written
    anywhere.
    """
    model: HomeName | None = None
    """A reward model's folder or name of the hub, in place of a function."""
    model_precision: ScoringPreset = "int8"
    """Precision of its decoder, or of those of all parts; the scalar head is BF16 with FP32
    sums.
    """
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Factor of the reward."""
    parts: dict[PartName, RewardPart] = Field(default={})
    """Several rewards by name, added with their weights, instead of the one in this table."""
    offload: bool = False
    """Keep reward models in host memory except while they score, to free GPU memory."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's rewards failed (an exception, a timeout, a crash
    or a value that is not finite); fewer are excluded and counted.
    """
    workers: int | None = Field(default=None, ge=1, le=256)
    """Processes that grade; by default one for each usable core, at most 4."""
    deadline_s: float = Field(default=10.0, ge=0.01, le=86_400)
    """Seconds for one completion; then its process is killed, and its reward counts as failed."""
    memory_mib: int = Field(default=2048, ge=256, le=1 << 20)
    """Private memory of each of these processes, without mapped libraries."""
    in_process: bool = False
    """Call functions in the trainer's process, without deadline, memory limit or crash
    protection.
    """

    def named(self) -> dict[str, RewardPart]:
        """The rewards by name, each with its precision: the parts, or the one of this table as
        ``reward``.
        """
        if self.parts:
            return {
                name: part.model_copy(
                    update={"model_precision": part.model_precision or self.model_precision}
                )
                for name, part in self.parts.items()
            }
        return {
            WHOLE: RewardPart(
                function=self.function if self.model is None else None,
                model=self.model,
                model_precision=self.model_precision,
                weight=self.weight,
                options=self.options,
            )
        }
