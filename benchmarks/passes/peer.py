"""transformers in BF16 with SDPA: the outside baseline.  Log-probabilities in chunks of rows, each computed again in the backward."""

import torch
from torch.utils.checkpoint import checkpoint

from passes.cases import Case
from passes.timing import Pass

CHUNK = 1024


def make_pass(case: Case, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = case.config.to_hf()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, weights = case.token_ids(device), case.weights(device).view(-1)
    targets = ids[:, 1:].reshape(-1)

    def one() -> None:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].reshape(targets.numel(), -1)
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), weights.split(CHUNK), strict=True)
        loss = torch.stack([checkpoint(_loss, h, model.lm_head.weight, t, w, use_reentrant=False) for h, t, w in parts]).sum()
        loss.backward()

    return one


def _loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, head).float()
    return (torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0] * weights).sum()
