"""The table ``reward``: who grades completions, in which processes, and how many gradings may fail.

    [reward]                              [reward.parts.correct]
    function = "mine.py:score"            function = "math_verify"
    options = { strict = true }           [reward.parts.helpful]
                                          model = "my-reward-model"
                                          weight = 0.1

Rules across the keys are in ``isobit.config.rules``.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from isobit.config.base import MAX_FACTOR, Strict

WHOLE = "reward"
"""What the one reward is called where there are no parts."""
DEFAULT_FUNCTION = "reasoning_gym"
CODE_SECONDS = 5.0
"""The grader ``code``'s own default of its option ``seconds``."""

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class RewardPart(Strict):
    """One of several rewards: a function or a model, with its weight in the sum."""

    function: str | None = None
    """As ``reward.function``."""
    model: str | None = None
    """As ``reward.model``."""
    model_precision: Literal["fp8", "bf16"] = "fp8"
    """Of its decoder; the scalar head is BF16 with FP32 sums."""
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Of this reward in the sum; negative for a penalty, 0 for a figure that teaches nothing."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the function; "env:NAME" is the value of an environment variable, which
    is written nowhere.
    """


class RewardConfig(Strict):
    """How completions are graded."""

    function: str = DEFAULT_FUNCTION
    """A built-in grader (``reasoning_gym`` is the task's own scorer), ``module:function`` or
    ``path/to/file.py:function``; its form is told by the names of its parameters.
    """
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the function; "env:NAME" is the value of an environment variable, which
    is written nowhere.
    """
    model: str | None = None
    """A reward model's folder or name of the hub, in place of a function."""
    model_precision: Literal["fp8", "bf16"] = "fp8"
    """Of its decoder; the scalar head is BF16 with FP32 sums."""
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """What the reward is multiplied by."""
    parts: dict[PartName, RewardPart] = Field(default={})
    """Several rewards by name, added up by their weights; then none stands in this table itself."""
    offload: bool = False
    """Keep reward models in host memory except while they score; a CPU ignores it."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's rewards raised, took too long, ended their
    process or were not finite; below it they are excluded and counted.
    """
    workers: int | None = Field(default=None, ge=1, le=256)
    """Processes that grade; by default one for each usable core, at most 4."""
    deadline_s: float = Field(default=10.0, ge=0.01, le=86_400)
    """Seconds for one completion; then its process is ended, and its reward counts as failed."""
    memory_mib: int = Field(default=2048, ge=256, le=1 << 20)
    """Memory of each of these processes, with what it imports: what it writes and shares with
    nobody.  Libraries that are mapped, and address space that is only reserved, do not count.
    """
    in_process: bool = False
    """Call the functions in the trainer's own process: no deadline, no memory limit, and what they
    break, they break in the trainer.
    """

    def named(self) -> dict[str, RewardPart]:
        """The rewards by name: the parts, or the one of this table as ``reward``."""
        if self.parts:
            return dict(self.parts)
        return {
            WHOLE: RewardPart(
                function=self.function if self.model is None else None,
                model=self.model,
                model_precision=self.model_precision,
                weight=self.weight,
                options=self.options,
            )
        }
