"""A decoder in the folder of a larger model, as Gemma 3 and Qwen3.5 have it beside a vision tower:
the names of its tensors, and what folders that are written keep of the rest, as it is.

    language_model.model.X, or in newer folders model.language_model.X     the decoder's model.X
    language_model.lm_head.X, or lm_head.X                                 its lm_head.X
    vision_tower.X, visual.X, multi_modal_projector.X, or those with model. before   the rest
    mtp.X                            the rest, too: layers that guess, which nothing here computes

Nothing here computes with the rest: images are refused where messages are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isobit.models.config import ModelConfig
from isobit.models.families import OUTER_ARCHITECTURES
from isobit.models.rope import OF_IMAGES
from isobit.models.safetensors import CheckpointTensor
from isobit.util.errors import ModelError

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config.json that a ``ModelConfig`` does not have."""
_REST = ("vision_tower.", "visual.", "multi_modal_projector.", "mtp.")
_STYLES = (
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.language_model.": "model."},
)
"""The beginnings of the decoder's names, as they are there and here."""


def is_larger(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model whose ``text_config`` is the decoder."""
    named = config.get("architectures")
    return isinstance(named, list) and len(named) == 1 and named[0] in list(OUTER_ARCHITECTURES)


def decoder_tensors(stored: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """The tensors of a larger model's decoder, by the names that they have in a folder of its own;
    one that is not known keeps its name. Raises ModelError for names that a decoder has only alone.
    """
    found: dict[str, CheckpointTensor] = {}
    for name, one in stored.items():
        if _is_rest(name):
            continue
        begun = {theirs: ours for style in _STYLES for theirs, ours in style.items()}
        theirs = next((theirs for theirs in begun if name.startswith(theirs)), "")
        inner = begun.get(theirs, "") + name.removeprefix(theirs)
        if inner in found or (not theirs and name.startswith("model.")):
            raise ModelError(
                f"{one} has a name that is not of a {' or '.join(OUTER_ARCHITECTURES)}; expected "
                f"each tensor once, and those of the decoder as {' or '.join(begun)}"
            )
        found[inner] = one
    return found


def _is_rest(name: str) -> bool:
    return name.removeprefix("model.").startswith(_REST)


@dataclass(frozen=True, slots=True)
class LargerModel:
    """What a folder has around its decoder."""

    config: Mapping[str, Any]  # the whole config.json
    rest: Mapping[str, CheckpointTensor]  # the tensors that are not the decoder's
    names: Mapping[str, str]  # the beginnings of the decoder's names here, and as they are there

    @classmethod
    def of(cls, config: Mapping[str, Any], stored: Mapping[str, CheckpointTensor]) -> "LargerModel":
        is_newer = any(name.startswith(tuple(_STYLES[1])) for name in stored)
        names = {ours: theirs for theirs, ours in _STYLES[is_newer].items()}
        return cls(config, {n: one for n, one in stored.items() if _is_rest(n)}, names)

    def holds(self, decoder: ModelConfig) -> bool:
        """Whether its decoder has that configuration, but for what folders do not have."""
        own = ModelConfig.from_hf(dict(self.config), "config.json")
        return own == replace(decoder, lora=None, value_head=False, tokenizer_size=None)

    def name(self, ours: str) -> str:
        """The name of a decoder's tensor or module in this folder."""
        for beginning, theirs in self.names.items():
            if ours.startswith(beginning):
                return theirs + ours.removeprefix(beginning)
        return ours

    def around(self, decoder: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with another decoder's ``ModelConfig.to_hf``, and what is beside it."""
        before = self.config["text_config"]
        own = before | {key: value for key, value in decoder.items() if key != "architectures"}
        own |= {key: before[key] for key in TOKEN_IDS if before.get(key) is not None}
        of_images = before.get("rope_parameters") or {}
        own["rope_parameters"] = own["rope_parameters"] | {
            key: value for key, value in of_images.items() if key in OF_IMAGES
        }
        tied = {"tie_word_embeddings": own["tie_word_embeddings"]}
        outside = {key: value for key, value in self.config.items() if key != "quantization_config"}
        return outside | tied | {"text_config": own}

    def quantisation(self, decoder: Mapping[str, Any]) -> dict[str, Any]:
        """A ``quantization_config`` of the decoder alone, with the rest as modules that are kept:
        by the names of this folder, and by those of transformers' modules, which are the newer.
        """
        rest = {name.rpartition(".")[0].removeprefix("model.") for name in self.rest}

        def kept(modules: list[str]) -> list[str]:
            newer = [one.replace("model.", "model.language_model.", 1) for one in modules]
            own = [self.name(f"{one}.").removesuffix(".") for one in modules]
            towers = [before + one for one in sorted(rest) for before in ("", "model.")]
            return list(dict.fromkeys([*own, *newer, *towers]))

        def renamed(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: renamed(one, name) for name, one in value.items()}
            if key in ("modules_to_not_convert", "ignore"):
                return kept(value)
            return [renamed(one) for one in value] if isinstance(value, list) else value

        return renamed(decoder)
