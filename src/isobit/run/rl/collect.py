"""The graded groups of a step: prompts taken, completed, graded, and replaced where they teach
nothing.  Grading begins as soon as a group is complete, beside the rollout of the others: on the
rank that has taken its prompt.  All ranks get all groups, with their rewards.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) a group whose rewards are all equal,
which has no gradient, makes room for a group of a further prompt, until the step has as many groups
as it should or has refilled often enough; then level groups fill the rest.

Where the algorithm wants a baseline from it (ReMax), each prompt is also completed once greedily,
beside its samples; that completion is graded, and not learnt from.
"""

from collections.abc import Sequence
from dataclasses import replace

from isobit.records.text import Completion, Group
from isobit.rollout.progress import Progress
from isobit.rollout.request import Request
from isobit.rollout.shared import generate_shared
from isobit.run.course import Sampling
from isobit.run.rl.collected import Collected
from isobit.run.rl.setup import RlRun


def collect(training: Sampling[RlRun]) -> Collected:
    """The groups of the next step, graded."""
    run = training.run
    settings, wanted = run.config.algorithm, run.config.training.prompts_per_step
    made = _sample(training, wanted)
    if not settings.dynamic_sampling:
        return made
    refills = 0
    while refills < settings.max_refills and (missing := wanted - _num_telling(made.groups)) > 0:
        made = _joined(made, _sample(training, missing))
        refills += 1
    telling = [group for group in made.groups if not group.is_level]
    level = [group for group in made.groups if group.is_level]
    kept = [*telling, *level][:wanted]
    return replace(made, groups=kept, refills=refills, dropped_groups=len(made.groups) - len(kept))


def _sample(training: Sampling[RlRun], count: int) -> Collected:
    """The groups of the next ``count`` prompts."""
    run = training.run
    requests = run.next_requests(count)
    greedy = [_greedy(request) for request in requests] if run.algorithm.needs_greedy else []
    asked, begun = [*requests, *greedy], dict[int, Group]()

    def complete(place: int, completions: list[Completion]) -> None:
        begun[place] = Group(asked[place].prompt, asked[place].visit, completions)
        training.submit(begun[place])

    with training.clock("rollout"), training.console.generating("rollout") as progress:

        def watch(moment: Progress) -> None:
            training.grading.poll()
            if progress is not None:
                progress(moment)

        watched = training.interruption.watched(watch)
        made = generate_shared(training.world, run.engine, asked, watched, complete)
    groups = [
        begun.get(place) or Group(asked[place].prompt, asked[place].visit, completions)
        for place, completions in enumerate(made.completions)
    ]
    grades = training.grade(groups, made.homes)
    for group, alone in zip(groups[:count], groups[count:], strict=False):
        group.baseline = alone.rewards[0]
    return Collected(groups[:count], grades, made.stats)


def _greedy(request: Request) -> Request:
    """The same prompt completed greedily; the visit, which keys no noise here, is another name."""
    sampling = replace(request.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return Request(request.prompt, ~request.visit, 1, sampling)


def _num_telling(groups: Sequence[Group]) -> int:
    return sum(not group.is_level for group in groups)


def _joined(first: Collected, second: Collected) -> Collected:
    return Collected(
        [*first.groups, *second.groups],
        first.grades + second.grades,
        first.engine + second.engine,
    )
