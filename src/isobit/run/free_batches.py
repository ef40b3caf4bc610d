"""Groups that stay open while steps learn, up to ``async.max_staleness`` steps ahead
(``isobit.records.schedule`` has the rules, ``isobit.rollout.open_groups`` the sampling).

    step t    resume      half-done samples go on, by the weights after step t - 1
              sample      until a batch may be chosen
              compare     some of what these weights drew with the trainer's forward
              learn       from the batch; servers or rollouters sample on meanwhile
              pause       half-done samples leave the engine, and the line of the step is written

Between two steps all open groups are here, half done: the engine is free for an evaluation, and a
checkpoint holds them (``open_groups.safetensors``).  Where the record has a line for the step, its
groups are drawn as that says, and the step learns from the same ones.  With an environment samples
are episodes (``isobit.rollout.carried_episodes``).
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import sleep
from typing import Any

import torch

from isobit.data.sampler import PromptSampler
from isobit.parallel.world import World, raised_on_all, run_and_gather
from isobit.records.schedule import Name, Schedule
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.carried_episodes import CarriedEpisodes
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.http_engine import HttpEngine
from isobit.rollout.open_groups import OpenGroup, cut
from isobit.rollout.requests import Request
from isobit.rollout.shared_groups import SharedGroups
from isobit.run.pending import check_prompt, message_tensor, prompt_of, spread, value_of
from isobit.run.recorded_inputs import RecordedInputs
from isobit.store.schedule_record import ScheduledStep
from isobit.store.training_run import Dropped
from isobit.training.token_count import check_counted
from isobit.util.errors import PeerError, RewardError, ServerError, ToolError
from isobit.util.terminal import say

Compared = tuple[str, int, int, int]
"""Prompt, visit, sample, and tokens of it."""
_TICK_S = 0.02
"""Seconds between two looks, where there is nothing to draw."""


class FreeBatches:
    """Draws the batches of a recorded schedule, and has the open groups in the run's checkpoints
    (``isobit.store.training_run.Extra``).
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        engine: RolloutEngine,
        sampler: PromptSampler,
        like: Request,
        prompts: Mapping[str, Prompt],
        recorded: RecordedInputs,
        learns: bool = True,
        acts: bool = False,
        episodes: CarriedEpisodes | None = None,
    ) -> None:
        """``like`` is the request of any prompt; ``prompts`` are all that the run learns from;
        grading is begun with each group that is whole; ranks that do not ``learn`` are rollouters.
        A run that ``acts`` has an environment, whose ``episodes`` are None where this rank draws
        none.
        """
        self._acts = acts
        self._episodes = episodes
        self._schedule = schedule
        self._engine, self._sampler, self._like = engine, sampler, like
        self._prompts, self._inputs = prompts, recorded
        self._learns, self._world = learns, world
        self._shared = SharedGroups(
            world,
            episodes or engine,
            self._next_request,
            self._submit,
            self._is_graded,
            keeps_homes=acts,
        )
        self._batch: list[OpenGroup] = []
        self._version = 0
        """Of the weights of the step."""
        self._recorded: ScheduledStep | None = None
        """The line of the step, where it is repeated."""
        self._to_compare: dict[Compared, TokenSequence] = {}
        self._tokens = 0
        """Tokens of the open groups before the step, less those of the batch."""
        self._kept: list[OpenGroup] = []
        """The open groups as they were after the last step, for a checkpoint."""
        self._kept_episodes: list[Any] = []
        """What is known of their episodes."""
        self._chosen_from: list[OpenGroup] = []
        """The open groups when the batch was chosen, less those of the batch."""
        self._prompts_then: dict[str, Any] = {}
        """The state of the order of prompts at that moment."""
        self.late: list[Any] | None = None
        """Why nothing more can be drawn, once the step has ended: a rank, and what it says."""
        self._late: Exception | None = None
        """The same, as this rank raises it."""

    def take_records(self, recorded: RecordedInputs) -> None:
        """Give what these records still have before anything new, from now on."""
        self._inputs = recorded
        if self._episodes is not None:
            self._episodes.take_log(recorded.answers)

    # A step.

    def sample(
        self,
        step: int,
        version: int,
        progress: Callable[[Progress], None],
    ) -> tuple[list[Group], list[int]]:
        """Draw by the weights of a version until the batch of a step can be chosen.  -> Its groups,
        not graded, and the rank that grades each.  Raises what an engine raises.  All ranks
        together.
        """
        done = step - 1
        shared, opened = self._shared, self._shared.open
        learns = self._schedule.per_step
        self._version, self._recorded = version, self._inputs.schedule.recorded(step, learns)
        most = self._most_begun(done)
        shared.begin_step(done, most)
        self._tokens = opened.tokens
        if self._episodes is not None:
            names = [*(group.name for group in shared.groups), *self._next_names(most)]
            self._episodes.begin_step(version, names)

        def watch() -> None:
            progress(self._progress())

        if (recorded := self._recorded) is None:
            choose = partial(self._schedule.chosen, step)
            places, ranks = shared.draw(choose, watch, self._draws_beside)
        else:
            places, ranks = shared.follow(recorded.learns, recorded.drawn, watch)
        if not self._draws_beside:
            self._record_answers(shared.groups, places)
        self._batch = [shared.groups[place] for place in places]
        if self._learns:
            self._to_compare = self._comparable(shared.groups)
        groups = shared.take(places)
        self._tokens -= sum(one.length for group in groups for one in group.completions)
        self._chosen_from = [group.copy() for group in shared.groups]
        self._prompts_then = self._sampler.state()
        return groups, ranks

    @property
    def _draws_beside(self) -> bool:
        """Whether the step's weights draw on while it learns."""
        is_apart = not self._learns or isinstance(self._engine, HttpEngine)
        return is_apart and self._recorded is None

    def _record_answers(self, groups: Sequence[OpenGroup], learnt: Collection[int]) -> None:
        """Those that the step's weights used, of groups of which it learns from some, by place."""
        if self._episodes is not None:
            self._episodes.end_step(self._world, groups, learnt)
            self._inputs.write_answers()

    def _most_begun(self, done: int) -> int:
        """Groups that may begin in the step behind ``done`` ones: what the schedule leaves, or more
        where the record names them, which may be of a larger k or of more steps.
        """
        groups, named = self._shared.groups, 0
        if self._recorded is not None:
            known = {group.name for group in groups}
            named = len({*self._recorded.learns, *self._recorded.drawn} - known)
        begun = done * self._schedule.per_step + len(groups)
        return max(named, self._schedule.groups_begun(done) - begun, 0)

    @property
    def to_compare(self) -> list[TokenSequence]:
        """What is compared of the tokens that the step's weights drew; on ranks that do not learn
        known once the step has ended.
        """
        return list(self._to_compare.values())

    def _comparable(self, groups: Sequence[OpenGroup]) -> dict[Compared, TokenSequence]:
        """Some tokens of the step's weights: of a few samples as far as they have come, or of those
        of the record.
        """
        version, recorded = self._version, self._recorded
        if not self._schedule.ahead:
            return {}
        samples = {
            (*group.name, sample): completion
            for group in groups
            for sample, completion in sorted(group.samples.items())
        }
        if recorded is None:
            new = {name: one for name, one in samples.items() if version in one.weights_versions}
            chosen = spread([(*name, one.length) for name, one in new.items()])
        else:
            chosen = [one for one in recorded.compared if one[:3] in samples]
        sequences = {
            one: drawn_by(cut(samples[one[:3]], one[3]).sequence, version) for one in chosen
        }
        return {one: found for one, found in sequences.items() if found.response_length}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A block in which the step learns.  Servers sample on meanwhile, by the weights that they
        have; an error of theirs is raised at the end, on all ranks, or by ``check`` where the step
        can end without what they drew.
        """
        engine = self._engine
        if not isinstance(engine, HttpEngine):
            yield
            return
        ended, errors = threading.Event(), list[BaseException]()

        def draw() -> None:
            try:
                self.draw_on(ended.is_set)
                self.grade_on(ended.is_set)
            except BaseException as error:
                errors.append(error)

        with engine.weights_held():
            thread = threading.Thread(target=draw, name="sampling")
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
            self.or_go_back(lambda: _raise_first(errors))

    def or_go_back(self, draw: Callable[[], None]) -> None:
        """Draw beside a step.  Where servers, environments or graders cannot be had on any rank,
        what is drawn beside it is dropped, and ``check`` raises why.  All ranks together.
        """
        lost = list[Exception]()

        def attempt() -> str | None:
            try:
                draw()
            except (ServerError, ToolError, RewardError) as error:
                lost.append(error)
                return f"{type(error).__name__}: {error}"
            return None

        problems = run_and_gather(self._world, attempt)
        for number, problem in zip(self._world.numbers, problems, strict=True):
            if problem is not None:
                self.late = [number, problem]
                self._late = raised_on_all(lost[0] if lost else PeerError(number, problem))
                self._go_back()
                return

    def _go_back(self) -> None:
        """Drop what was drawn on since the batch was chosen."""
        groups = self._groups_then()
        self._sampler.restore(self._prompts_then)
        self._shared.go_back(groups)
        if self._episodes is not None:
            self._episodes.go_back(self._kept_episodes, groups)

    def _groups_then(self) -> list[OpenGroup]:
        """The open groups without what was drawn on since the batch was chosen: the samples that
        had ended then stay, and others stand where the last step has left them.
        """
        before = {group.name: group.samples for group in self._kept}
        groups: list[OpenGroup] = []
        for one in self._chosen_from:
            undone = before.get(one.name) or dict(enumerate(undrawn(one.request)))
            group = OpenGroup(one.request, one.begun_after, {**undone, **one.samples})
            group.close_if_whole()
            groups.append(group)
        return groups

    def line_then(self, step: int) -> str:
        """The line of a step whose batch is chosen, if nothing more is drawn in it; of a step that
        is repeated, its own.
        """
        found = self._recorded
        if found is None:
            groups = self._groups_then()
            compared = tuple(self._comparable([*self._batch, *groups]))
            found = self._step_line(step, groups, compared)
        return found.line().decode()

    def _step_line(
        self, step: int, groups: Sequence[OpenGroup], compared: tuple[Compared, ...]
    ) -> ScheduledStep:
        learns = tuple(group.name for group in self._batch)
        return ScheduledStep(step, learns, {one.name: one.lengths for one in groups}, compared)

    def check(self) -> None:
        """Raise what has ended the drawing beside a step, once the step has ended.  On all ranks
        alike.
        """
        if self._late is not None:
            raise self._late

    def note_late(self, late: Sequence[Any] | None) -> None:
        """What has ended the drawing of rollouters, for ``check``: a rank, and what it says."""
        if late is not None:
            self._late = raised_on_all(PeerError(late[0], late[1]))

    def draw_on(self, ended: Callable[[], bool], watch: Callable[[], None] = lambda: None) -> None:
        """Draw by the weights that the engine has until the step has learnt or nothing is left to
        draw; not at all where the record says how much was drawn.
        """

        def watch_all() -> None:
            self._inputs.grading.poll()
            watch()

        if not self._inputs.schedule.is_ahead:
            self._shared.draw_on(ended, watch_all)

    def grade_on(self, ended: Callable[[], bool], watch: Callable[[], None] = lambda: None) -> None:
        """Look after what grades until the step has learnt."""
        while not ended():
            self._inputs.grading.poll()
            watch()
            sleep(_TICK_S)

    def end_step(self, step: int) -> EngineStats:
        """Note the line of a step that is done, and what a checkpoint holds after it.  -> What the
        engines did.  Raises MismatchError where they have drawn more or fewer tokens than the
        samples have got.  All ranks together.
        """
        stats, kept = self._shared.end_step()
        groups, tokens = self._shared.groups, self._shared.open.tokens
        if self._late is None:
            check_counted(kept, tokens - self._tokens, "the open groups and the batch")
        if self._draws_beside:
            self._record_answers([*self._batch, *groups], range(len(self._batch)))
        if not self._learns:
            self._to_compare = self._comparable([*self._batch, *groups])
        line = self._step_line(step, groups, tuple(self._to_compare))
        self._inputs.append_schedule([line.line()])
        self._keep(groups)
        return stats

    def _keep(self, groups: Sequence[OpenGroup]) -> None:
        """Have these groups, as they are now, in the next checkpoint."""
        if self._episodes is None:
            self._kept = [group.copy() for group in groups]
            return  # what is known of their episodes stays as others have said
        self._kept = [self._episodes.kept(group) for group in groups]
        self._kept_episodes = self._episodes.value(self._kept)

    def _next_names(self, count: int) -> list[Name]:
        """The next prompts with their visits, which stay the next ones."""
        state = self._sampler.state()
        names = [(prompt.id, visit) for prompt, visit in self._sampler.next(count)]
        self._sampler.restore(state)
        return names

    def _next_request(self) -> Request:
        [(prompt, visit)] = self._sampler.next(1)
        return replace(self._like, prompt=prompt, visit=visit)

    def _submit(self, group: Group) -> None:
        self._inputs.grading.submit(group)

    def _is_graded(self, group: Group) -> bool:
        return self._inputs.grading.is_done(group)

    def _progress(self) -> Progress:
        self._inputs.grading.poll()
        opened = self._shared.open
        stats, total = opened.counted, sum(one.request.samples for one in opened.groups)
        tokens, seconds = stats.generated_tokens, stats.seconds
        return Progress(opened.num_ended, self._engine.num_running, total, tokens, seconds)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """The open groups, by prompt, visit, steps done when they began, and tokens drawn."""
        return {"groups": [[*one.name, one.begun_after, list(one.lengths)] for one in self._kept]}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Their samples, as one message."""
        samples = [one.samples[sample] for one in self._kept for sample in sorted(one.samples)]
        if not samples:
            return {}
        found = {"samples": message_tensor(completions_value(samples))}
        if self._kept_episodes:
            found["episodes"] = message_tensor({"episodes": self._kept_episodes})
        return found

    def value(self) -> dict[str, Any]:
        """What ``restore`` takes, as a message."""
        return {"state": self.state(), "tensors": self.tensors()}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with these groups.  Raises CheckpointError for one of other prompts."""
        if not any(lengths for *_, lengths in state["groups"]):
            tensors = {}  # without groups, or of such that begin again
        message = tensors.get("samples")
        found = [] if message is None else completions_of(value_of(message))
        samples = iter(found)
        groups: list[OpenGroup] = []
        for name, visit, begun_after, lengths in state["groups"]:
            prompt = prompt_of(self._prompts, name)
            request = replace(self._like, prompt=prompt, visit=visit)
            kept = [next(samples) for _ in lengths]
            if not self._acts:
                check_prompt(prompt, kept)
            group = OpenGroup(request, begun_after, dict(enumerate(kept or undrawn(request))))
            if not group.close_if_whole():
                group.home = -1  # any rank
            groups.append(group)
        self._shared.open.groups = groups
        most = self._schedule.ahead * self._schedule.per_step
        if len(groups) > most and self._world.rank == 0:
            say(
                f"isobit: {len(groups)} groups are open, and async.max_staleness = "
                f"{self._schedule.ahead} has at most {most}: the next steps learn from older ones"
            )
        found = value_of(tensors["episodes"])["episodes"] if "episodes" in tensors else []
        if self._episodes is not None:
            self._episodes.restore(found)
        self._kept_episodes = found
        self._keep(groups)

    can_regrade = True

    def regrade(self) -> None:
        """Nothing: a group is graded, or again, when a step learns from it."""

    def dropped(
        self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], step: int, again: bool
    ) -> Dropped:
        """All samples.  ``again`` leaves the groups open, to be begun by the weights of now: steps
        may have learnt from prompts between theirs.
        """
        groups = state["groups"]
        left = [[name, visit, step, []] for name, visit, *_ in groups] if again else []
        counts = [count for *_, lengths in groups for count in lengths]
        return Dropped({**state, "groups": left}, len(counts), sum(counts), 0)


def undrawn(request: Request) -> list[Completion]:
    """The samples of a group before anything is drawn for them."""
    bare = TokenSequence.of_answer(request.prompt.token_ids, ())
    return [Completion(bare, "", "aborted")] * request.samples


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


def drawn_by(sequence: TokenSequence, version: int) -> TokenSequence:
    """A sequence whose response are the tokens that weights of one version drew."""
    return replace(sequence, loss_mask=sequence.loss_mask & (sequence.weights_versions == version))
