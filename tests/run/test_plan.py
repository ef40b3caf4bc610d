"""A dry run says what a run would use, refuses what the run would refuse, and touches nothing."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from isobit.commands import dry_run
from isobit.commands.dry_run import DryRun, plan_training
from isobit.config.commands import InspectConfig
from isobit.config.recipes import RunConfig
from isobit.kernels.backend import support
from isobit.memory.activations import kept_bytes, page_locked
from isobit.memory.cards import Card, read_card
from isobit.memory.device import DevicePlan
from isobit.memory.host import KEPT, MemoryEstimate
from isobit.memory.speed import describe_step
from isobit.models import policy
from isobit.observe.console import silent
from isobit.observe.inspection import inspect_folder
from isobit.parallel.gradient_sum import ONE_SLOT
from isobit.parallel.world import World
from isobit.records.batch import PackedBatch
from isobit.rollout.native import NativeEngine
from isobit.run import model_source
from isobit.run import plan as plan_module
from isobit.run import plan as planning
from isobit.run import run as run_module
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import RlRun, prepare_rl, read_rl
from isobit.run.rollouters import Rollouters
from isobit.store.manifest import environment
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError, ConfigError, RequestError
from isobit.util.machine import Memory
from tests.models.policies import delta_nets
from tests.ranks import in_ranks
from tests.tiny import save_tiny, tiny_model

MakeConfig = Callable[..., RunConfig]
PLENTY = Memory(total=1 << 40, available=1 << 40)


def plan_run(config: RunConfig, resume: bool = False) -> DryRun:
    return plan_training(config, read_rl, resume)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_plan_agrees_with_the_run(make_config: MakeConfig) -> None:
    config = make_config()
    plan, run = plan_run(config), prepare_rl(resolve(config))
    assert plan.flow == run.model.policy.flow
    assert plan.plan.model.config == run.model.policy.config
    assert plan.plan.longest == max(
        len(prompt.token_ids) + config.rollout.max_new_tokens
        for prompt in read_rl(resolve(config)).data.prompts
    ), "a prompt and the longest completion"
    assert plan.plan.updates == run.trainer.total_updates
    assert isinstance(plan.memory, MemoryEstimate)
    assert plan.memory.size("masters") == sum(
        4 * master.numel() for master in run.model.policy.parameters()
    )


def test_a_run_of_a_hybrid_has_carries_for_the_longest_that_it_asks_for(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    shape = tiny_model(family="qwen3_5_text", num_layers=2, **delta_nets("qwen3_5_text", 2))
    model = str(save_tiny(tmp_path / "hybrid", replace(shape, max_positions=1 << 15)))

    def planned(new: int, evaluated: int) -> int:
        rollout = {"max_new_tokens": new, "kv_memory_gib": 2e-3}
        config = make_config(
            model=model, precision="bf16", rollout=rollout, evaluation={"max_new_tokens": evaluated}
        )
        dry, engine = plan_run(config), prepare_rl(resolve(config)).engine
        assert isinstance(engine, NativeEngine)
        size = engine._size
        shape, flow = dry.plan.model.config, dry.flow
        parts = size.parts(shape, flow, support("cpu").sizes)
        assert isinstance(dry.memory, MemoryEstimate)
        assert {name: dry.memory.size(name) for name in parts} == parts
        assert dry.plan.drawn == dry.plan.longest + max(0, evaluated - new)
        return size.carries

    few, evaluated, many = planned(8, 600), planned(600, 8), planned(8, 8)
    assert few == evaluated < many


def test_the_text_holds_recipe_flow_data_and_memory(make_config: MakeConfig) -> None:
    text = "\n".join(plan_run(make_config(precision="fp8-rollout")).describe(PLENTY, True))
    assert "samples_per_prompt = 3" in text
    assert "16 training prompts; evaluation problems: 5 in held_out" in text
    assert (
        "rollout E4M3 1x128 x 128x128" in text
        and "sites differ between rollout and training" in text
    )
    assert "KV pages" in text and "1,024 GiB free" in text
    assert "warning" not in text
    assert (
        text.index("KV pages") < text.index("training prompts") < text.index("samples_per_prompt")
    )
    short = "\n".join(plan_run(make_config()).describe(PLENTY))
    assert "samples_per_prompt" not in short and "E4M3" not in short and "--verbose" in short


def test_too_little_memory_is_a_warning_with_the_key(make_config: MakeConfig) -> None:
    plan = plan_run(make_config(rollout={"max_new_tokens": 8, "kv_pages": 10000}))
    lines = plan.describe(replace(PLENTY, available=1 << 20))
    assert any("but 1 MiB are free" in line and "lower rollout.kv_pages" in line for line in lines)


def test_nothing_is_touched(
    make_config: MakeConfig, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.Policy, "__init__", None)  # weights are not loaded either
    before = files(tmp_path), files(tiny_folder)
    config = make_config()
    plan_run(config).describe(PLENTY)
    assert (files(tmp_path), files(tiny_folder)) == before
    assert not config.output.exists()


def test_a_used_directory_is_refused_unless_a_run_goes_on_in_it(make_config: MakeConfig) -> None:
    config = make_config()
    config.output.mkdir()
    manifest = config.output / "run.json"
    inputs, found = read_rl(resolve(config)).inputs, environment(torch.device("cpu"))
    recipe = config.model_dump(mode="json")
    manifest.write_text(json.dumps({"config": recipe, "inputs": inputs, **found}))
    with pytest.raises(ConfigError, match="already holds files"):
        plan_run(config)
    shown = plan_run(config, resume=True).describe(None)
    assert "--resume would go on after step 0 of 2" in shown
    with pytest.raises(ConfigError, match="seed: 0 in the run, 1 now"):
        plan_run(make_config(seed=1), resume=True)
    manifest.write_text("")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        plan_run(config, resume=True)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, total: int, main_memory: int = 1 << 40) -> None:
    monkeypatch.setattr(plan_module, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(support("cuda"), "device_model", lambda _: "NVIDIA H200")
    monkeypatch.setattr(planning, "available_memory", lambda _: total)
    monkeypatch.setattr(planning, "read_memory", lambda: Memory(1 << 40, main_memory))


def test_a_run_on_a_gpu_is_planned_with_its_memory(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, 8 << 30)
    text = "\n".join(plan_run(make_config(rollout={"kv_pages": 50})).describe(PLENTY))
    assert re.search(r"device memory, of 8 GiB: +rollout +training", text)
    assert "50 pages of 128 tokens in rollout; micro-batches of up to 84 tokens in training" in text
    with pytest.raises(RequestError, match="2 pages of 128 tokens, and the KV cache has 1"):
        plan_run(make_config(rollout={"max_new_tokens": 150, "kv_pages": 1}))


def test_ranks_that_share_an_engine_have_the_pages_of_the_one_with_the_least_memory(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_rl(resolve(make_config(rollout={"max_sequences": 1_000_000})))
    monkeypatch.setattr(run_module, "allocate_in_pages", lambda _: None)

    def pages(*totals: int) -> list[int]:
        free = list(totals)
        on_a_gpu(monkeypatch, 0)
        monkeypatch.setattr(planning, "available_memory", lambda _: free.pop())

        def planned(world: World) -> int:
            rank = cast("RlRun", SimpleNamespace(world=world))
            device = torch.device("cuda")
            made = RlRun._planned_memory(rank, plan, device, True, ONE_SLOT, world)
            assert made is not None
            return made.pages

        return in_ranks(len(totals), planned)

    least, most = pages(8 << 30, 8 << 30), pages(9 << 30, 9 << 30)
    assert least[0] < most[0]
    assert pages(8 << 30, 9 << 30) == least


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        (2, "of 6 sequences of 14 tokens: 2; rounds: 1; idle in the last: 0 of 2 processes, 0.0%"),
        (5, "tokens: 2; rounds: 1; idle in the last: 3 of 5 processes, 60.0% of the time of all"),
    ],
)
def test_several_processes_are_planned(
    processes: int, said: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, 8 << 30)
    training = {"prompts_per_step": 2, "samples_per_prompt": 3, "tokens_per_microbatch": 60}
    config = make_config(training=training, cluster={"processes": processes})
    text = "\n".join(plan_run(config).describe(PLENTY))
    assert f"processes: {processes}, each with its rows" in text
    assert said in text
    assert "each process's device, of 8 GiB" in text
    assert "arriving gradients" in text and "gradients as they are made" in text
    alone = "\n".join(plan_run(make_config(training=training)).describe(PLENTY))
    assert "rounds" not in alone and "arriving" not in alone


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_replayed_is_planned(
    shared: bool, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 6 completions of a step have the most tokens, and 6 older ones come beside them."""
    training = {"prompts_per_step": 2, "samples_per_prompt": 3, "shared_prefix": shared}
    rollout = {"max_new_tokens": 1, "kv_pages": 50}
    changes: dict[str, Any] = {"training": training | {"steps": 2}, "rollout": rollout}
    config = make_config(**changes, replay={"fraction": 0.5})
    cut: list[list[PackedBatch]] = []
    update = Trainer.update

    def seen(self: Trainer, batches: list[PackedBatch], *more: Any) -> Any:
        cut.append(batches)
        return update(self, batches, *more)

    monkeypatch.setattr(Trainer, "update", seen)
    train(config, silent())
    assert [[len(one.lengths) for one in batches] for batches in cut] == [[6], [12]]
    learnt = max(one.token_ids.numel() for batches in cut for one in batches)
    on_a_gpu(monkeypatch, 8 << 30)
    plain = plan_run(make_config(**changes, output=config.output / "b"))
    made = plan_run(make_config(**changes, replay={"fraction": 0.5}, output=config.output / "b"))
    assert isinstance(plain.memory, DevicePlan) and isinstance(made.memory, DevicePlan)
    assert plain.memory.tokens < learnt <= made.memory.tokens == 2 * plain.memory.tokens
    assert plain.memory.peaks["training"] < made.memory.peaks["training"]
    monkeypatch.undo()
    found = [
        plan_run(make_config(**changes, replay=one, output=config.output / "b")).memory
        for one in ({}, {"fraction": 0.5})
    ]
    assert isinstance(found[0], MemoryEstimate) and isinstance(found[1], MemoryEstimate)
    assert found[1].size("activations") == 2 * found[0].size("activations")


def test_time_and_rounds_count_what_is_replayed_beside_whole_rollouts(
    make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    def planned(fraction: float, shared: bool = False) -> DryRun:
        training = {"prompts_per_step": 4, "samples_per_prompt": 8, "shared_prefix": shared}
        config = make_config(
            model=str(config_alone("qwen3-0.6b")),
            training=training | {"moments": "fp8", "recompute": "full", "updates_per_batch": 2},
            cluster={"processes": 2},
            replay={"fraction": fraction},
        )
        return plan_elsewhere(config, read_card("h200"))

    times = [planned(fraction).time for fraction in (0, 0.75)]
    assert times[0] is not None and times[1] is not None
    assert times[0].rollout == times[1].rollout > 0
    assert times[1].trained == 4 * times[0].trained
    sharing = [planned(fraction, True).time for fraction in (0, 0.75)]
    assert sharing[0] is not None and sharing[1] is not None
    assert sharing[1].training - times[1].training == pytest.approx(
        sharing[0].training - times[0].training
    ), "what is replayed shares no prompt"
    texts = ["\n".join(planned(fraction).describe(None)) for fraction in (0, 0.75)]
    for sequences, text in zip((16, 64), texts, strict=True):
        assert f"micro-batches of an update, of {sequences} sequences" in text


def test_a_run_that_a_gpu_does_not_hold_is_refused_before_it_loads_anything(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "read_masters", None)
    on_a_gpu(monkeypatch, 1 << 30)
    for start in (plan_run, prepare_run):
        with pytest.raises(ConfigError, match="training a micro-batch of 84 tokens would take"):
            start(make_config())
    on_a_gpu(monkeypatch, 8 << 30, main_memory=1000)
    for start in (plan_run, prepare_run):
        with pytest.raises(
            ConfigError,
            match=r"offload_moments puts [\d.]+ MiB into main memory, and 0\.977 KiB are free",
        ):
            start(
                make_config(
                    training={
                        "steps": 2,
                        "prompts_per_step": 2,
                        "samples_per_prompt": 3,
                        "offload_moments": True,
                    }
                )
            )


APART = {"processes": 4, "rollouters": 2}


def test_weights_for_rollouters_are_planned_where_these_can_come_back(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of trainers, under our launcher and under Ray."""
    lagging: dict[str, Any] = {"async": {"lag": 1}}
    config = make_config(**lagging, cluster=APART)
    made = plan_run(config)
    assert isinstance(made.memory, MemoryEstimate)
    plan = read_rl(resolve(config))
    kept = kept_bytes(plan.model.config, made.flow, support("cpu").sizes, 2)
    assert made.memory.size(KEPT) == sum(kept) > 0
    assert f"  {KEPT} " in "\n".join(made.describe(PLENTY))
    on_a_gpu(monkeypatch, 8 << 30)
    line, size = "hold the weights for rollouters that come back", page_locked(max(kept))
    made = plan_run(config)
    assert isinstance(made.memory, DevicePlan)
    assert made.memory.host == {KEPT: size}
    assert line in "\n".join(made.describe(PLENTY))
    for cluster, is_planned in ({"processes": 4}, False), ({**APART, "launcher": "ray"}, True):
        planned = plan_run(make_config(**lagging, cluster=cluster)).describe(PLENTY)
        assert (line in "\n".join(planned)) == is_planned
    on_a_gpu(monkeypatch, 8 << 30, main_memory=2 * size)
    plan_run(config)
    on_a_gpu(monkeypatch, 8 << 30, main_memory=2 * size - 1)
    refused = (
        r"rollouters puts [\d.]+ KiB of weights for rollouters that come back into main memory"
    )
    with pytest.raises(ConfigError, match=rf"^cluster\.{refused}, and [\d.]+ KiB are free"):
        plan_run(config)


@pytest.mark.parametrize("can_replace", [True, False])
def test_a_run_counts_them_where_its_launcher_starts_rollouters_again(
    can_replace: bool, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun does not, whatever the recipe says."""
    plan = read_rl(resolve(make_config(**{"async": {"lag": 1}}, cluster=APART)))
    planned: list[DevicePlan | None] = []
    monkeypatch.setattr(run_module, "allocate_in_pages", lambda _: None)
    on_a_gpu(monkeypatch, 8 << 30)
    whole = RlRun._planned_memory

    def planning_alone(self: RlRun, *arguments: Any) -> None:
        planned.append(whole(self, *arguments))
        raise KeyError

    monkeypatch.setattr(RlRun, "_planned_memory", planning_alone)
    rollouters = cast("Rollouters", SimpleNamespace(can_replace=can_replace))
    with pytest.raises(KeyError):
        RlRun(plan, rollouters=rollouters)
    (made,) = planned
    assert made is not None
    assert (KEPT in made.host) == can_replace


def prepare_run(config: RunConfig) -> RlRun:
    return prepare_rl(resolve(config))


def plan_elsewhere(config: RunConfig, card: Card) -> DryRun:
    return plan_training(config, read_rl, card=card)


def test_a_gpu_that_is_not_here_is_planned_without_the_weights_and_this_machine(
    make_config: MakeConfig,
    config_alone: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("available_memory", "read_memory"):
        monkeypatch.setattr(planning, name, None)
    monkeypatch.setattr(planning, "choose_device", None)
    monkeypatch.setattr(dry_run, "check_unused", None)
    monkeypatch.setattr("isobit.store.disk_plan.free_bytes", lambda _: 0)
    training = {"moments": "bf16", "prompts_per_step": 8, "samples_per_prompt": 4}
    for gpus in (1, 2, 8):
        config = make_config(
            model=str(config_alone("qwen3-8b")),
            training=training,
            cluster={"processes": gpus},
            rollout={"max_new_tokens": 512},
        )
        config.output.mkdir(exist_ok=True)
        (config.output / "file").touch()
        plan = plan_elsewhere(config, read_card("h200"))
        lines = plan.describe(None)
        assert lines[0] == f"on {gpus} x H200 it fits"
        assert isinstance(plan.memory, DevicePlan) and plan.memory.total == 139 << 30
        assert plan.memory.processes == gpus
        text = "\n".join(lines)
        assert "time, estimated:" in text and "measured on an NVIDIA H200" in text
        assert "weights not here" in text and re.search(r"disk: [\d.]+ GiB for", text)
        assert ("the most that were measured" in text) == (gpus == 8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp8-rollout"},
        {"training": {"old_log_probs": "recomputed"}},
        {"training": {"shared_prefix": True, "samples_per_prompt": 4, "epochs": 2}},
        {"training": {"updates_per_batch": 2, "recompute": "full"}, "cluster": {"processes": 2}},
    ],
)
def test_inspect_estimates_and_states_what_a_dry_run_does(
    changes: dict[str, Any], make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    """Of the same settings and lengths of prompts and answers."""
    cluster, training = changes.get("cluster", {}), changes.get("training", {})
    changes = {
        "precision": "int8",
        **changes,
        "training": {"moments": "fp8", "prompts_per_step": 8, **training},
    }
    folder = config_alone("qwen3-0.6b")
    config = make_config(model=str(folder), rollout={"max_new_tokens": 64}, **changes)
    plan = plan_elsewhere(config, read_card("rtx4090"))
    assert plan.time is not None and plan.time.work is not None
    prompt = plan.time.work.prompt_tokens
    settings = InspectConfig(rollout=config.rollout, training=config.training)
    found = inspect_folder(
        folder, config.precision, "rtx4090", round(prompt) + 64, None, settings,
        cluster.get("processes", 1), weights=False,
    ).gpu  # fmt: skip
    assert found is not None and found.time is not None
    assert found.time.total == pytest.approx(plan.time.total, rel=0.005)
    assert found.time.scoring == pytest.approx(plan.time.scoring, rel=0.01)
    samples = 8 * config.training.samples_per_prompt
    said = f"if all {samples} completions have 64 tokens, behind prompts of "
    assert f"{said}{prompt:,.0f}" in "\n".join(plan.describe(None))
    one = describe_step(found.time, None, found.card, found.gpus)
    assert f"{said}{round(prompt)}" in "\n".join(one)


def test_an_estimate_on_another_card_or_of_a_reference_says_so(
    make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    def time(card: str = "h200", shared: bool = False, **changes: Any) -> tuple[float, str]:
        training = {"moments": "fp8", "recompute": "full", "shared_prefix": shared}
        model = str(config_alone("qwen3-0.6b"))
        config = make_config(
            model=model, training=training, rollout={"max_new_tokens": 512}, **changes
        )
        plan = plan_elsewhere(config, read_card(card))
        assert plan.time is not None
        return plan.time.total, "\n".join(plan.describe(None))

    plain, text = time()
    assert "no row is of a card like this one" not in text
    assert "no row is of a card like this one (H100)" in time("h100")[1]
    slow, text = time("rtx4090", precision="int8")
    assert slow > 1.2 * time(precision="int8")[0] and "scaled by data sheets" in text
    with pytest.raises(ConfigError, match="back_end = 'hopper', and --gpu RTX4090"):
        time("rtx4090", back_end="hopper")
    assert 0.9 * plain < time(shared=True)[0] < plain, "prompts of few tokens"
    with_reference, text = time(algorithm={"name": "grpo", "kl_coefficient": 0.1})
    assert with_reference > plain and "scoring" in text
    assert time(precision="fp8-rollout")[0] > plain, "log-probabilities are computed again"
    together = time(cluster={"processes": 4})[0]
    lagging: dict[str, Any] = {"async": {"lag": 1}}
    apart = time(cluster={"processes": 4, "rollouters": 2}, **lagging)[0]
    assert max(together, apart) < plain


SMALL_CARDS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "lora": {"rank": 32},
        "training": {"recompute": "mlp", "tokens_per_microbatch": 4096},
    },
    "qwen3-1.7b": {
        "training": {"moments": "fp8", "recompute": "full", "tokens_per_microbatch": 1024}
    },
}
"""Settings by shape; sequences are as long as a micro-batch."""


@pytest.mark.parametrize("gpu", ["rtx3090", "rtx4090"])
@pytest.mark.parametrize("shape", SMALL_CARDS)
def test_small_cards_hold_what_the_page_on_memory_says(
    shape: str, gpu: str, make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    settings = SMALL_CARDS[shape]
    training = {"prompts_per_step": 8, "samples_per_prompt": 8, **settings["training"]}
    longest = training["tokens_per_microbatch"]
    config = make_config(
        model=str(config_alone(shape)),
        precision="int8",
        rollout={"max_new_tokens": longest - 80},
        **settings | {"training": training},
    )
    made = plan_elsewhere(config, read_card(gpu))
    assert isinstance(made.memory, DevicePlan)
    assert made.memory.total == 22.5 * (1 << 30)
    assert made.memory.tokens == longest
    assert 0.9 * longest < made.plan.longest <= longest
    tokens = made.memory.pages * made.memory.page_tokens
    assert tokens > 8 * longest, "eight sequences at once"
    text = "\n".join(made.describe(None))
    assert f"on 1 x {gpu.upper()} it fits (back end triton; its memory and speed are est" in text


@pytest.mark.parametrize(
    "engine", [{"engine": "http"}, {"engine": "vllm", "weights_folder": "/dev/shm/w"}]
)
def test_a_run_by_servers_has_no_cache_on_its_own_gpu(
    engine: dict[str, str], make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    """Neither a forward of the engine nor weights of its own; what trains has all of the memory."""

    def plan(**rollout: Any) -> DryRun:
        training = {"moments": "fp8", "recompute": "full", "offload_moments": True}
        model = str(config_alone("qwen3-8b"))
        config = make_config(model=model, training=training, rollout=rollout)
        return plan_elsewhere(config, read_card("h200"))

    servers = ["http://one:8000", "http://two:8000"]
    here, there = plan(), plan(**engine, servers=servers)
    assert isinstance(here.memory, DevicePlan)
    assert isinstance(there.memory, DevicePlan)
    assert there.memory.rollout == {} and there.memory.pages == 0
    assert not there.memory.engine_stays
    kept = {name: size for name, size in here.memory.training.items() if name != "KV pages"}
    assert there.memory.training == kept
    assert there.memory.host == here.memory.host != {}
    text = "\n".join(there.describe(None))
    assert "KV pages" not in text and "pages of" not in text
    assert "KV pages" in "\n".join(here.describe(None))


def test_main_memory_holds_no_cache_for_servers(make_config: MakeConfig) -> None:
    rollout = {"engine": "http", "servers": ["http://one:8000"], "kv_pages": 10000}
    text = "\n".join(plan_run(make_config(rollout=rollout)).describe(PLENTY))
    assert "published weights" in text and "KV pages" not in text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("qwen3-30b-a3b", r"on this GPU; set cluster\.processes = \d+"),
        ("qwen2.5-32b", r"on this GPU; set cluster\.processes = \d+"),
        ("qwen3-8b", r"4,096 fit with training\.recompute = 'full'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_that_helps(
    shape: str, said: str, make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    folder = config_alone(shape)

    def config(**changes: Any) -> RunConfig:
        return make_config(model=str(folder), rollout={"max_new_tokens": 2048}, **changes)

    with pytest.raises(ConfigError, match=said) as refused:
        plan_elsewhere(config(), read_card("h200"))
    found = re.search(r"set cluster\.processes = (\d+)( and (.*))?: on so many", str(refused.value))
    if found is not None:
        changes = dict(re.findall(r"training\.(\w+) = '(\w+)'", found[3] or ""))
        cluster = {"processes": int(found[1])}
        plan_elsewhere(config(cluster=cluster, training=changes), read_card("h200"))


def test_a_model_that_a_gpu_does_not_compute_is_refused(
    make_config: MakeConfig, config_alone: Callable[[str], Path]
) -> None:
    config = make_config(model=str(config_alone("qwen3-8b")), precision="fp32")
    with pytest.raises(
        ConfigError, match="--gpu H200 cannot run this: precision 'fp32' is the CPU"
    ):
        plan_elsewhere(config, read_card("h200"))
