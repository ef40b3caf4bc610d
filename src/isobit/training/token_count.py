"""The tokens in the loss masks of a step, counted against the tokens that were drawn.

A token outside of its mask is compared with nothing and learnt from by nothing, so that no other
check sees it.  Three counts are made apart from each other:

    the engine         every token that it has drawn in a rollout (``EngineStats``)
    each sample        its own tokens as they were drawn (``TokenSequence.drawn``)
    the masks          of what was sampled, and of what the step is about to learn from

and must agree:

    engine      =  sum over the samples of a rollout, greedy baselines and groups that others will
                   replace among them
    sample      =  its mask, before and after its advantages
    the step    =  sum over its samples, less what is dropped: truncated, without a valid reward, in
                   a group without another, empty (``reasons_without_signal`` names each)

A difference is a fault of the program, whatever ``check.on_mismatch`` says of bits: it ends the run
before anything is learnt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from isobit.parallel.world import raised_on_all
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.training.advantage_estimator import sequences_learnt_from
from isobit.util.errors import MismatchError

_ADVICE = (
    "nothing was learnt from it. This is a fault of Isobit, or of code that changes its sequences: "
    "please report it with the sample; the run can go on with --resume"
)


def check_sampled(groups: Sequence[Group], generated: int) -> None:
    """Check a rollout for which the engine counted so many tokens.  Raises MismatchError, on every
    rank, with the first sample whose mask has another number than were drawn.
    """
    counted = 0
    for name, sequence in _samples(groups):
        if sequence.drawn is None:
            return
        _check_mask(name, sequence)
        counted += sequence.drawn
    samples = sum(len(group.completions) for group in groups)
    check_counted(generated, counted, f"the {samples:,} samples of the rollout")


def check_counted(generated: int, counted: int, where: str) -> None:
    """Raises MismatchError, on every rank, where an engine has drawn other tokens than there are
    ``where`` they should be.
    """
    if counted != generated:
        raise _fault(f"the engine has drawn {generated:,} tokens, and {counted:,} are in {where}")


def check_learnt(estimated: Sequence[Group], parts: Sequence[Sequence[TokenSequence]]) -> None:
    """Check the groups of a step with their advantages, and the parts that its updates learn from,
    in which replayed sequences may be as well.  Raises MismatchError, on every rank, with the first
    sample whose mask has another number than were drawn, or that is learnt from and in no part, or
    twice.
    """
    learnt = Counter(id(sequence) for part in parts for sequence in part)
    expected = Counter(id(sequence) for sequence in sequences_learnt_from(estimated))
    for name, sequence in _samples(estimated):
        if sequence.drawn is not None:
            _check_mask(name, sequence)
        is_in, should_be_in = learnt[id(sequence)], expected[id(sequence)]
        if is_in != should_be_in:
            raise _fault(
                f"the {sequence.response_length:,} tokens of {name} are {is_in} times in the parts "
                f"that the step learns from, and should be {should_be_in} times"
            )


def _samples(groups: Sequence[Group]) -> Iterator[tuple[str, TokenSequence]]:
    for group in groups:
        for place, completion in enumerate(group.completions):
            name = f"sample {place} of prompt {group.prompt.id!r} (visit {group.visit})"
            yield name, completion.sequence


def _check_mask(name: str, sequence: TokenSequence) -> None:
    in_mask = sequence.response_length
    if in_mask != sequence.drawn:
        raise _fault(
            f"{sequence.drawn:,} tokens were drawn for {name}, and its loss mask has {in_mask:,}"
        )


def _fault(problem: str) -> MismatchError:
    error = MismatchError(f"{problem}; {_ADVICE}")
    raised_on_all(error)
    return error
