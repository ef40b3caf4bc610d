"""Crests: tokens that INT8 rounds more coarsely than E4M3, noticed at a run's start.

INT8 has one scale for all channels of a token.  With c the largest number over the root mean
square of a token's input behind the Hadamard matrix, the relative error of INT8 is
c / (127 sqrt(12)); above c = 12 it is more than that of E4M3, 2.7%.  An input's largest INT8 value
is 127, so that c = 127 / rms(values).
"""

from collections.abc import Sequence

import torch

from isobit.kernels.observing import observing
from isobit.models.decoder import LM_HEAD, Scorable
from isobit.models.scorer import Scorer
from isobit.observe.flow_choice import CREST, Crest, describe_crests
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import Int8Rows
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence


def measure_crests(policy: Scorable, batch: PackedBatch) -> list[Crest]:
    """The crests in front of each linear in INT8, in the order of the forward; a token has
    an input of experts' down_proj for each expert that it chose.
    """
    crests: list[Crest] = []

    def observer(name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        if values.dtype != torch.int8 or not name.endswith(".input"):
            return
        rms = values.float().square().mean(-1).sqrt()
        crest = torch.where(rms > 0, 127 / rms, 0.0)
        share = float((crest > CREST).double().mean())
        crests.append(Crest(name.removesuffix(".input"), share, float(crest.max())))

    with observing(observer):
        hidden, _ = Scorer(policy).hidden_states(batch, side="rollout")
        head = policy.flow.rollout.site(LM_HEAD)
        if head.forward == "int8":
            rows = policy.backend.linear_input(hidden, head).read
            assert isinstance(rows, Int8Rows)
            observer(f"{LM_HEAD}.input", rows.values, None)
    return crests


def notice_crests(policy: Scorable, prompts: Sequence[Sequence[int]], most: int = 512) -> list[str]:
    """``describe_crests`` of the first ``most`` tokens of the prompts, for the start of a run; no
    line of a flow without INT8 or of prompts without two tokens.
    """
    kept, left = list[Sequence[int]](), most
    for ids in prompts if has_int8(policy.flow) else ():
        if left < 2:
            break
        if len(ids) > 1:
            kept.append(ids[:left])
            left -= len(kept[-1])
    if not kept:
        return []
    batch = pack([TokenSequence.of_answer(ids[:1], ids[1:]) for ids in kept], most)[0]
    return [describe_crests(measure_crests(policy, batch), most - left)]


def has_int8(flow: PrecisionFlow) -> bool:
    sites = flow.rollout.sites
    return any(site.kind in ("linear", "head") and site.forward == "int8" for site in sites)
