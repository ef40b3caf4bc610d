"""A reward model: a frozen decoder in the flow with one score a sequence.

    score = w . hidden[last]      w [C] and hidden states in BF16 (FP32 in the ``fp32`` flow), the
                                  sum in FP32

``last`` is the last token of the sequence that is no padding, as transformers has it: trailing
tokens ``pad_token_id`` do not count, also where the tokenizer pads with the token that ends a
sequence.  The decoder is causal, so what follows ``last`` changes nothing and is not computed.

The forward is the training side's over packed sequences, where each row's sums have an order of
their own: a score is the same bits whatever else is scored with it, in whatever order and packing.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.precision import PrecisionConfig
from isobit.data.tokenizer import check_vocabulary, load_tokenizer
from isobit.errors import ModelError
from isobit.models.folder import read_masters, read_reward_config
from isobit.models.frozen import FrozenPolicy
from isobit.models.scorer import Scorer
from isobit.records.batch import PackedBatch
from isobit.records.bins import first_fit_decreasing


class RewardModel:
    """Scores token sequences."""

    def __init__(self, policy: FrozenPolicy, tokenizer: PreTrainedTokenizerBase) -> None:
        """``policy`` is the decoder with its score head; where it is offloaded, scores are asked
        for within its ``on_device``.
        """
        assert policy.decoder.value is not None, "a reward model has a score head"
        self.policy, self.tokenizer, self._scorer = policy, tokenizer, Scorer(policy)

    @property
    def context(self) -> int:
        """Tokens that a sequence can hold."""
        return self.policy.config.max_positions

    def score(self, sequences: Sequence[Sequence[int]], tokens_per_batch: int) -> list[float]:
        """The score of each sequence, in batches of at most so many tokens (or of one sequence).

        A score may be NaN or infinite where the model's output is.  Raises ModelError for a token
        that the model does not know.
        """
        config = self.policy.config
        self._check_vocabulary(max((max(ids) for ids in sequences), default=0))
        trimmed = [without_padding(ids, config.pad_token_id) for ids in sequences]
        scores = [0.0] * len(trimmed)
        for members in first_fit_decreasing([len(ids) for ids in trimmed], tokens_per_batch):
            batch = last_tokens_batch([trimmed[index] for index in members])
            for index, score in zip(members, self._forward(batch), strict=True):
                scores[index] = score
        return scores

    def _forward(self, batch: PackedBatch) -> list[float]:
        values = self._scorer.score(batch).values
        assert values is not None, "a reward model has a score head"
        return values.tolist()

    def _check_vocabulary(self, largest: int) -> None:
        if largest >= self.policy.config.vocab_size:
            raise ModelError(
                f"the reward model's tokenizer gives the token {largest}, but the model knows 0 to "
                f"{self.policy.config.vocab_size - 1}: the tokenizer belongs to another model"
            )


def load_reward_model(
    folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
) -> RewardModel:
    """Read a ``...ForSequenceClassification`` folder and publish its weights in the given flow.

    Raises ModelError for a folder that cannot be used, ConfigError for precision options that the
    model does not have.
    """
    config = read_reward_config(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    masters = read_masters(folder, config, device)
    return RewardModel(FrozenPolicy.publish(config, precision, masters, device), tokenizer)


def without_padding(token_ids: Sequence[int], pad_token_id: int | None) -> Sequence[int]:
    """The sequence up to its last token that is no padding; its first token where all are."""
    count = len(token_ids)
    while count > 1 and token_ids[count - 1] == pad_token_id:
        count -= 1
    return token_ids[:count]


def last_tokens_batch(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    """A micro-batch of which the last token of each of the S sequences is read: N = S, and there is
    nothing that its row predicts.
    """
    lengths = torch.tensor([len(ids) for ids in sequences])
    last, nothing = lengths.cumsum(0) - 1, torch.zeros(len(sequences))
    token_ids = torch.tensor([token for ids in sequences for token in ids])
    return PackedBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        lengths=tuple(lengths.tolist()),
        rows=last,
        targets=token_ids[last],
        sequence=torch.arange(len(sequences)),
        temperatures=torch.ones(len(sequences)),
        recorded_log_probs=nothing,
        old_log_probs=nothing,
        advantages=nothing,
    )
