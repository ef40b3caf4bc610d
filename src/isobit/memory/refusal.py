"""What a plan that does not fit a device is refused with: what is too large, every way out that
works, what no number of GPUs changes, and the table of all parts.

A way out is a set of settings under which training *and* rollout fit. They are tried from the least
change to the greatest, each with one computation of the bytes:

    training    recompute and moments, also on 2, 4, .. times as many GPUs, on GPUs of which several
                share an engine, or on a larger card
    frozen      a model that only scores goes to main memory
    rollout     the moments go to main memory, forwards of fewer tokens, a cache of the least size
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.memory.cache_size import batched_tokens, reserve_of
from isobit.memory.cards import Card, support_for
from isobit.memory.host import microbatch_tokens
from isobit.models.config import ModelConfig
from isobit.models.tensor_parallel import check_cut
from isobit.training.optimiser import smaller_moments
from isobit.util.errors import ConfigError
from isobit.util.terminal import gib

if TYPE_CHECKING:
    from isobit.memory.device import DevicePlanner

_ROUND = 128  # tokens: the step of what is advised
_DOUBLINGS = 6  # of the number of GPUs, at most, in what is advised
_LEAST_BATCHED = 1024  # tokens of a forward, in what is advised
_WORTH_NAMING = 0.02  # of a device: the least share of it that is named as whole on every GPU

Changes = Mapping[str, Any]
"""Values by key of the recipe; None where a key is to be left out."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan that does not fit."""

    planner: "DevicePlanner"
    rollout: RolloutConfig | None
    training: TrainingConfig
    longest: int
    cards: Mapping[str, Card]
    """Those that are known, by name."""

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch that the recipe asks for."""
        return microbatch_tokens(self.training, self.longest, self.planner.replayed)

    def of_training(self) -> str:
        """Training that does not fit, whatever the rollout does."""
        needed = sum(self.planner.training_bytes(self.training, self.tokens, self.longest).values())
        return self._with_table(
            f"training a micro-batch of {self.tokens:,} tokens would take {gib(needed)} of the "
            f"device's memory, and {gib(self.planner.planned)} can be planned with",
            self._as_set(),
            *self._ways_of_training(),
        )

    def of_the_cache(self, wanted: int, available: int) -> str:
        """A rollout whose cache does not fit: ``wanted`` bytes."""
        assert self.rollout is not None
        left, key = max(available, 0), "rollout.kv_memory_gib"
        most, pages = f"{left / (1 << 30):.3g} GiB", self.planner.most_pages(self.rollout, left)
        if self.rollout.kv_pages is not None:
            key, most = "rollout.kv_pages", f"{pages:,} pages"
        reserve = reserve_of(self.planner.total)
        said = (
            f"the KV cache would take {gib(wanted)} of the device's memory, and beside the "
            f"weights, a forward and {gib(reserve)} of reserve there is room for {gib(left)} (of "
            f"sequences of up to {self.longest:,} tokens)"
        )
        is_set = self.rollout.kv_pages is not None or self.rollout.kv_memory_gib is not None
        ways = [f"the largest {key} that fits is {most}"] if is_set and pages else []
        enough: list[Changes] = []
        away, offload = self._offloaded(self.planner)
        for planner, models in ((self.planner, {}), (away, offload)):
            for also in self._changes_of_rollout(self.training):
                changes = {**models, **also}
                is_more = any(one.keys() <= changes.keys() for one in enough)
                if not is_more and self._rollout_fits(planner, self.training, also, self.longest):
                    enough.append(changes)
        ways += [f"it fits with {_text(also)}" for also in enough]
        return self._with_table(said, *(ways or self._ways_of_training()))

    def _as_set(self) -> str:
        """What fits with the settings as they are."""
        settings = (
            f"training.recompute = {self.training.recompute!r} and "
            f"training.moments = {self.training.moments!r}"
        )
        most = self.planner.largest_microbatch(self.training, self.longest)
        if most >= self.longest:
            also = self._for_rollout(self.planner, self.training, self.longest)
            if also is None:
                return f"with {settings} smaller micro-batches fit, and the rollout does not"
            most = max(most // _ROUND * _ROUND, self.longest)
            beside = f", and for the rollout {_text(also)}" if also else ""
            return (
                f"the largest training.tokens_per_microbatch that fits with {settings} is "
                f"{most:,}{beside}"
            )
        if most > 0:
            return (
                f"with {settings} at most {most:,} fit, and a sequence, here of up to "
                f"{self.longest:,} tokens, is never cut"
            )
        return f"with {settings} not one token fits beside weights and gradients"

    def _ways_of_training(self) -> Iterator[str]:
        """All other ways out, or that there is none."""
        here = self._way(self.planner, self._smaller_settings())
        sharing, count = self._by_sharing() if here is None else None, self.planner.processes
        if here is not None:
            yield f"{self.tokens:,} fit with {here}"
        elif (shorter := self._shorter()) is not None:
            yield shorter
        elif sharing is None or sharing[0] > count:
            where = "this GPU" if count == 1 else f"{count} GPUs"
            yield f"no setting makes this model's training fit on {where}"
        more = [*self._on_more_gpus(), *([sharing[1]] if sharing else [])]
        yield from more or [self._whole_on_every_gpu()]
        larger = [] if here is not None else list(self._on_a_larger_card())
        yield from larger
        if here is None and not more and not larger:
            yield "take a smaller model, or a GPU with more memory"

    def _shorter(self) -> str | None:
        """How many tokens fit with the settings that take least, if the rollout runs under them."""
        away, offload = self._offloaded(self.planner)
        changes = self._smaller_settings()[-1]
        training = _changed(self.training, changes)
        most = away.largest_microbatch(training, self.longest)
        least = min(most, self.longest)
        also = self._for_rollout(away, training, least) if most > 0 else None
        if also is None:
            return None
        settings = _text({**offload, **_new(changes, self.training), **also})
        beside = f", with {settings}" if settings else ""
        shorter = ": take sequences of no more" if most < self.longest else ""
        return f"the most that any setting holds are {most:,}{beside}{shorter}"

    def _on_more_gpus(self) -> Iterator[str]:
        """The least number of GPUs with the settings as they are, and a smaller one with others."""
        counts = [self.planner.processes << n for n in range(1, _DOUBLINGS + 1)]
        changes = self._smaller_settings()
        if not self._is_helped_by_gpus():
            return
        for tried in (changes[:1], changes[1:]):
            for count in counts if counts and self._fits_on(counts[-1], tried) else ():
                planner = replace(self.planner, processes=count)
                if (found := self._change(planner, tried)) is None:
                    continue
                most = planner.largest_microbatch(_changed(self.training, found), self.longest)
                also = _text(found)
                yield (
                    f"set cluster.processes = {count}{f' and {also}' if also else ''}: on so "
                    f"many GPUs micro-batches of up to "
                    f"{max(most // _ROUND * _ROUND, self.tokens):,} fit"
                )
                counts = counts[: counts.index(count)]
                break

    def _by_sharing(self) -> tuple[int, str] | None:
        """The least number of GPUs that do if several share an engine, and the matrices that it
        reads; and with which settings.
        """
        planner, changes = self.planner, self._smaller_settings()
        if self.rollout is None or not self._can_share():
            return None
        for count in (planner.processes << n for n in range(_DOUBLINGS + 1)):
            for sharing in (2, 4, 8):
                if count % sharing or not _is_cut(planner.shape, sharing):
                    continue
                made = replace(planner, processes=count, rollout_tp=sharing)
                if self._change(self._offloaded(made)[0], changes[-1:]) is None:
                    continue  # not with the settings that take least
                if (settings := self._way(made, changes)) is not None:
                    more = {} if count == planner.processes else {"cluster.processes": count}
                    how = _text({**more, "cluster.rollout_tp": sharing})
                    return count, f"{self.tokens:,} fit with {how} and {settings}"
        return None

    def _can_share(self) -> bool:
        """Whether processes can share an engine that none share yet."""
        made = self.planner
        return made.can_share and made.learns and made.rollout_tp == 1 and made.shape.lora is None

    def _is_helped_by_gpus(self) -> bool:
        """Whether what each of any number of GPUs has whole would fit, with the least settings."""
        training = _changed(self.training, self._smaller_settings()[-1])
        least = self.planner.whole(training, self.tokens, self.longest)
        return sum(least.values()) <= self.planner.planned

    def _fits_on(self, count: int, changes: Sequence[Changes]) -> bool:
        return self._change(replace(self.planner, processes=count), changes) is not None

    def _on_a_larger_card(self) -> Iterator[str]:
        """The smallest that is large enough."""
        changes = self._smaller_settings()
        training, (away, _) = _changed(self.training, changes[-1]), self._offloaded(self.planner)
        least = sum(away.training_bytes(training, self.tokens, self.longest).values())
        for card in sorted(self.cards.values(), key=lambda card: card.total):
            planner = replace(self.planner, total=card.total, sizes=support_for("cuda", card).sizes)
            if card.total <= self.planner.total or planner.planned < least:
                continue
            settings = self._way(planner, changes)
            if settings is not None:
                where = f"{card.article} {card.name} ({gib(card.total)})"
                yield f"{self.tokens:,} fit on {where} with {settings}"
                return

    def _whole_on_every_gpu(self) -> str:
        """What more GPUs do not lower, with the settings that take least."""
        training = _changed(self.training, self._smaller_settings()[-1])
        count, is_helped = self.planner.processes << _DOUBLINGS, self._is_helped_by_gpus()
        planner = replace(self.planner, processes=count) if is_helped else self.planner
        whole = planner.whole(training, self.tokens, self.longest, with_sums=is_helped)
        least = _WORTH_NAMING * planner.total
        parts = " + ".join(f"{name} {gib(size)}" for name, size in whole.items() if size > least)
        where = f"on {count} GPUs it would not fit either" if is_helped else "more GPUs do not help"
        return f"{where}: each has all of {parts}"

    def _way(self, planner: "DevicePlanner", changes: Sequence[Changes]) -> str | None:
        """The first of ``changes`` under which training and rollout fit, as text; models that only
        score are offloaded before anything else changes.
        """
        away, offload = self._offloaded(planner)
        for tried, with_offload, prefix in (
            (changes[:1], planner, {}),
            (changes[:1], away, offload),
            (changes[1:], planner, {}),
            (changes[1:], away, offload),
        ):
            if (found := self._change(with_offload, tried)) is not None:
                return _text({**prefix, **found}) or "the settings as they are"
        return None

    def _change(self, planner: "DevicePlanner", changes: Sequence[Changes]) -> Changes | None:
        """The first of ``changes`` under which as many tokens as are asked for fit, and the rollout
        too, with what has to change for that.
        """
        for change in changes:
            training = _changed(self.training, change)
            needed = planner.training_bytes(training, self.tokens, self.longest)
            if sum(needed.values()) > planner.planned:
                continue
            also = self._for_rollout(planner, training, self.longest)
            if also is not None:
                return {**_new(change, self.training), **also}
        return None

    def _for_rollout(
        self, planner: "DevicePlanner", training: TrainingConfig, longest: int
    ) -> Changes | None:
        """The least change with which the rollout fits; None if there is none."""
        for also in self._changes_of_rollout(training):
            if self._rollout_fits(planner, training, also, longest):
                return also
        return None

    def _changes_of_rollout(self, training: TrainingConfig) -> Iterator[Changes]:
        if self.rollout is None:
            yield {}
            return
        tokens = batched_tokens(self.rollout, self.planner.sizes)
        fewer = [tokens >> n for n in range(1, 8) if tokens >> n >= _LEAST_BATCHED]
        batched: list[Changes] = [{}, *({"rollout.max_batched_tokens": most} for most in fewer)]
        offloads: list[Changes] = [{}]
        if self.planner.learns and not training.offload_moments:
            offloads.append({"training.offload_moments": True})
        keys = ("kv_pages", "kv_memory_gib")
        caches: list[Changes] = [{}]
        if any(getattr(self.rollout, key) is not None for key in keys):
            named = [key for key in keys if getattr(self.rollout, key) is not None]
            caches.append({f"rollout.{key}": None for key in named})
        for cache, fewer_tokens, offload in product(caches, batched, offloads):
            yield {**offload, **fewer_tokens, **cache}

    def _rollout_fits(
        self, planner: "DevicePlanner", training: TrainingConfig, also: Changes, longest: int
    ) -> bool:
        if self.rollout is None:
            return True
        rollout = _changed(self.rollout, also, "rollout.")
        standing = planner.rollout_bytes(rollout, _changed(training, also))
        wanted = planner.wanted_cache(rollout, longest)
        return sum(standing.values()) + wanted <= planner.planned

    def _smaller_settings(self) -> list[Changes]:
        """The settings of recompute and moments that take no more memory: first those that are
        set.
        """
        training, levels = self.training, get_args(Recompute)
        return [
            {"training.recompute": level, "training.moments": moments}
            for moments, level in product(
                (training.moments, *smaller_moments(training.moments)),
                levels[levels.index(training.recompute) :],
            )
        ]

    @staticmethod
    def _offloaded(planner: "DevicePlanner") -> tuple["DevicePlanner", Changes]:
        """The plan with all models that only score in main memory, and the keys that send them
        there.
        """
        away = (model for model in planner.frozen if model.stays and model.with_offload().offload)
        keys = dict.fromkeys((f"{model.table}.offload" for model in away), True)
        return replace(planner, frozen=tuple(one.with_offload() for one in planner.frozen)), keys

    def _with_table(self, *sentences: str) -> str:
        said = "; ".join(sentence for sentence in sentences if sentence)
        plan = self.planner.unfitting(self.rollout, self.training, self.longest)
        return "\n".join([said, *plan.table()])


def _is_cut(shape: ModelConfig, ranks: int) -> bool:
    """Whether tensor parallelism cuts a model for so many ranks."""
    try:
        check_cut(shape, ranks)
    except ConfigError:
        return False
    return True


def _changed(config: Any, changes: Changes, prefix: str = "training.") -> Any:
    """A table of the recipe with those of ``changes`` that are its own."""
    own = {
        key.removeprefix(prefix): value for key, value in changes.items() if key.startswith(prefix)
    }
    return config.model_copy(update=own)


def _new(changes: Changes, training: TrainingConfig) -> Changes:
    """Those of ``changes`` that are not set already."""
    return {
        key: value
        for key, value in changes.items()
        if getattr(training, key.removeprefix("training.")) != value
    }


def _text(changes: Changes) -> str:
    """``training.recompute = 'full' and ..``"""
    words = [
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in changes.items()
        if value is not None
    ]
    words += [f"{key} left out" for key, value in changes.items() if value is None]
    return " and ".join(words)
