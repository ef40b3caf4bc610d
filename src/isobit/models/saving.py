"""Write Hugging Face folders: safetensors under the checkpoint's names, ``config.json`` and the
tokenizer's files. A value head, which checkpoints do not have, is left out.

    BF16    every tensor is rounded to BF16
    FP8     a matrix that the rollout of a flow has in E4M3:
                X.weight               E4M3 [N, K], the policy's bytes
                X.weight_scale_inv     FP32 [N/128, K/128]; despite its name a value is
                                       byte * scale
            every other tensor in BF16, with its module in ``modules_to_not_convert``
    INT8    a matrix that the rollout has in INT8, as compressed-tensors names it:
                X.weight               INT8 [N, K], the policy's integers, behind H
                X.weight_scale         FP32 [N, 1]; a value of W H / sqrt(n) is integer * scale
            ``transform_config`` says that inputs are multiplied by H / sqrt(n) in front of it;
            every other tensor in BF16, with its module in ``ignore``

Stock loaders read whole blocks of FP8 only, and engines fuse q with k and v, gate with up, and all
experts: if one part of a fused matrix does not consist of whole blocks, all its parts are written
in BF16, as the numbers that their bytes stand for. E4M3 times a power of two is exact in BF16.

Published INT8 scales carry 1 / n, the factor of both H. Loaders divide inputs by sqrt(n), so that
here scales are sqrt(n) times as large: exactly for n = 64, rounded to FP32 for n = 128.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from isobit.data.stop_tokens import named_stops, stop_token_ids
from isobit.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from isobit.kernels.backend import backend_of
from isobit.models.checkpoint import open_checkpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, checkpoint_shapes
from isobit.models.larger_model import TOKEN_IDS, LargerModel, is_larger
from isobit.models.master_values import parts_of
from isobit.models.outliers import about_folded, fold_norms, norm_offset
from isobit.models.policy import Policy
from isobit.models.quantised_checkpoint import fp8_config, int8_config
from isobit.models.safetensors import (
    INT8_SCALES_SUFFIX,
    SCALES_SUFFIX,
    SHARD_BYTES,
    Layout,
    write_order,
    write_shards,
)
from isobit.models.stacked import stacked_layout, stacks
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.quant_tensor import (
    BLOCK,
    E4M3,
    EIGHT_BITS,
    Int8Rows,
    QuantisedWeight,
    QuantTensor,
    dequantise,
    num_blocks,
    rotation_size,
)
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import json_text
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.models.policy import Policy


class Tensors(Protocol):
    """A checkpoint's tensors by name, each read only when it is asked for."""

    @property
    def in_e4m3(self) -> Set[str]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The numbers of a tensor, in any format but E4M3, from which they are dequantised."""
        ...

    def quantised(self, name: str) -> QuantTensor | None:
        """A matrix stored in E4M3, with its scales; None for any other tensor."""
        ...


@dataclass(frozen=True, slots=True)
class MergedTensors:
    """A base's tensors with its adapters added, W + scale B A in FP64, rounded to FP32 once."""

    base: Tensors
    adapters: Mapping[str, torch.Tensor]  # by PEFT's names
    scale: float

    def tensor(self, name: str) -> torch.Tensor:
        values, change = self.base.tensor(name), self.change(name)
        return values if change is None else (values.double() + change).float()

    def change(self, name: str) -> torch.Tensor | None:
        """The change that is added to a tensor, FP64; None where there is no adapter."""
        path = f"base_model.model.{name.removesuffix('.weight')}"
        down = self.adapters.get(f"{path}.lora_A.weight")
        if down is None:
            return None
        up = self.adapters[f"{path}.lora_B.weight"]
        return (up.double() @ down.double()).mul_(self.scale)

    @property
    def in_e4m3(self) -> frozenset[str]:
        """The empty set: merged matrices are in FP32."""
        return frozenset()

    def quantised(self, name: str) -> QuantTensor | None:
        return None


@dataclass(frozen=True, slots=True)
class Contents:
    layout: Layout
    value: Callable[[str], torch.Tensor]
    quantization: dict[str, Any] | None = None
    """``quantization_config`` of config.json; None if no matrix is in 8 bits."""
    not_whole: tuple[str, ...] = ()
    """Matrices in E4M3 that are written in BF16 because a size is no multiple of 128."""
    folded: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Factors [1, K] of the columns of matrices behind norms that were folded, by matrix."""

    @property
    def num_quantised(self) -> int:
        return sum(tensor.dtype in (E4M3, torch.int8) for tensor in self.layout.values())


def bf16_contents(config: ModelConfig, tensors: Tensors) -> Contents:
    """Every tensor of the checkpoint, rounded to BF16."""
    layout = {
        name: _meta(shape, torch.bfloat16) for name, shape in checkpoint_shapes(config).items()
    }
    return Contents(*stacked_layout(config, layout, lambda name: tensors.tensor(name).bfloat16()))


def fp8_contents(config: ModelConfig, flow: PrecisionFlow, tensors: Tensors) -> Contents:
    """The matrices that the flow's rollout has in E4M3, quantised from the tensors' numbers, and
    the rest in BF16. Raises ConfigError for a flow without E4M3 matrices.
    """
    sites = _sites_to_write(config, flow)
    if any(site.forward == "int8" for site in sites.values()):
        raise ConfigError(
            f"the flow {flow.name} samples with matrices in INT8; export with --format int8 for "
            "vLLM, with --format bf16, or name a flow in FP8, --precision fp8, in which the "
            "numbers are quantised anew"
        )
    if not sites:
        raise ConfigError(
            f"the flow {flow.name} samples with no matrix in FP8, so there is nothing to write "
            "in it; export with --format bf16, or name another flow, for example --precision fp8"
        )

    def made(matrix: str) -> QuantTensor:
        quantised = publish_part(sites[matrix], tensors.tensor(matrix))
        assert isinstance(quantised, QuantTensor), "the site is in E4M3"
        return quantised

    return _in_fp8(config, sites.keys(), made, tensors)


def stored_contents(config: ModelConfig, tensors: Tensors) -> Contents:
    """The matrices that are stored in E4M3, byte for byte, and the rest in BF16."""

    def stored(matrix: str) -> QuantTensor:
        quantised = tensors.quantised(matrix)
        assert quantised is not None, f"{matrix} is in E4M3"
        return quantised

    return _in_fp8(config, tensors.in_e4m3, stored, tensors)


def _in_fp8(
    config: ModelConfig,
    matrices: Set[str],
    published: Callable[[str], QuantTensor],
    tensors: Tensors,
) -> Contents:
    whole = whole_blocks(config, matrices)
    layout: dict[str, torch.Tensor] = {}
    others = bf16_contents(config, tensors)
    for name, tensor in others.layout.items():
        if name not in whole:
            layout[name] = tensor
            continue
        rows, columns = tensor.shape
        layout[name] = _meta((rows, columns), E4M3)
        grid = num_blocks(rows), num_blocks(columns)
        layout[name + SCALES_SUFFIX] = _meta(grid, torch.float32)

    def value(name: str) -> torch.Tensor:
        matrix = name.removesuffix(SCALES_SUFFIX)
        if matrix not in matrices:
            return others.value(name)
        quantised = published(matrix)
        if matrix not in whole:
            return dequantise(quantised).bfloat16()
        return quantised.values if name == matrix else quantised.scales

    not_whole = tuple(name for name in layout if name in matrices and name not in whole)
    quantization = fp8_config(_kept_modules(layout, whole)) if whole else None
    return Contents(layout, value, quantization, not_whole)


def int8_contents(
    config: ModelConfig, flow: PrecisionFlow, tensors: Tensors, fold: bool = False
) -> Contents:
    """The matrices that the flow's rollout has in INT8, quantised from the tensors' numbers, and
    the rest in BF16. With ``fold``, what stands out of a norm is moved behind it first, as a policy
    does that reads a folder; a run's masters have been. Raises ConfigError for a flow without INT8
    matrices, and for a model that vLLM does not take.
    """
    of_flow = _sites_to_write(config, flow)
    sites = {name: site for name, site in of_flow.items() if site.forward == "int8"}
    if not sites:
        raise ConfigError(
            f"the flow {flow.name} samples with no matrix in INT8, so there is nothing to write "
            "in it; export with --format bf16 or fp8, or name another flow, --precision int8"
        )
    layout: dict[str, torch.Tensor] = {}
    for name, tensor in bf16_contents(config, tensors).layout.items():
        layout[name] = tensor
        if name in sites:
            layout[name] = _meta(tuple(tensor.shape), torch.int8)
            layout[name + INT8_SCALES_SUFFIX] = _meta((len(tensor), 1), torch.float32)
    sizes = {name: rotation_size(layout[name].shape[1]) for name in sites}
    quantization = int8_config(sizes, layout.keys(), _kept_modules(layout, sites.keys()))
    folded = _folded(config, flow, tensors) if fold else {}

    def numbers(name: str) -> torch.Tensor:
        factor, values = folded.get(name), tensors.tensor(name)
        if factor is None:
            return values
        return factor if factor.ndim == 1 else values.float() * factor

    def value(name: str) -> torch.Tensor:
        matrix = name.removesuffix(INT8_SCALES_SUFFIX)
        if matrix not in sites:
            return numbers(name).bfloat16()
        published = publish_part(sites[matrix], numbers(matrix))
        assert isinstance(published, Int8Rows), "the site is in INT8"
        if name == matrix:
            return published.values
        return published.scales.double().mul_(math.sqrt(sizes[matrix])).float()[:, None]

    factors = {name: factor for name, factor in folded.items() if factor.ndim == 2}
    return Contents(layout, value, quantization, folded=factors)


def _folded(config: ModelConfig, flow: PrecisionFlow, tensors: Tensors) -> dict[str, torch.Tensor]:
    """What ``fold_norms`` changes: the new numbers of norms, and factors [1, K] of the columns of
    matrices.
    """
    described, channels = build_decoder(config).masters(), list[int]()
    graphs = (flow.rollout, flow.training)
    int8 = {site.name for graph in graphs for site in graph.sites if site.forward == "int8"}

    def rows() -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in described.items():
            if len(master.shape) == 2:
                yield name, torch.ones(1, master.shape[1], dtype=torch.float32)
            elif len(master.shape) == 1 and len(master.parts) == 1:
                yield name, tensors.tensor(next(iter(master.parts))).float()

    factors: dict[str, torch.Tensor] = {}  # of columns, and the weights of norms
    offset = norm_offset(config)
    for name, row in fold_norms(rows(), int8.__contains__, channels.append, offset):
        assert isinstance(row, torch.Tensor), "no row is quantised"
        if row.ndim == 1 or bool((row != 1).any()):
            factors |= dict.fromkeys(described[name].parts, row)
    if channels:
        say(about_folded(channels))
    return factors


def _sites_to_write(config: ModelConfig, flow: PrecisionFlow) -> dict[str, Site]:
    """``quantised_sites``. Raises ConfigError for a model that no loader reads in 8 bits."""
    if config.stacks_experts:
        raise ConfigError(
            f"the experts of a {config.family} model are one tensor a layer, which no loader reads "
            "in 8 bits; export with --format bf16"
        )
    return quantised_sites(config, flow)


def quantised_sites(config: ModelConfig, flow: PrecisionFlow) -> dict[str, Site]:
    """The sites of the checkpoint's matrices that the rollout has in 8 bits, each as a linear of
    its own, by name. Blocks begin anew at each part of a fused matrix, so the bytes are the same.
    """
    sites: dict[str, Site] = {}
    for name, master in build_decoder(config).masters().items():
        if master.kind != "matrix":
            continue
        site = flow.rollout.site(name.rpartition(".")[0])
        if site.forward in EIGHT_BITS:
            sites |= {part: replace(site, parts=(rows,)) for part, rows in master.parts.items()}
    return sites


def publish_part(site: Site, values: torch.Tensor) -> QuantisedWeight:
    published = backend_of(values.device).publish(site, values.float())
    assert isinstance(published, QuantisedWeight), "the site is in 8 bits"
    return published


def quantisation_of(config: ModelConfig, flow: PrecisionFlow) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder with the matrices that the flow's rollout has in
    E4M3; None where there is none of whole blocks.
    """
    whole = whole_blocks(config, quantised_sites(config, flow).keys())
    layout = {name: _meta(shape, E4M3) for name, shape in checkpoint_shapes(config).items()}
    return fp8_config(_kept_modules(layout, whole)) if whole else None


def whole_blocks(config: ModelConfig, matrices: Set[str]) -> set[str]:
    """The matrices whose masters have only parts of whole blocks."""
    return {
        part
        for master in build_decoder(config).masters().values()
        if len(master.shape) == 2
        and all(size % BLOCK == 0 for size in (*master.parts.values(), master.shape[1]))
        for part in master.parts
        if part in matrices
    }


def published_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a policy's rollout side under the names of checkpoints, as ``isobit export
    --format fp8`` writes them: views of what is published where there is such a tensor.
    """
    weights, drawn = policy.weights("rollout"), policy.config.num_drawn
    quantised = {
        part
        for name, master in policy.decoder.masters().items()
        if master.kind == "matrix"
        and isinstance(weights.linears[name.rpartition(".")[0]].matrix, QuantTensor)
        for part in master.parts
    }
    whole = whole_blocks(policy.config, quantised)
    for name, master in policy.decoder.masters().items():
        path = name.rpartition(".")[0]
        if master.kind == "plain":
            values = (weights.plain[name] - master.offset).bfloat16()
            is_table = name == policy.decoder.lm_head.master or name.startswith("embed")
            yield next(iter(master.parts)), values[:drawn] if is_table else values
            continue
        values = (
            weights.linears[path].bias if master.kind == "bias" else weights.linears[path].matrix
        )
        if isinstance(values, QuantTensor):
            for part, one in zip(master.parts, parts_of(values), strict=True):
                if part in whole:
                    yield part, one.values
                    yield part + SCALES_SUFFIX, one.scales
                else:
                    yield part, dequantise(one).bfloat16()
        else:
            assert isinstance(values, torch.Tensor), "a matrix in E4M3 or BF16, or a bias"
            yield from zip(master.parts, values.split(list(master.parts.values())), strict=True)


def _kept_modules(layout: Layout, quantised: Set[str]) -> list[str]:
    """The modules with matrices that are not in 8 bits, and lm_head, which may be tied."""
    modules = [
        name.removesuffix(".weight")
        for name, tensor in layout.items()
        if tensor.ndim == 2
        and name not in quantised
        and not name.endswith((SCALES_SUFFIX, INT8_SCALES_SUFFIX))
    ]
    return list(dict.fromkeys([*modules, "lm_head"]))


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


GENERATION_FILE = "generation_config.json"
TEXT_FILES = (
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION_FILE,
)
"""Files that describe text rather than weights; they are copied."""
TEMPLATES = "additional_chat_templates"  # a folder of further chat templates


class PolicyTensors:
    """The tensors of a policy's masters, by the checkpoint's names (``Tensors``).

    Each of several ranks owns some rows of a master, which is gathered when the first of its
    tensors is asked for, in the same order on all ranks, and held until the last one was.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._described = policy, policy.decoder.masters()
        self._masters = {
            part: name for name, described in self._described.items() for part in described.parts
        } | {stack.name: stack.master for stack in stacks(policy.config)}
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._gathered: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        master = self._masters[name]
        if name not in self._held.get(master, ()):
            self._held[master] = self._described[master].of_checkpoint(self._gather(master))
        tensor = self._held[master].pop(name)
        if not self._held[master]:
            del self._held[master]
        return tensor

    def gather_rest(self, names: Sequence[str]) -> None:
        """Take part in gathering the masters of ``names`` that this rank has not gathered."""
        for master in dict.fromkeys(self._masters[name] for name in names):
            if master not in self._gathered:
                self._gather(master)

    def _gather(self, master: str) -> torch.Tensor:
        self._gathered.add(master)
        self._policy.world.pulse.beat()
        whole = self._policy.whole_master(master)
        if self._policy.world.size == 1:
            return whole
        return whole.cpu()  # no device memory is planned for it

    @property
    def in_e4m3(self) -> frozenset[str]:
        return frozenset()

    def quantised(self, name: str) -> QuantTensor | None:
        return None


@contextmanager
def policy_contents(policy: Policy, limit: int = SHARD_BYTES) -> Iterator[Contents]:
    """The BF16 rounding of a policy's masters, for rank 0 to write within this block, in files of
    at most ``limit`` bytes. All ranks enter it; if the block raises, no rank is left waiting for a
    master.
    """
    tensors = PolicyTensors(policy)
    contents = bf16_contents(policy.config, tensors)
    order = write_order(contents.layout, limit)
    try:
        yield contents
    except Exception:
        tensors.gather_rest(order)
        raise
    tensors.gather_rest(order)


def save_policy(
    policy: Policy, folder: Path, tokenizer_from: Path | None = None, limit: int = SHARD_BYTES
) -> None:
    """Write the BF16 rounding of a policy's masters as a Hugging Face folder, in files of at most
    ``limit`` bytes, with another folder's tokenizer files if given. All ranks call it; rank 0
    writes.
    """
    with policy_contents(policy, limit) as contents:
        if policy.world.rank == 0:
            write_folder(folder, policy.config, contents, tokenizer_from, limit)


def write_folder(
    folder: Path,
    config: ModelConfig,
    contents: Contents,
    tokenizer_from: Path | None = None,
    limit: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write a model folder, one tensor at a time; -> the SHA-256 of each file of tensors. What
    ``tokenizer_from`` has around this decoder is copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = config.to_hf()
    larger = None if tokenizer_from is None else _larger_model(tokenizer_from, config)
    if larger is not None:
        described, contents = larger.around(described), _beside_rest(larger, contents)
    if tokenizer_from is not None:
        given = {key: value for key, value in described.items() if value is not None}
        described |= _token_ids(tokenizer_from) | given
        copy_tokenizer(tokenizer_from, folder)
    if contents.quantization is not None:
        described["quantization_config"] = contents.quantization
    _write_json(folder / "config.json", described)
    return write_shards(folder, contents.layout, contents.value, limit)


def _larger_model(source: Path, decoder: ModelConfig) -> LargerModel | None:
    """The larger model in a folder that a decoder is a part of, if it is one."""
    path = source / "config.json"
    config = json.loads(read_plain(path)) if path.is_file() else {}
    if not is_larger(config):
        return None
    larger = LargerModel.of(config, open_checkpoint(source))
    return larger if larger.holds(decoder) else None


def _beside_rest(larger: LargerModel, contents: Contents) -> Contents:
    """The tensors of a decoder by their names in a larger model, and the rest of that."""
    ours = {larger.name(name): name for name in contents.layout}
    layout = {theirs: contents.layout[name] for theirs, name in ours.items()}
    for name, one in larger.rest.items():
        layout[name] = _meta(one.shape, one.mapped.dtype)

    def value(name: str) -> torch.Tensor:
        return contents.value(ours[name]) if name in ours else larger.rest[name].mapped

    made = contents.quantization
    return replace(
        contents,
        layout=layout,
        value=value,
        quantization=None if made is None else larger.quantisation(made),
        not_whole=tuple(map(larger.name, contents.not_whole)),
    )


def _token_ids(source: Path) -> dict[str, Any]:
    """The special tokens that another folder's config.json names."""
    path = source / "config.json"
    config = json.loads(read_plain(path)) if path.is_file() else {}
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


_OF_A_MACHINE = ("name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file")
"""Keys in which transformers has kept where a tokenizer was read."""


def _copy_text(source: Path, target: Path) -> None:
    """A copy, byte for byte unless it names a place of the machine that it was written on."""
    shutil.copyfile(source, target)
    if source.name not in ("tokenizer_config.json", "special_tokens_map.json"):
        return
    content = json.loads(read_plain(source))
    if not isinstance(content, dict):
        return
    kept = {
        key: value
        for key, value in content.items()
        if key not in _OF_A_MACHINE
        or not isinstance(value, str)
        or not value.startswith(("/", "~", "."))
    }
    if kept != content:
        _write_json(target, kept)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Adds a generation config if there is none, so that engines know every end token."""
    for file in TEXT_FILES:
        if (source / file).is_file():
            _copy_text(source / file, folder / file)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
    has_tokenizer = any((source / file).is_file() for file in TOKENIZER_FILES)
    if has_tokenizer and not (source / GENERATION_FILE).is_file():
        stops, ids = stop_token_ids(load_tokenizer(source), source), _token_ids(source)
        if set(named_stops(source / "config.json")) != set(stops):
            ids |= {"eos_token_id": list(stops)}
        _write_json(folder / GENERATION_FILE, ids)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json_text(content, indent=2) + "\n", encoding="utf-8")
