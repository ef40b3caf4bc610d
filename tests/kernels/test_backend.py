"""Both back ends offer what the protocols name; a device is chosen by what each says of itself."""

import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch

from isobit.config.base import BackEnd, Device
from isobit.kernels import backend, operands, sizes
from isobit.kernels.backend import DeviceChoice, ModelNeeds, backend_of, choose_device, support
from isobit.kernels.hopper import support as hopper_support
from isobit.kernels.spec import backend as spec_backend
from isobit.kernels.triton import support as triton_support
from isobit.kernels.triton.attention import PART
from isobit.util.errors import ConfigError

FOLDERS = ["spec", "hopper", "triton"]
BACK_ENDS = [("spec", "SpecBackend"), ("hopper", "HopperBackend"), ("triton", "TritonBackend")]


def members(protocol: type) -> dict[str, Any]:
    """Methods by name; properties, for attributes too."""
    attributes = dict.fromkeys(inspect.get_annotations(protocol), property())
    return attributes | {name: x for name, x in vars(protocol).items() if not name.startswith("_")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Without ``self``."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p for p in found if p.name != "self"}


def assert_callable_as(offered: Any, wanted: Any) -> None:
    """By the same names in the same order; a default may be added, none may be another, and more
    parameters may follow that have one.
    """
    ours, theirs = parameters(offered), parameters(wanted)
    assert list(ours)[: len(theirs)] == list(theirs)
    more = list(ours.values())[len(theirs) :]
    assert all(one.default is not inspect.Parameter.empty for one in more), more
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert parameter.default in (inspect.Parameter.empty, ours[name].default), name


def assert_offers(protocol: type, offered: Any) -> None:
    """``offered`` is an object, a class, or a module."""
    for name, wanted in members(protocol).items():
        if isinstance(wanted, property):
            # an attribute of the class, a property, or one that the constructor sets
            assert hasattr(offered, name) or f"self.{name} = " in inspect.getsource(offered), name
        else:
            assert_callable_as(getattr(offered, name), wanted)


def module_of(folder: str, name: str) -> Any:
    if folder != "spec":
        pytest.importorskip("triton", reason="the kernels need Triton")
    return importlib.import_module(f"isobit.kernels.{folder}.{name}")


def made(folder: str, name: str) -> Any:
    """A back end, on a device that it may not have."""
    offered = getattr(module_of(folder, "backend"), name)
    return offered() if folder == "spec" else offered(torch.device("cuda"))


@pytest.mark.parametrize(("folder", "name"), BACK_ENDS)
def test_a_back_end_offers_every_operation(folder: str, name: str) -> None:
    offered = made(folder, name)
    assert_offers(backend.Backend, offered)
    assert offered.name == folder


@pytest.mark.parametrize(("folder", "name"), BACK_ENDS)
def test_a_back_end_offers_nothing_that_is_not_named(folder: str, name: str) -> None:
    """What only one of them has, nobody above can call."""
    offered = made(folder, name)
    own = {name for name in dir(offered) if not name.startswith("_")}
    assert own - {"products"} <= members(backend.Backend).keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_support_and_sizes_are_there_without_kernels(folder: str) -> None:
    home = folder if folder == "spec" else f"{folder}.support"
    assert_offers(backend.Support, importlib.import_module(f"isobit.kernels.{home}"))
    assert_offers(sizes.Sizes, importlib.import_module(f"isobit.kernels.{folder}.sizes"))


@pytest.mark.parametrize("folder", ["spec", "triton"])
def test_what_a_back_end_makes_keeps_its_protocols_too(folder: str) -> None:
    packed = module_of(folder, "attention" if folder == "spec" else "attend")
    paged = cache = module_of(folder, "paged_attention" if folder == "spec" else "attend")
    assert_offers(operands.AttendWithBackward, packed.PackedAttention)
    assert_callable_as(packed.PackedAttention.__call__, operands.Attend.__call__)
    assert_callable_as(paged.PagedAttention.__call__, operands.Attend.__call__)
    assert_offers(operands.KvCache, cache.SpecKvCache if folder == "spec" else cache.GpuKvCache)


def test_the_gpus_memory_and_transfers_keep_their_protocols() -> None:
    memory = module_of("triton", "memory")
    assert_offers(backend.DeviceMemory, memory.GpuMemory)
    assert_offers(backend.Captured, memory.CapturedGraph)
    assert_offers(backend.Arriving, memory.HostCopies)


def unbound(offered: Any) -> Any:
    """The function of an operation, without what a back end gives it."""
    return offered.func if isinstance(offered, partial) else offered


def test_the_same_operations_stand_in_files_of_the_same_name() -> None:
    """A reader of one folder finds the other's way."""
    spec, portable = (
        {name: function.__module__.rpartition(".")[2]
         for name in members(backend.Backend)
         if inspect.isfunction(function := unbound(getattr(offered, name)))}
        for offered in (made("spec", "SpecBackend"), made("triton", "TritonBackend"))
    )  # fmt: skip
    shared = spec.keys() & portable.keys()
    assert len(shared) > 20
    elsewhere = {name for name in shared if not portable[name].startswith(spec[name])}
    # The kernels that publish or take a checksum are long, and stand in files of their own; swiglu
    # is one kernel with the quantiser, and draws are one with their noise.
    assert elsewhere <= {"checksum", "draw", "publish", "publish_head", "republish", "swiglu"}


def test_the_registry_makes_a_back_end_once() -> None:
    made = backend_of(torch.device("cpu"))
    assert isinstance(made, spec_backend.SpecBackend)
    assert made is backend_of(torch.device("cpu"))
    assert (made.name, made.device) == ("spec", torch.device("cpu"))
    with pytest.raises(KeyError):
        backend_of(torch.device("meta"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_support_loads_on_every_machine(device: str) -> None:
    found = support(device)
    line, is_worth_a_look = found.state()
    assert line and isinstance(is_worth_a_look, bool)
    assert found.has_own_memory == (device == "cuda")
    assert found.sizes.page_tokens in (64, 128)


def test_captured_steps_and_transfers_of_the_specification_are_the_things_themselves() -> None:
    made, calls = spec_backend.SpecBackend(), []

    def step() -> tuple[torch.Tensor, ...]:
        calls.append(None)
        return (torch.tensor(len(calls)),)

    captured = made.capture(step)
    assert [int(captured.replay()[0]) for _ in range(3)] == [1, 2, 3]
    x = torch.randn(3)
    assert made.to_device(x) is x and made.to_host([x]).wait()[0] is x
    assert made.reach(777, 1) == 777


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def choose(
    wanted: Device, heads: tuple[int, int, int] = (8, 2, 64), preset: str = "fp8"
) -> DeviceChoice:
    return choose_device(wanted, ModelNeeds(*heads, preset))


@pytest.mark.parametrize(
    ("capability", "wanted", "chosen"),
    [
        ((9, 0), "auto", "cuda"),
        ((9, 0), "cuda", "cuda"),
        ((9, 0), "cpu", "cpu"),
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ((8, 0), "auto", "cuda"),
        ((12, 0), "auto", "cuda"),
        ((7, 5), "auto", "cpu"),
    ],
)
def test_the_device(
    capability: tuple[int, int] | None, wanted: Device, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    choice = choose(wanted)
    assert choice.device.type == chosen
    assert len(choice.passed_over) == (capability == (7, 5)), "a device that is there is named"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [(None, "sees no NVIDIA GPU"), ((7, 5), r"NVIDIA Test is sm_75.*since Ampere \(sm_80\)")],
)
def test_a_device_that_cannot_be_used_is_refused_by_name(
    capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    with pytest.raises(ConfigError, match=f"device = 'cuda', but .*{reason}.*use device 'cpu'"):
        choose("cuda")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test names and makes is forgotten behind it."""
    monkeypatch.setattr(backend, "_named", {})
    monkeypatch.setattr(backend, "_made", {})


@pytest.mark.parametrize(
    ("capability", "name", "found"),
    [
        ((9, 0), "auto", "hopper"),
        ((9, 0), "triton", "triton"),
        ((8, 0), "auto", "triton"),
        ((10, 0), "hopper", "hopper"),
        (None, "auto", "hopper"),
        (None, "triton", "triton"),
    ],
)
@pytest.mark.usefixtures("named")
def test_the_back_end_of_a_generation(
    capability: tuple[int, int] | None, name: BackEnd, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    backend.use_back_end(name)
    assert backend.back_end_of("cuda") == found
    assert support("cuda") is importlib.import_module(f"isobit.kernels.{found}.support")
    assert backend.back_end_of("cpu") == "spec"


@pytest.mark.usefixtures("named")
def test_the_doctors_line_names_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 24 << 30))
    for capability, name in (((9, 0), "hopper"), ((8, 9), "triton")):
        gpu(monkeypatch, capability)
        line, is_worth_a_look = support("cuda").state()
        assert f"NVIDIA Test: sm_{capability[0]}{capability[1]}, back end {name}, 20 GiB" in line
        assert not is_worth_a_look


@pytest.mark.usefixtures("named")
def test_a_back_end_for_another_generation_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, (8, 9))
    backend.use_back_end("hopper")
    with pytest.raises(ConfigError, match=r"sm_89.*back_end = 'triton' is for all cards"):
        choose("cuda")
    assert choose("auto").device.type == "cpu"


@pytest.mark.usefixtures("named")
def test_a_process_computes_by_one_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = module_of("triton", "backend")
    monkeypatch.setattr(portable, "lower_for_sm_80", lambda: None)  # for all tests behind this one
    gpu(monkeypatch, (9, 0))
    device = torch.device("cuda")
    backend.use_back_end("triton")
    assert backend_of(device).name == "triton"
    for name in ("auto", "hopper"):
        with pytest.raises(ConfigError, match="this process computes by triton already"):
            backend.use_back_end(name)
    backend.use_back_end("triton")
    assert backend_of(device).name == "triton"


def test_without_triton_a_hopper_gpu_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    choice = choose("auto")
    assert choice.device.type == "cpu" and "Triton is not installed" in choice.passed_over[0]
    assert "Triton is not installed" in hopper_support.state()[0]


@pytest.mark.parametrize(
    ("heads", "preset", "reason"),
    [
        ((8, 2, 32), "fp8", "8 query heads of 32 over 2 KV heads"),
        ((8, 2, 64), "fp32", "precision 'fp32' is the CPU's reference"),
    ],
)
def test_what_a_device_does_not_compute_goes_to_the_next(
    heads: tuple[int, int, int], preset: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, (9, 0))
    choice = choose("auto", heads, preset)
    assert choice.device.type == "cpu" and reason in choice.passed_over[0]
    with pytest.raises(ConfigError, match=reason):
        choose("cuda", heads, preset)


@pytest.mark.parametrize(
    ("heads", "fits"),
    [
        ((32, 8, 128), True),
        ((16, 1, 64), True),
        ((32, 1, 128), False),
        ((8, 8, 96), True),
        ((4, 1, 256), True),
        ((8, 8, 80), False),
        ((9, 4, 64), False),
    ],
)
def test_heads_that_gpus_compute(heads: tuple[int, int, int], fits: bool) -> None:
    needs = ModelNeeds(*heads, "fp8")
    assert (hopper_support.model_problem(needs) is None) is fits
    assert (triton_support.model_problem(needs) is None) is fits
    assert support("cpu").model_problem(needs) is None


def test_a_captured_step_on_hopper_reaches_twice_as_many_parts() -> None:
    made = module_of("hopper", "backend").HopperBackend(torch.device("cuda"))
    parts = (0.5, 1, 1.5, 4, 4.5, 16, 17)
    lengths = [int(PART * n) for n in parts]
    assert [made.reach(n, 128) // PART for n in lengths] == [1, 1, 2, 4, 8, 16, 32]
    assert [made.reach(n, 512) // PART for n in lengths[:-2]] == [1, 1, 2, 4, 8]
    assert made.reach(lengths[-2], 512) == made.reach(lengths[-1], 129) > 1 << 24, "in order"
