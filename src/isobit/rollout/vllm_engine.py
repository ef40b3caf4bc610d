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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isobit.config.tables import RunRolloutConfig
from isobit.memory.cache_size import out_of_memory_named
from isobit.models.policy import Policy
from isobit.models.policy_share import LogProbFunction
from isobit.records.text import Completion
from isobit.rollout.engine import (
    EngineStats,
    Follow,
    Handle,
    Limits,
    Request,
    SampleEvent,
    check_limits,
    parted,
    requests_of,
)
from isobit.rollout.sequence import Sample, SharedPrompt
from isobit.rollout.vllm_model import Vllm
from isobit.util.errors import MismatchError, NonFiniteError, RequestError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VllmEngine:
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
        self._policy, self._tokenizer, self._seed = policy, tokenizer, seed
        self._max_sequences = config.max_sequences
        self._vllm = Vllm(policy, config, seed, pages)
        context, blocks, block_tokens = self._vllm.sizes
        self._limits = Limits(
            context, policy.config.num_drawn, blocks, block_tokens, tokenizer is not None
        )
        self.stats, self._started_at = EngineStats(), perf_counter()
        self._live: dict[Handle, Sample] = {}
        """In the order of arrival."""
        self._names: dict[str, Handle] = {}
        """The live samples that vLLM has, by the names that they have there."""
        self._events: list[SampleEvent] = []
        self._update_s = 0.0  # of updates since the last sample ended
        self._named = 0
        self._notes: list[str] = []

    @property
    def function(self) -> LogProbFunction:
        """Of vLLM's copy of the weights, and therefore the trainer's in no flow."""
        return LogProbFunction(self, self._policy.flow.graph("rollout"), self._vllm.name)

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return len(self._live)

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

    def notes(self) -> list[str]:
        """What became of the weights that were published since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what can never be served, what is live already, and filters of the distribution:
        vLLM gives the log-probability behind them alone.
        """
        check_limits(requests, self._limits, self._live)
        for request in requests:
            if request.sampling.truncates:
                raise RequestError(
                    f"prompt {request.prompt.id!r} is sampled with top_k, top_p or min_p, behind "
                    "which vLLM gives no log-probability over the whole vocabulary, as the loss "
                    "needs it; leave them out, or set rollout.engine = 'native'"
                )

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """As the protocol says, with samples that are followed to their end."""
        self.check(requests)
        if follow != "end":
            raise RequestError("samples of vLLM are followed to their end alone")
        self._begin_period()
        groups: list[list[Sample]] = []
        for request in requests:
            prompt = SharedPrompt(request, max_pages=0)
            groups.append([self._make(prompt, index) for index in range(request.samples)])
        for sample in (sample for group in groups for sample in group):
            self._take_on(sample)
        return [[sample.handle for sample in group] for group in groups]

    def step(self) -> list[SampleEvent]:
        """One step of vLLM: a token for each sample that it runs.

        Raises NonFiniteError where a log-probability is none, OutOfMemoryError as torch does, and
        MismatchError where vLLM's weights are not those that were published.
        """
        if self._live:
            with self._all_or_nothing():
                self._wake()
                outputs = self._vllm.engine.step()
                self._notes += self._vllm.describe_scales()
                self.stats.forwards += 1
                for output in outputs:
                    self._accept(output)
            self.stats.seconds = perf_counter() - self._started_at
        events, self._events = self._events, []
        return events

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with the tokens so far."""
        asked = set(handles)
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        self._take_from_vllm(sample.handle for sample in leaving)
        for sample in leaving:
            sample.finish_reason = "aborted"
            self._end(sample)
        told, self._events = parted(self._events, asked)
        return told

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn."""
        return len(self._live[handle].log_probs)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let samples go as they are."""
        asked = set(handles)
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        self._take_from_vllm(sample.handle for sample in leaving)
        half_done: dict[Handle, Completion] = {}
        for sample in leaving:
            sample.finish_reason = "aborted"
            half_done[sample.handle] = sample.completion(tokenizer=None)
            del self._live[sample.handle]
        _, self._events = parted(self._events, half_done)
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples, whose tokens so far vLLM is given as a prompt.  Raises
        RequestError as the protocol says.
        """
        asked = requests_of(half_done, requests, self._live)
        self.check(list(asked.values()))
        self._begin_period()
        for handle, completion in half_done.items():
            request = asked[handle.prompt_id, handle.visit]
            sample = self._make(SharedPrompt(request, max_pages=0), handle.sample)
            sample.take_up(completion)
            self._take_on(sample)

    def take_weights(self) -> None:
        """Send what was published last, unless vLLM sleeps: then the next step does."""
        if not self._vllm.asleep:
            with self._all_or_nothing():
                self._update()

    def release(self) -> None:
        """Have vLLM sleep; live samples stay here, and are given to it again when it wakes."""
        if not self._vllm.asleep:
            self._take_from_vllm(list(self._live))
            self._vllm.sleep()

    # Samples on their way to vLLM and back.

    def _make(self, prompt: SharedPrompt, index: int) -> Sample:
        length = prompt.request.max_length(self._limits.context)
        return Sample(prompt, index, self._seed, length, 0, self._tokenizer)

    def _take_on(self, sample: Sample) -> None:
        self._live[sample.handle] = sample
        if not self._vllm.asleep:
            self._give_to_vllm(sample)

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

    def _take_from_vllm(self, handles: Iterable[Handle]) -> None:
        leaving = set(handles)
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
            log_prob = found[token].logprob
            if not -1e30 < log_prob <= 1e-3:
                raise NonFiniteError(
                    f"vLLM gave the log-probability {log_prob} for token {token} of prompt "
                    f"{handle.prompt_id!r}: its logits are not finite"
                )
            sample.accept(token, log_prob, version)
            self.stats.generated_tokens += 1
            if sample.finish_reason is not None:
                break
        if sample.finish_reason is not None:
            if output.finished:
                del self._names[output.request_id]
            else:
                self._take_from_vllm([handle])
            self._end(sample)
        elif output.finished:
            raise MismatchError(
                f"vLLM ended a sample of prompt {handle.prompt_id!r} after "
                f"{len(sample.log_probs)} tokens for the reason "
                f"{shown(repr(drawn.finish_reason))}, which ends none here"
            )

    def _end(self, sample: Sample) -> None:
        del self._live[sample.handle]
        completion = sample.completion(self._tokenizer)
        self._events.append(SampleEvent(sample.handle, completion=completion))

    def _begin_period(self) -> None:
        if not self._live:
            self.stats, self._started_at = EngineStats(update_s=self._update_s), perf_counter()
            self._update_s = 0.0

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an error nobody is live."""
        try:
            with out_of_memory_named(self._policy.backend.memory):
                yield
        except BaseException:
            self._take_from_vllm(list(self._live))
            self._live, self._events = {}, []
            raise

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
        begun, waiting, had = perf_counter(), list(self._names.values()), self._vllm.version
        self._take_from_vllm(waiting)
        self._notes.append(self._vllm.update())
        if self._live:
            self.stats.update_s += perf_counter() - begun
            self.stats.weight_changes += had is not None
        else:
            self._update_s += perf_counter() - begun
        for handle in waiting:
            self._give_to_vllm(self._live[handle])
