"""Which precision flow for a model (``isobit flows``): the same prompts in several flows, measured
against ``bf16``, and a recommendation.

Over the same N tokens t of answers, by default the greedy ones of ``bf16``, with p the distribution
of ``bf16`` at each of them and q that of a flow, over the whole vocabulary:

    perplexity   exp(-mean log q(t))
    KL           mean of sum_v p(v) (log p(v) - log q(v))
    rms          sqrt(mean of (log q(t) - log p(t))^2), in nats
    changed      share of the tokens before which q and p have another most likely token
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from isobit.commands.evaluate import read_sets
from isobit.config.load import build
from isobit.config.precision import DEFAULT_PRESET, PrecisionConfig, named_precision
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_has_sets, check_reward, check_samples
from isobit.data.encoding import token_ids
from isobit.kernels.backend import support, use_back_end
from isobit.memory.activations import published_bytes
from isobit.memory.cache_size import reserve_of
from isobit.memory.cards import Card, support_for
from isobit.memory.speed import SpeedShape, StepWork, estimate_step
from isobit.models.decoder import decoder_shape, layer_parameters
from isobit.models.folder import (
    DescribedModel,
    choose_device,
    describe_model,
    load_model,
    model_needs,
)
from isobit.models.kv_calibration import calibrate_kv_scales
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.models.tensor_parallel import check_ranks
from isobit.observe.console import Console, silent
from isobit.observe.evaluation import result_of
from isobit.observe.flow_choice import (
    THRESHOLD,
    Closeness,
    Comparison,
    FlowFigures,
    differences_of,
    read_by_size,
)
from isobit.observe.intervals import paired_interval
from isobit.parallel.world import ALONE
from isobit.precision.flow import build_flow
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.rewards.grading import Graders
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.run.crests import has_int8, measure_crests
from isobit.run.data import evaluation_requests
from isobit.run.resolved import with_date_of
from isobit.run.reward_models import ModelRewards, reward_model_folders
from isobit.util.errors import ConfigError, DataError, NonFiniteError
from isobit.util.terminal import gib

_BATCH, _CHUNK = 4096, 256
"""Tokens of a scoring forward, and rows whose distributions are in memory at a time."""
_PROMPT = 512
"""Tokens of a prompt in estimates without data, or half of a shorter context."""


def read_flow(flow: Any) -> PrecisionConfig:
    """A preset's name, or a recipe's table. Raises ConfigError."""
    if isinstance(flow, str | PrecisionConfig):
        return named_precision(flow)
    return build(PrecisionConfig, flow, "a flow")


DEFAULT_FLOWS = tuple(
    PrecisionConfig.model_validate(table)
    for table in (
        {"preset": "int8"},
        {"preset": "fp8"},
        {"preset": "fp8", "attention": "int8"},
        {"preset": "fp8-linear"},
    )
)
"""What is compared with ``bf16`` where nothing is chosen."""


@dataclass(slots=True)
class _Base:
    """What is kept of ``bf16``: the sequences, what predicts their tokens, lm_head, the scores."""

    batches: Sequence[PackedBatch]
    hidden: Sequence[torch.Tensor]
    head: Any
    scores: Sequence[float | None]


class _Bench:
    """Measures one flow after the other, ``bf16`` first; only one's weights are in memory."""

    def __init__(
        self,
        model: DescribedModel,
        config: RunConfig,
        requests: Sequence[Request],
        answers: str | None,
        graders: Graders | None,
        reward_models: Mapping[str, Path],
        console: Console,
    ) -> None:
        self._model = model
        self._config = config
        self._requests = requests
        self._answers = answers
        self._graders = graders
        self._console = console
        use_back_end(config.back_end)
        self._device = choose_device(config.device, model.config, PrecisionConfig(preset="bf16"))
        folders = reward_models if graders is not None else {}
        self._rewards = ModelRewards(config.reward, folders, self._device, config.data.date)
        self._base: _Base | None = None

    @property
    def tokens(self) -> int:
        """Tokens that all flows score."""
        assert self._base is not None
        return sum(batch.targets.numel() for batch in self._base.batches)

    def measure(self, one: FlowFigures) -> FlowFigures:
        needs = model_needs(self._model.config, one.precision.preset)
        if (problem := support(self._device.type).model_problem(needs)) is not None:
            return replace(one, problem=problem)
        config = self._config
        policy = load_model(self._model.folder, one.precision, self._device, False).policy
        engine = NativeEngine(policy, config.rollout, self._model.tokenizer, config.seed)
        if policy.kv_scales is not None:
            prompts = [request.prompt.token_ids for request in self._requests]
            calibrate_kv_scales(policy, prompts, policy.backend.sizes.batched_tokens)
        with self._console.generating(one.name) as progress:
            generate(engine, self._requests[:1])  # what compiles or allocates at the first call
            begun = perf_counter()
            made = generate(engine, self._requests, progress)
            seconds = perf_counter() - begun
        drawn = sum(completion.length for group in made for completion in group)
        groups = [
            Group(asked.prompt, 0, group) for asked, group in zip(self._requests, made, strict=True)
        ]
        one = self._graded(replace(one, generated_per_s=drawn / seconds), groups, engine)
        engine.release()
        del engine
        with self._console.busy(f"{one.name}: scoring"):
            one = self._scored(one, policy, groups)
        if (memory := policy.backend.memory) is not None:
            del policy
            memory.release_cached()
        return one

    def _graded(
        self, one: FlowFigures, groups: Sequence[Group], engine: NativeEngine
    ) -> FlowFigures:
        if self._graders is None:
            return one
        stats = self._graders.collect(groups, models=self._rewards.scores(engine.release))
        samples = self._requests[0].samples
        graded = [[reward for reward in group.rewards if reward is not None] for group in groups]
        scores = tuple(fmean(rewards) if rewards else None for rewards in graded)
        one = replace(one, result=result_of(groups, samples, stats.all_counts()), scores=scores)
        if self._base is None:
            return one
        found = differences_of(scores, self._base.scores)
        if len(found) < 2:
            return one
        return replace(one, difference=fmean(found), interval=paired_interval(found))

    def _scored(self, one: FlowFigures, policy: Policy, groups: Sequence[Group]) -> FlowFigures:
        batches = self._batches(groups) if self._base is None else self._base.batches
        scorer = Scorer(policy)
        if has_int8(policy.flow):
            crests = tuple(measure_crests(policy, batches[0]))
            one = replace(one, crests=crests, crest_tokens=batches[0].token_ids.numel())
        scorer.hidden_states(batches[0], side="rollout")[0].cpu()
        begun = perf_counter()
        hidden = [scorer.hidden_states(batch, side="rollout")[0] for batch in batches]
        hidden[-1].cpu()  # waits for the device
        seconds = perf_counter() - begun
        if self._base is None:
            head = policy.weights("rollout").lm_head
            self._base = _Base(batches, hidden, head, one.scores)
        tokens = sum(batch.token_ids.numel() for batch in batches)
        closeness = _closeness(policy, hidden, self._base)
        return replace(one, scored_per_s=tokens / seconds, closeness=closeness)

    def _batches(self, groups: Sequence[Group]) -> list[PackedBatch]:
        """Prompts with the answers in a column of the data, or else those of ``bf16``."""
        if self._answers is None:
            answers = [one.completions[0].token_ids for one in groups]
        else:
            texts = [one.prompt.row.get(self._answers) for one in groups]
            for one, text in zip(groups, texts, strict=True):
                if not isinstance(text, str):
                    raise DataError(
                        f"prompt {one.prompt.id} has no text in the column {self._answers!r}; "
                        "name another with --answers, or leave it out"
                    )
            answers = token_ids(list(map(str, texts)), self._model.tokenizer)
        context = self._model.config.max_positions
        pairs = [(one.prompt.token_ids, a) for one, a in zip(groups, answers, strict=True)]
        cut = [(prompt, answer[: context - len(prompt)]) for prompt, answer in pairs]
        return pack([TokenSequence.of_answer(*pair) for pair in cut if pair[1]], _BATCH)


@torch.no_grad()
def _closeness(policy: Policy, hidden: Sequence[torch.Tensor], base: _Base) -> Closeness:
    """Raises NonFiniteError for a distribution that is not finite."""
    head, weights = policy.decoder.lm_head, policy.weights("rollout")
    sums = torch.zeros(4, dtype=torch.float64)
    for batch, mine, theirs in zip(base.batches, hidden, base.hidden, strict=True):
        targets = policy.backend.to_device(batch.targets)
        for t, x, y in zip(*(z.split(_CHUNK) for z in (targets, mine, theirs)), strict=True):
            q = head.logits(weights, x).float().log_softmax(-1)
            p = policy.backend.head_logits(y, base.head, head.num_drawn).float().log_softmax(-1)
            drawn, expected = (z.gather(1, t[:, None])[:, 0].double() for z in (q, p))
            parts = (
                drawn,
                (p.exp() * (p - q)).sum(-1).double(),
                (drawn - expected).square(),
                (q.argmax(-1) != p.argmax(-1)).double(),
            )
            sums += torch.stack([part.sum() for part in parts]).cpu()
    count = sum(batch.targets.numel() for batch in base.batches)
    nll, kl, square, changed = (sums / count).tolist()
    if not math.isfinite(nll + kl + square):
        raise NonFiniteError(f"{policy.flow.name}: log-probabilities of the prompts")
    return Closeness(math.exp(-nll), max(0.0, kl), math.sqrt(square), changed)


def compare_flows(
    model: str | Path,
    config: RunConfig,
    flows: Sequence[PrecisionConfig | str | Mapping[str, Any]] = (),
    *,
    answers: str | None = None,
    card: Card | None = None,
    threshold: float = THRESHOLD,
    console: Console | None = None,
) -> Comparison:
    """Answer the prompts of ``config.data.eval`` in ``bf16`` and in each of the flows, and compare
    them.  They are graded where ``config.reward`` was given.  ``answers`` is a column with the text
    that all flows score behind each prompt, in place of what ``bf16`` answers.  With a ``card``
    memory and speed are also those of a GPU; without data nothing else is found.  Writes nothing.

    Raises ConfigError for a flow that does not fit the model, and what loading, generating and
    grading raise.
    """
    check_ranks(config.cluster.rollout_tp, ALONE)
    card = None if card is None else card.by(config.back_end)
    described = describe_model(model)
    shape = described.config
    figures = [_planned(one, described, config, card) for one in _in_order(flows)]
    comparison = Comparison(
        str(model),
        figures,
        context=shape.max_positions,
        threshold=threshold,
        layer_parameters=layer_parameters(shape),
        by_size=read_by_size(),
        card="" if card is None else card.name,
        card_note="" if card is None else card.note(),
    )
    requests: list[Request] = []
    if config.data.eval or card is None:
        check_has_sets(config.data.eval)
        check_samples(config.evaluation)
        graded = "reward" in config.model_fields_set
        if graded:
            check_reward(config.reward)
        folders = reward_model_folders(config.reward)
        config = with_date_of(config, described.folder, folders.values())
        sets = read_sets(config, described.tokenizer, shape.max_positions, graded=graded)
        asked = evaluation_requests(sets, config.evaluation, config.rollout, described)
        requests = [one for every in asked.values() for one in every]
        with Graders(config.reward) if graded else nullcontext() as graders:
            if graders is not None:
                graders.check_columns(sets)
            console = console or silent()
            bench = _Bench(described, config, requests, answers, graders, folders, console)
            figures = [bench.measure(one) for one in figures]
            tokens = bench.tokens
        comparison = replace(comparison, flows=figures, problems=len(requests), tokens=tokens)
    if card is not None:
        assumed = min(_PROMPT, shape.max_positions // 2)
        lengths = [len(one.prompt.token_ids) for one in requests] or [assumed]
        work = _step(config, SpeedShape(shape, figures[0].flow), fmean(lengths))
        figures = [_estimated(one, work, card) for one in figures]
        comparison = replace(comparison, estimated_for=_described(work))
    return replace(comparison, flows=figures)


def _in_order(
    flows: Sequence[PrecisionConfig | str | Mapping[str, Any]],
) -> list[PrecisionConfig]:
    """``bf16``, then ``int8`` where it is among the flows, then the others."""
    others = sorted(map(read_flow, flows), key=lambda one: one.name != DEFAULT_PRESET)
    wanted = [PrecisionConfig(preset="bf16"), *(others or DEFAULT_FLOWS)]
    return list(dict.fromkeys(wanted))


def _planned(
    precision: PrecisionConfig, model: DescribedModel, config: RunConfig, card: Card | None
) -> FlowFigures:
    """A flow with its memory, by the plan's functions."""
    shape = model.config
    flow = build_flow(precision, decoder_shape(shape))
    base = PrecisionConfig(preset="bf16")
    if card is None:
        use_back_end(config.back_end)
    device = "cuda" if card is not None else choose_device(config.device, shape, base).type
    sizes = support_for(device, card).sizes
    page = sizes.page_bytes(shape, flow)
    weights = published_bytes(shape, flow, sizes)
    return FlowFigures(precision, flow, weights, page // sizes.page_tokens)


def _step(config: RunConfig, shape: SpeedShape, prompt: float) -> StepWork:
    """A step of the recipe's size, with prompts of so many tokens and the longest answers."""
    training, rollout = config.training, config.rollout
    new = max(1, min(rollout.max_new_tokens, int(shape.config.max_positions - prompt)))
    fresh = training.prompts_per_step * training.samples_per_prompt
    return StepWork(
        shape=shape,
        sequences=fresh + config.replay.beside(fresh),
        length=prompt + new,
        recompute=training.recompute,
        prompts=training.prompts_per_step,
        prompt_tokens=prompt,
        samples=training.samples_per_prompt,
        new_tokens=new,
        most_at_once=rollout.max_sequences,
    )


def _described(work: StepWork) -> str:
    return (
        f"{work.prompts} prompts of {work.prompt_tokens:.0f} tokens with {work.samples} answers of "
        f"{work.new_tokens} each"
    )


def _estimated(one: FlowFigures, step: StepWork, card: Card) -> FlowFigures:
    """The figures with the times that ``isobit.memory.speed`` estimates."""
    left = card.total - reserve_of(card.total) - one.weight_bytes
    if left < one.kv_bytes * step.length:
        raise ConfigError(
            f"the weights in {one.name} take {gib(one.weight_bytes)}, and no answer fits beside "
            f"them on the {card.name}; name a larger --gpu"
        )
    shape = SpeedShape(step.shape.config, one.flow)
    work = replace(step, shape=shape, cached_tokens=left / one.kv_bytes)
    return replace(one, estimate=estimate_step(work, card).as_json())
