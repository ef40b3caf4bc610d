"""What ``isobit verify --bisect`` found, as lines of text."""

from isobit.proof.bisect.bisect import BisectResult, Parting
from isobit.proof.bisect.operations import describe_site

_HINTS = {
    "attention": (
        "its queries and what was written to the KV cache are equal: it is the arithmetic, or "
        "the pages that were read"
    ),
    "log-probability": (
        "the logits are equal: it is the log-softmax, the temperature, or how the number was "
        "recorded"
    ),
}


def describe_bisect(result: BisectResult) -> list[str]:
    """Where the sides part and what is known about it; or that nothing differs."""
    if result.parting is not None:
        return _describe_parting(result.parting)
    if result.verified.differs:
        return [
            "the differences did not come again while every operation was observed: they do not "
            "repeat, and no site can be named"
        ]
    last = result.traced[-1]
    checksums = sum(traced.rows for traced in result.traced)
    return [f"nothing differs: {checksums:,} checksums of {last.sites} operations agree"]


def _describe_parting(parting: Parting) -> list[str]:
    found, first = parting.difference, parting.first_token
    place = (
        ""
        if first is None
        else (
            f", the first at position {first.position} of {first.prompt_id}, sample {first.sample}"
        )
    )
    if found.lacks_rows:
        ours, theirs = (found.alone[side].numel() for side in ("rollout", "training"))
        return [
            f"rollout and training part at {parting.site} ({parting.kind}), seen at {found.site}",
            f"  rollout lacks {theirs:,} tokens that training has{place}",
            f"  rollout computed {ours:,} tokens behind others than those of any sample: the pages "
            "that it went on from hold another sequence's keys, or old ones",
        ]
    lines = [
        f"rollout and training part at {describe_site(found.site)} ({parting.kind}); the "
        f"{found.sites_before} operations before it are equal",
        f"  {found.differing.numel():,} of {found.tokens_compared:,} tokens differ there{place}",
    ]
    if parting.max_abs_diff is not None:
        lines.append(f"  their values differ by {parting.max_abs_diff:.3g} at most")
    if len(set(found.formats.values())) > 1:
        lines.append(
            f"  the flow has {found.formats['rollout']} there in rollout and "
            f"{found.formats['training']} in training"
        )
    lines += [
        f"  {side} computed {count:,} tokens more than once with other bits: its result there "
        "depends on more than the token"
        for side, count in found.unstable.items()
        if count
    ]
    if parting.kind in _HINTS:
        lines.append(f"  {_HINTS[parting.kind]}")
    return lines
