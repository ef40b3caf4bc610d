"""Groups that stay open while steps learn, up to ``async.max_staleness`` steps ahead
(``isobit.records.schedule`` has the rules, ``isobit.rollout.open_groups`` the sampling).

    step t    resume      half-done samples go on, by the weights after step t - 1
              sample      until a batch may be chosen
              compare     some of what these weights drew with the trainer's forward
              learn       from the batch; an engine elsewhere samples on meanwhile
              pause       half-done samples leave the engine, and the line of the step is written

Between two steps all open groups are here, half done: the engine is free for an evaluation, and a
checkpoint holds them (``open_groups.safetensors``).  Where the record has a line for the step, its
groups are drawn as that says, and the step learns from the same ones.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from isobit.data.sampler import PromptSampler
from isobit.parallel.world import World, run_on_all
from isobit.records.schedule import Name, Schedule
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group, Prompt
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.http_engine import HttpEngine
from isobit.rollout.open_groups import OpenGroup, cut
from isobit.rollout.requests import Request
from isobit.rollout.shared_groups import SharedGroups
from isobit.run.grading import RecordedGrading
from isobit.run.pending import message_tensor, prompt_of, spread, value_of
from isobit.store.schedule_record import ScheduledStep, ScheduleRecord
from isobit.store.waiting_writer import WaitingWriter
from isobit.training.token_count import check_counted

Compared = tuple[str, int, int, int]
"""Prompt, visit, sample, and tokens of it."""
_TICK_S = 0.05
"""Seconds until servers that have nothing to draw are looked at again."""


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
        record: ScheduleRecord,
        writer: WaitingWriter | None,
    ) -> None:
        """``like`` is the request of any prompt; ``prompts`` are all that the run learns from;
        ``writer`` writes the record.
        """
        self._schedule = schedule
        self._engine, self._sampler, self._like = engine, sampler, like
        self._prompts, self._record, self._writer = prompts, record, writer
        self._grading: RecordedGrading | None = None
        self._world = world
        self._shared = SharedGroups(world, engine, self._next_request, self._submit)
        self._names: tuple[Name, ...] = ()
        """The groups of the batch."""
        self._to_compare: dict[Compared, TokenSequence] = {}
        self._tokens = 0
        """Tokens of the open groups before the step, less those of the batch."""
        self._kept: list[OpenGroup] = []
        """The open groups as they were after the last step, for a checkpoint."""

    # A step.

    def sample(
        self,
        step: int,
        version: int,
        grading: RecordedGrading,
        progress: Callable[[Progress], None],
    ) -> tuple[list[Group], list[int], list[TokenSequence]]:
        """Draw by the weights of a version until the batch of a step can be chosen.  -> Its groups,
        not graded, the rank that grades each, and what is to be compared of the tokens that these
        weights drew.  Raises what an engine raises.  All ranks together.
        """
        self._grading, done = grading, step - 1
        shared, opened = self._shared, self._shared.open
        begun = done * self._schedule.per_step + len(shared.groups)
        shared.begin_step(done, self._schedule.groups_begun(done) - begun)
        self._tokens = opened.tokens
        recorded = self._record.recorded(step)

        def watch() -> None:
            progress(self._progress())

        if recorded is None:
            stays = isinstance(self._engine, HttpEngine)
            places, ranks = shared.draw(partial(self._schedule.chosen, step), watch, stays)
        else:
            places, ranks = shared.follow(recorded.learns, recorded.drawn, watch)
        self._names = tuple(shared.groups[place].name for place in places)
        self._to_compare = self._comparable(version, recorded)
        groups = opened.take(places)
        self._tokens -= sum(one.length for group in groups for one in group.completions)
        return groups, ranks, list(self._to_compare.values())

    def _comparable(
        self, version: int, recorded: ScheduledStep | None
    ) -> dict[Compared, TokenSequence]:
        """What is compared of the tokens that the present weights drew: a few samples as far as
        they have come, or those of the record.
        """
        if not self._schedule.ahead:
            return {}
        samples = {
            (*group.name, sample): completion
            for group in self._shared.groups
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
        have; an error of theirs is raised at the end, on all ranks.
        """
        engine, opened, world = self._engine, self._shared.open, self._world
        if not isinstance(engine, HttpEngine) or self._record.is_ahead:
            yield
            return
        ended, errors = threading.Event(), list[BaseException]()

        def draw() -> None:
            try:
                opened.resume()
                while not ended.is_set():
                    opened.turn()
                    if not opened.num_live:
                        ended.wait(_TICK_S)
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
            run_on_all(world, lambda: _raise_first(errors))

    def end_step(self, step: int) -> EngineStats:
        """Note the line of a step that is done, and what a checkpoint holds after it.  -> What the
        engines did.  Raises MismatchError where they have drawn more or fewer tokens than the
        samples have got.  All ranks together.
        """
        stats, kept = self._shared.end_step()
        groups, tokens = self._shared.groups, self._shared.open.tokens
        check_counted(kept, tokens - self._tokens, "the open groups and the batch")
        drawn = {group.name: group.lengths for group in groups}
        line = ScheduledStep(step, self._names, drawn, tuple(self._to_compare)).line()
        self._record.append([line])
        if self._writer is not None:
            self._writer.write_on_first(self._record.write)
        self._kept = [group.copy() for group in groups]
        return stats

    def _next_request(self) -> Request:
        [(prompt, visit)] = self._sampler.next(1)
        return replace(self._like, prompt=prompt, visit=visit)

    def _submit(self, group: Group) -> None:
        if self._grading is not None:
            self._grading.submit(group)

    def _progress(self) -> Progress:
        if self._grading is not None:
            self._grading.poll()
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
        return {"samples": message_tensor(completions_value(samples))}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with these groups.  Raises CheckpointError for one of other prompts."""
        message = tensors.get("samples")
        found = [] if message is None else completions_of(value_of(message))
        samples = iter(found)
        groups: list[OpenGroup] = []
        for name, visit, begun_after, lengths in state["groups"]:
            request = replace(self._like, prompt=prompt_of(self._prompts, name), visit=visit)
            group = OpenGroup(request, begun_after, {i: next(samples) for i in range(len(lengths))})
            group.close_if_whole()
            groups.append(group)
        self._shared.open.groups = groups
        self._kept = [group.copy() for group in groups]


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


def drawn_by(sequence: TokenSequence, version: int) -> TokenSequence:
    """A sequence whose response are the tokens that weights of one version drew."""
    return replace(sequence, loss_mask=sequence.loss_mask & (sequence.weights_versions == version))
