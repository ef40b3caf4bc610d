"""vLLM as the engine of a run: ``rollout.engine = "vllm"``, with ``pip install 'isobit[vllm]'``.

It runs in this process, on its own copy of the weights and with its own kernels, so it computes
another function than the trainer.  A run says so, takes old log-probabilities from the trainer, and
corrects for the difference; the metrics of the mismatch are as ever.

    weights     with each publication the policy's 8-bit bytes and scales, or BF16 numbers, go to
                vLLM's model through its weight-transfer interface, without a copy in between.
                Afterwards each of its tensors is compared with what was published
    KV cache    BF16, or E4M3 with one scale a layer for Q, K and V, which vLLM takes from its first
                forward; it takes them again after each publication
    memory      ``release`` has vLLM sleep (its level 2): cache and weights leave the device, and
                the next step maps them again and sends the weights anew

Samples keep their books here (``isobit.rollout.sequence``), as those of the native engine do: stop
strings, episodes and half-done samples are the same.  vLLM draws its own noise, and its kernels are
not batch invariant: a run with it is not repeated to the bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isobit.config.tables import RunRolloutConfig
from isobit.memory.cache_size import out_of_memory_named
from isobit.models.policy import Policy
from isobit.models.policy_share import LogProbFunction
from isobit.rollout.books import SampleBooks
from isobit.rollout.engine import Handle, Limits, Request
from isobit.rollout.sequence import Sample
from isobit.rollout.vllm_model import Vllm
from isobit.util.errors import MismatchError, RequestError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VllmEngine(SampleBooks):
    """Draws samples with vLLM from the current weights of a policy (``RolloutEngine``).

    Args:
        policy: its published rollout side is what vLLM is given.
        config: sizes; ``engine_options`` are further arguments of ``vllm.LLM``.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of vLLM's noise.
        pages: of the native engine's cache; vLLM's has as many bytes.

    Raises ConfigError where vLLM is missing, is of another version, or does not start.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunRolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        pages: int,
    ) -> None:
        self._policy, self._max_sequences = policy, config.max_sequences
        self._vllm = Vllm(policy, config, seed, pages)
        context, blocks, block_tokens = self._vllm.sizes
        drawn = policy.config.num_drawn
        limits = Limits(context, drawn, blocks, block_tokens, tokenizer is not None)
        super().__init__(limits, seed, tokenizer)
        self._names: dict[str, Handle] = {}
        """The live samples that vLLM has, by the names that they have there."""
        self._named = 0

    @property
    def function(self) -> LogProbFunction:
        """Of vLLM's copy of the weights, and therefore the trainer's in no flow."""
        return LogProbFunction(self, self._policy.flow.graph("rollout"), self._vllm.name)

    @property
    def num_running(self) -> int:
        """Samples that vLLM has, of which some may wait there."""
        return len(self._names)

    @property
    def has_room(self) -> bool:
        """Whether fewer samples are live than run at once."""
        return len(self._live) < self._max_sequences

    def figures(self) -> dict[str, Any]:
        """The version, and the sizes of its cache."""
        limits = self._limits
        return {
            "engine": self._vllm.name,
            "kv_pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
        }

    def take_weights(self) -> None:
        """Send what was published last, unless vLLM sleeps: then the next step does."""
        if not self._vllm.asleep:
            with self._all_or_nothing():
                self._update()

    def release(self) -> None:
        """Have vLLM sleep; live samples stay here, and are given to it again when it wakes."""
        if not self._vllm.asleep:
            self._let_go(self._live.values())
            self._vllm.sleep()

    # Samples on their way to vLLM and back.

    def _check(self, requests: Sequence[Request], live: Iterable[Handle] = ()) -> None:
        """Also filters of the distribution."""
        super()._check(requests, live)
        check_whole_distribution(requests)

    def _take_on(self, sample: Sample) -> None:
        super()._take_on(sample)
        if not self._vllm.asleep:
            self._give_to_vllm(sample)

    def _draw(self) -> None:
        """One step of vLLM: a token for each sample that it runs.

        Raises OutOfMemoryError as torch does, and MismatchError where vLLM's weights are not those
        that were published.
        """
        self._wake()
        outputs = self._vllm.engine.step()
        self._notes += self._vllm.describe_scales()
        self.stats.forwards += 1
        for output in outputs:
            self._accept(output)

    def _give_to_vllm(self, sample: Sample) -> None:
        """Have a sample drawn on from all of its tokens; the next to last of these are the ones of
        which vLLM computes K and V, or finds them in its prefix cache.
        """
        self._named += 1
        name, sampling = str(self._named), sample.prompt.request.sampling
        self._vllm.add(
            name,
            sample.tokens,
            temperature=sampling.temperature,
            max_tokens=sample.max_length - len(sample.tokens),
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sample.prompt.request.seed,
        )
        self._names[name] = sample.handle
        self.stats.prompt_tokens += len(sample.prompt.tokens)
        self.stats.recomputed_tokens += len(sample.tokens) - len(sample.prompt.tokens)

    def _let_go(self, samples: Iterable[Sample]) -> None:
        leaving = {sample.handle for sample in samples}
        names = [name for name, handle in self._names.items() if handle in leaving]
        if names:
            self._vllm.engine.abort_request(names)
            for name in names:
                del self._names[name]

    def _accept(self, output: Any) -> None:
        """Append what vLLM drew for one sample, up to what ends it here."""
        handle = self._names.get(output.request_id)
        if handle is None:
            return  # aborted while it was under way
        sample, (drawn,) = self._live[handle], output.outputs
        version = self._vllm.version
        assert version is not None, "vLLM has weights while it draws"
        log_probs = drawn.logprobs or ()
        for token, found in zip(drawn.token_ids, log_probs, strict=True):
            self._append(sample, token, found[token].logprob, version, "vLLM")
            if sample.finish_reason is not None:
                break
        if sample.finish_reason is not None:
            if output.finished:
                del self._names[output.request_id]
            self._end(sample)
        elif output.finished:
            raise MismatchError(
                f"vLLM ended a sample of prompt {handle.prompt_id!r} after "
                f"{len(sample.log_probs)} tokens for the reason "
                f"{shown(repr(drawn.finish_reason))}, which ends none here"
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        with super()._all_or_nothing(), out_of_memory_named(self._policy.backend.memory):
            yield

    def _wake(self) -> None:
        """Have vLLM awake with the newest weights and all live samples."""
        if self._vllm.asleep:
            self._vllm.wake()
        self._update()
        there = set(self._names.values())
        for handle, sample in self._live.items():
            if handle not in there:
                self._give_to_vllm(sample)

    def _update(self) -> None:
        """Have vLLM take what was published since, with no sample there meanwhile."""
        if self._vllm.version == self._policy.version:
            return
        begun, is_first = perf_counter(), self._vllm.version is None
        waiting = [self._live[handle] for handle in self._names.values()]
        self._let_go(waiting)
        self._notes.append(self._vllm.update())
        self._count_update(perf_counter() - begun, is_first)
        for sample in waiting:
            self._give_to_vllm(sample)


def check_whole_distribution(requests: Sequence[Request]) -> None:
    """Refuse filters of the distribution: vLLM gives the log-probability behind them alone."""
    for request in requests:
        if request.sampling.truncates:
            raise RequestError(
                f"prompt {request.prompt.id!r} is sampled with top_k, top_p or min_p, behind "
                "which vLLM gives no log-probability over the whole vocabulary, as the loss "
                "needs it; leave them out, or set rollout.engine = 'native'"
            )
