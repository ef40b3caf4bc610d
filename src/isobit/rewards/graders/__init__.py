"""The built-in graders by name, functions ``(prompt, completion, **options) -> float``;
docs/graders.md has their columns, options and bounds.
"""

GRADERS: dict[str, str] = {
    "code": "isobit.rewards.graders.code:score",
    "environment": "isobit.rewards.graders.text:environment_reward",
    "exact_match": "isobit.rewards.graders.text:exact_match",
    "format": "isobit.rewards.graders.text:format_score",
    "llm_judge": "isobit.rewards.graders.judge:score",
    "math_verify": "isobit.rewards.graders.math:score",
    "none": "isobit.rewards.graders.text:no_reward",
    "reasoning_gym": "isobit.rewards.graders.reasoning_gym:score",
    "regex": "isobit.rewards.graders.text:regex_score",
}
"""``module:function``; the module is imported when its grader is used."""

REFERENCES: dict[str, bool] = {"exact_match": False, "math_verify": True}
"""The graders that compare with a reference, and whether that is mathematics
(``isobit.rewards.graders.text.references``).
"""

SANDBOXED = frozenset({"code"})
"""The graders that run what a model wrote (``isobit.rewards.sandbox``)."""
