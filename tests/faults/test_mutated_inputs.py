"""Model folders, adapters, datasets and chat templates, mutated and used: each ends in success or
in an error with a sentence, within a minute and 6 GiB.

``ISOBIT_MUTATIONS`` says how many of all kinds together, 40 by default, and
``ISOBIT_MUTATIONS_SEED`` which; ``pytest -s`` prints the counts.  They are tried in processes of
their own, one after the other, so that what hangs, crashes or fills the memory ends that process
alone; the next one goes on behind it.
"""

import faulthandler
import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from isobit.api import generate
from isobit.config.data import ChatConfig, DataConfig, SftDataConfig
from isobit.config.precision import PrecisionConfig
from isobit.data.chat_template import reads_clock
from isobit.data.continuation import Continuation
from isobit.data.examples import build_examples, build_pairs
from isobit.data.prompts import Noticed, build_prompts, prompts_of_rows
from isobit.data.sources import row_of
from isobit.data.stop_tokens import end_of_turn, stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.data.tool_calls import tool_format
from isobit.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, write_adapters
from isobit.models.adapters import adapter_masters
from isobit.models.config import Lora
from isobit.models.folder import load_adapters, load_model
from isobit.models.policy import random_policy
from isobit.models.safetensors import TensorFile, write_tensors
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from isobit.util.errors import IsobitError
from tests.data.test_chat_templates import TEMPLATES, TOOLS
from tests.data.test_template_limits import HUGE
from tests.forked import called
from tests.mutations import (
    LONGEST_MESSAGE,
    REPLACED,
    mutated_bytes,
    mutated_json,
    mutated_object,
    with_depth,
)
from tests.tiny import save_tiny, tiny_model

COUNT = int(os.environ.get("ISOBIT_MUTATIONS", "40"))
SEED = os.environ.get("ISOBIT_MUTATIONS_SEED", "0")
LONGEST, MEMORY = 60, 6 << 30
"""Seconds of one mutation, and bytes of its process's address space."""
CONTEXT = 16384
LORA = Lora(4, 8.0, ("q_proj", "v_proj"))
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Reading = Callable[[], object]
Mutation = tuple[str, Reading]
"""What was done, and what reads it."""


def hurt(path: Path, draw: random.Random, change: Callable[[bytes, random.Random], bytes]) -> str:
    """Do something to a file, mostly to its content."""
    if draw.random() < 0.3:
        kind = draw.choice(list(REPLACED))
        REPLACED[kind](path)
        return f"{path.name}: {kind}"
    content = path.read_bytes()
    made = change(content, draw)
    path.write_bytes(made)
    return f"{path.name}: {_difference(content, made)}"


def _difference(before: bytes, after: bytes) -> str:
    pairs = enumerate(zip(before, after, strict=False))
    begin = next((place for place, (one, other) in pairs if one != other), 0)
    return f"from byte {begin} on {after[max(0, begin - 30) : begin + 50]!r}"


def mutated_tensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header, its length or whose data is another."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = draw.randrange(5)
    if kind == 0:
        return (
            struct.pack("<Q", draw.choice([0, 1, size - 1, 1 << 40, (1 << 64) - 1])) + content[8:]
        )
    if kind == 1:
        return content[: draw.randrange(len(content))]
    if kind == 2:  # numbers that are not finite, or very large ones
        at = draw.randrange(len(data) // 4) * 4
        number = draw.choice([float("nan"), float("inf"), 3e38, -3e38, 1e-45])
        data = data[:at] + struct.pack("<f", number) + data[at + 4 :]
    elif kind == 3:
        header = mutated_bytes(header, draw)
    else:
        header = mutated_object(header, draw)
    return struct.pack("<Q", len(header)) + header + data


def make_models(made: Path) -> None:
    save_tiny(made / "one")
    policy = random_policy(tiny_model(), PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, made / "shards", limit=100_000, tokenizer_from=starter_folder())
    shutil.copytree(
        starter_folder(), made / "starter", ignore=shutil.ignore_patterns("*.py", "__*")
    )
    for folder in made.iterdir():
        (folder / "chat_template.jinja").write_text(CHAT)


def models(made: Path, here: Path, draw: random.Random) -> Mutation:
    folder = here / "model"
    shutil.copytree(made / draw.choice(["one", "shards", "starter"]), folder)
    file = draw.choice([one for one in sorted(folder.iterdir()) if one.suffix != ".md"])
    if file.suffix != ".safetensors" and draw.random() < 0.5:
        file = folder / "config.json"
    change = mutated_bytes
    if file.suffix == ".safetensors":
        change = mutated_tensors
    elif file.suffix == ".json":
        change = mutated_object
    what = f"{folder.name}/{hurt(file, draw, change)}"
    chat = draw.random() < 0.5
    return what, lambda: (generated(folder, chat=chat), reads_clock(folder))


def generated(folder: Path, chat: bool = True) -> object:
    return generate(folder, "1+1=", max_new_tokens=2, device="cpu", chat=chat)


def make_adapters(made: Path) -> None:
    save_tiny(made / "base")
    config = tiny_model(lora=LORA)
    tensors = {
        name: torch.full((rows, *master.shape[1:]), 0.01)
        for master in adapter_masters(config).values()
        for name, rows in master.adapter.items()
    }
    write_adapters(made / "adapter", LORA, made / "base", tensors)
    config = made / "adapter" / CONFIG_FILE
    named = {"base_model_name_or_path": str(made / "base")}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))


def other_tensors(path: Path, draw: random.Random) -> str:
    """One tensor of another format, shape or name, or none."""
    tensors = {name: values.clone() for name, values in TensorFile(path).items()}
    name = draw.choice(sorted(tensors))
    values = tensors.pop(name)
    kinds: dict[str, dict[str, torch.Tensor]] = {
        "missing": {},
        "int8": {name: values.to(torch.int8)},
        "int64": {name: values.to(torch.int64)},
        "bool": {name: values.to(torch.bool)},
        "float8": {name: values.to(torch.float8_e4m3fn)},
        "float64 beyond": {name: values.double() * 1e300},
        "bfloat16": {name: values.bfloat16()},
        "transposed": {name: values.T.contiguous()},
        "of one axis": {name: values.flatten()},
        "of three axes": {name: values[None]},
        "empty": {name: values[:0]},
        "of another rank": {name: values.repeat(2, 1)},
        "NaN": {name: torch.full_like(values, float("nan"))},
        "large": {name: torch.full_like(values, 6e4)},
        "of layer 99": {name.replace("layers.0", "layers.99"): values},
        "with a further name": {name: values, name.replace("lora_", "lora_magnitude_"): values},
        "of DoRA": {name: values, "base_model.model.lm_head.weight": values},
    }
    kind = draw.choice(list(kinds))
    path.unlink()
    made = tensors | kinds[kind]
    write_tensors(path, made, made.__getitem__)
    return f"{name} {kind}"


def adapters(made: Path, here: Path, draw: random.Random) -> Mutation:
    folder = here / "adapter"
    shutil.copytree(made / "adapter", folder)
    kind = draw.randrange(4)
    config = folder / CONFIG_FILE
    if kind == 0:
        what = other_tensors(folder / WEIGHTS_FILE, draw)
    elif kind == 1:
        what = hurt(folder / WEIGHTS_FILE, draw, mutated_tensors)
    elif kind == 2:
        further = {
            draw.choice(["use_dora", "unknown", "lora_bias", "layer_replication", "rank_pattern"]):
            draw.choice([True, 1, "x", {"q_proj": 2}, [[0, 1]], {"": 1}, {"(": 1}, float("nan")]),
        }  # fmt: skip
        config.write_text(json.dumps(json.loads(config.read_text()) | further))
        what = f"with {further}"
    else:
        what = hurt(config, draw, mutated_object)

    def read() -> None:
        base = load_model(made / "base", "fp32", trainable=False)
        load_adapters(base, PrecisionConfig(preset="fp32"), {"a": folder})

    return what, draw.choice([read, lambda: generated(folder)])


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "a"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How warm is it?", "weight": 0},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 1},
    {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "weather"},
    {"role": "assistant", "content": "Mild.", "trainable": True, "reasoning_content": "12 is."},
    {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    {"role": "assistant", "content": "Well.", "loss_mask": False},
]
ROW: dict[str, Any] = {
    "prompt": TALK[:2],
    "completion": TALK[4:5],
    "messages": TALK,
    "chosen": "Mild.",
    "rejected": [{"role": "assistant", "content": "Hot."}],
    "tools": TOOLS,
}
PLAIN = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}


def make_datasets(made: Path) -> None:
    make_models(made)
    for family in ("smollm3", "qwen2_5", "llama3_1"):
        shutil.copytree(made / "one", made / family)
        shutil.copyfile(TEMPLATES / f"{family}.jinja", made / family / "chat_template.jinja")
    (made / "starter" / "chat_template.jinja").unlink()


@cache
def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(folder)


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    """With what CSV can hold: text."""
    return {name: one if isinstance(one, str) else json.dumps(one) for name, one in row.items()}


def _written(path: Path, rows: list[dict[str, Any]]) -> None:
    match path.name.partition(".")[2]:
        case "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case "jsonl.gz":
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        case "json":
            path.write_text(json.dumps(rows))
        case "csv":
            names = list(dict.fromkeys(name for row in rows for name in row))
            lines = [
                [*map(str, names)],
                *([_nested(row).get(one, "") for one in names] for row in rows),
            ]
            quoted = [
                ",".join('"' + one.replace('"', '""') + '"' for one in line) for line in lines
            ]
            path.write_text("\n".join(quoted), encoding="utf-8", errors="surrogatepass")
        case _:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def datasets(made: Path, here: Path, draw: random.Random) -> Mutation:
    ending = draw.choice(["jsonl", "jsonl", "jsonl.gz", "json", "csv", "parquet"])
    path = here / f"rows.{ending}"
    family = draw.choice(["one", "smollm3", "qwen2_5", "llama3_1", "starter"])
    row = PLAIN if family == "starter" else draw.choice([ROW, ROW, ROW, PLAIN])
    if family == "smollm3" and row is ROW:  # whose template reads it
        row = row | {"chat_template_kwargs": {"enable_thinking": False}}
    if ending == "parquet" and row is not PLAIN:  # whose column has one type
        row = row | {"messages": TALK[:5], "rejected": ROW["completion"], "chosen": TALK[6:]}
    what = ""
    if draw.random() < 0.6:
        # Arrow reads 100 levels, and writing n takes memory that grows as n^3: 3 GiB at 960.
        deepest = 200 if ending == "parquet" else 960
        deep = draw.random() < 0.15
        other = with_depth(row, draw, deepest) if deep else mutated_json(row, draw)
        for _ in range(draw.randrange(3)):
            other = mutated_json(other, draw)
        try:
            _written(path, [other])
            what = f"{path.name}: {json.dumps(other)[:3000]}"
        except (pyarrow.ArrowException, ValueError, TypeError, AttributeError, OverflowError):
            what = ""  # that no such file holds
    if not what:
        _written(path, [row, row])
        change = mutated_object if ending == "jsonl" else mutated_bytes
        if ending == "jsonl":
            _written(path, [row])
        what = hurt(path, draw, change)
    kind = draw.choice(["prompts", "prompts", "examples", "turns", "pairs"])
    return f"{kind} of {family}: {what}", lambda: used(path, made / family, kind, ending)


def used(path: Path, folder: Path, kind: str, ending: str) -> object:
    tokenizer, noticed = tokenizer_of(folder), Noticed()
    source: dict[str, Any] = {"type": ending.partition(".")[0], "path": str(path)}
    source["type"] = "jsonl" if source["type"] == "json" else source["type"]
    if kind == "prompts":
        config = DataConfig.model_validate({"train": source, "max_prompt_tokens": CONTEXT})
        made: Any = build_prompts(
            "train", config.train, tokenizer, config, CONTEXT, noticed=noticed
        )
    else:
        if kind == "turns":
            source["messages"] = "messages"
        config = SftDataConfig.model_validate({"train": source, "max_tokens": CONTEXT})
        if kind == "pairs":
            made = build_pairs("train", config.train, tokenizer, config, CONTEXT, noticed=noticed)
        else:
            made = build_examples(
                "train", config.train, tokenizer, [1], config, CONTEXT, noticed=noticed
            )
    return made, noticed.lines("train")


HOSTILE = (
    *HUGE,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ self }}", "{{ self.x() }}", "{% include '/etc/passwd' %}", "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}", "{{ messages[0].__init__.__globals__ }}",
    "{{ raise_exception('x') }}", "{{ raise_exception() }}", "{{ raise_exception(messages) }}",
    "{% set messages = 1 %}", "{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ '%c' % 1114112 }}", "{{ 1 << 9 }}",
    "{{ 10 ** 10 ** 10 }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "1+" * 3000 + "1 }}", "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "{{ [" * 500, "{{ 'a'" + "~'a'" * 3000 + " }}",
    "{{ '\\ud800' }}", "{{ '\\x00' }}", "{{ x.y.z }}", "{{ x|tojson }}", "{{ messages|tojson }}",
    "{{ messages|sort }}", "{{ messages|map(attribute='a.b.c')|list }}", "{{ messages|sum }}",
    "{{ messages|groupby('role') }}", "{{ (1, 'a')|sort }}", "{{ 'a'|int('b') }}",
    "{{ strftime_now('%Q' * 100) }}", "{{ strftime_now(1) }}", "{{ strftime_now('\\ud800') }}",
    "{{ cycler() }}", "{{ joiner()() }}", "{{ namespace(1) }}", "{{ dict(1) }}", "{{ range('a') }}",
    "{{ range(10 ** 9) }}", "{{ range(99999)|list }}", "{% generation %}x{% endgeneration %}",
    "{% break %}", "{% for a in messages %}{% continue %}{% endfor %}", "{% set x.y = 1 %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '1' * 5000 | int }}", "{{ ('1' * 5000)|int }}", "{{ 9 * ('9' * 4000)|int }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ '{0[a]}'.format(messages) }}", "{{ '{'.format() }}",
    "{{ '%s' % () }}", "{{ '%d' % 'a' }}", "{{ undefined_function() }}", "{{ loop }}",
    "{{ caller() }}",
    "{% block a %}{{ super() }}{% endblock %}",
    "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    "{% filter upper %}x{% endfilter %}", "{% call m() %}{% endcall %}", "{% raw %}", "{#", "{{",
    "{% trans %}x{% endtrans %}", "{% debug %}", "{% do messages.clear() %}", "{{ None() }}",
    "{{ ('a' * 40000 ~ '!')|regex_replace('(a+)+$', '') }}", "{{ 1e308 * 10 }}", "{{ 1e400|int }}",
    "{{ messages|tojson(indent='a') }}", "{{ {}|tojson(indent=-1) }}",
    "{{ messages|batch(0)|list }}",
    "{{ messages|slice(0)|list }}", "{{ 'a'|truncate(-5) }}", "{{ 'a'|indent('b') }}",
    "{{ 'a'|center(-1) }}", "{{ 'a'.split('') }}", "{{ ''.join(messages) }}", "{{ 1|round(99) }}",
    "{{ 1|round(1, 'x') }}", "{{ messages|random }}", "{{ x is divisibleby 0 }}",
    "{{ 1 is divisibleby 0 }}",
    "{{ 1 in 1 }}", "{{ messages[10 ** 3] }}", "{{ messages['a':'b'] }}", "{{ messages[::0] }}",
    "{{ -messages }}", "{{ not messages }}", "{{ 'a' < 1 }}", "{{ messages.items.x }}",
    "{{ 'x'.encode().decode() }}", "{{ messages.__len__() }}", "{{ (messages|first).keys() }}",
)  # fmt: skip
_CUTS = ("{%", "%}", "{{", "}}", "|", ".", "(", ")", "'", " ", "\n", "[", "]", "-")


def mutated_template(text: str, draw: random.Random) -> str:
    """A line gone or elsewhere, characters changed, or a hostile operation put in."""
    for _ in range(draw.randint(1, 2)):
        kind = draw.randrange(6)
        if kind < 3:
            lines = text.splitlines(keepends=True)
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(HOSTILE))
            text = "".join(lines)
        elif kind == 3:
            lines = text.splitlines(keepends=True)
            gone = lines.pop(draw.randrange(len(lines))) if lines else ""
            if lines and draw.random() < 0.5:
                lines.insert(draw.randrange(len(lines)), gone)
            text = "".join(lines)
        elif kind == 4:
            one, other = draw.choice(_CUTS), draw.choice([*_CUTS, ""])
            text = text.replace(one, other, draw.randint(1, 3))
        else:
            names = ["messages", "message", "content", "role", "loop", "tools", "tool_calls"]
            text = text.replace(draw.choice(names), draw.choice([*names, "ns", "none", "1"]), 1)
    return text


def templates(made: Path, here: Path, draw: random.Random) -> Mutation:
    folder = here / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(starter_folder() / name, folder / name)
    before = draw.choice(sorted(TEMPLATES.glob("*.jinja"))).read_text()
    text = mutated_template(draw.choice([before, before, CHAT]), draw)
    kind = draw.randrange(5)
    config = folder / "tokenizer_config.json"
    if kind == 0:
        file = folder / "chat_template.jinja"
        file.write_text(text)
        what = hurt(file, draw, mutated_bytes)
    elif kind == 1:
        named = draw.choice([
            [{"name": "default", "template": text}, {"name": "tool_use", "template": CHAT}],
            {"default": text}, [{"name": 1, "template": text}], [{"template": text}], [text], 7,
            [{"name": "default", "template": 7}], [{"name": "tool_use", "template": text}], True,
        ])  # fmt: skip
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
        what = f"named {named!r}"
    else:
        (folder / "chat_template.jinja").write_text(text)
        what = text
    talk = draw.choice([TALK, TALK[:2], TALK[:5], "1+1="])
    tools = draw.choice([None, TOOLS])
    return what, lambda: talked(folder, talk, tools)


def talked(folder: Path, talk: Any, tools: Any) -> None:
    """All that reads a chat template, of which each may refuse it, and the prompt at last."""
    tokenizer, chat = load_tokenizer(folder), ChatConfig()

    def continued() -> None:
        form = tool_format(tokenizer, chat)
        stops = stop_token_ids(tokenizer, folder)
        made = Continuation(tokenizer, chat, form, TOOLS, stops)
        made.token_ids(["1"], stops[0], ["2"])

    row = row_of(talk, {}, "row 0", tools=tools)
    config = SftDataConfig.model_validate({"train": {"type": "jsonl", "path": "unread"}})
    turn = row_of(TALK[:2], {}, "row 0", tools=tools)
    readings: list[Reading] = [
        lambda: build_examples("train", [(turn, "a")], tokenizer, [1], config, CONTEXT),
        lambda: build_pairs("train", [(turn, "a", "b")], tokenizer, config, CONTEXT),
        lambda: reads_clock(folder),
        continued,
    ]
    for read in readings:
        with suppress(IsobitError):
            read()
    end_of_turn(tokenizer)
    prompts_of_rows("train", [row], tokenizer, chat, noticed=Noticed())


SUBJECTS: dict[
    str, tuple[Callable[[Path], object], Callable[[Path, Path, random.Random], Mutation]]
]
SUBJECTS = {
    "model folders": (make_models, models),
    "adapters": (make_adapters, adapters),
    "datasets": (make_datasets, datasets),
    "chat templates": (lambda made: None, templates),
}


def try_all(subject: str, place: Path, seed: str, first: int, count: int) -> int:
    """Try the mutations from ``first`` on, in a process of their own, and write down each."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    make, mutate = SUBJECTS[subject]
    made, here = place / "made", place / "here"
    if not made.exists():
        made.mkdir()
        make(made)
    with (place / "tried.jsonl").open("a") as log:
        for number in range(first, count):
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir()
            what, read = mutate(made, here, random.Random(f"{seed} {subject} {number}"))
            print(json.dumps({"number": number, "what": what}), file=log, flush=True)
            print(f"mutation {number} of {subject}", flush=True)
            faulthandler.dump_traceback_later(LONGEST - 5)
            signal.alarm(LONGEST)  # ends the process, whatever it does
            kind, text = outcome(read)
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"number": number, "kind": kind, "text": text}), file=log, flush=True)
    return 0


def outcome(read: Reading) -> tuple[str, str]:
    try:
        read()
    except IsobitError as error:
        text = str(error)
        said = text.replace("\n", "").isprintable() and 8 < len(text) < LONGEST_MESSAGE
        return ("refused" if said else "said badly"), text
    except BaseException:
        return "traceback", traceback.format_exc()
    return "accepted", ""


def tried(subject: str, place: Path, count: int) -> tuple[Counter[str], list[str]]:
    """What became of the mutations, and each that broke something."""
    log, found, broken = place / "tried.jsonl", Counter[str](), list[str]()
    first = 0
    while first < count:
        process = called(f"{__name__}:try_all", place / "said", subject, place, SEED, first, count)
        process.join()
        assert log.exists(), (place / "said").read_text()
        records = [json.loads(line) for line in log.read_text().splitlines()]
        last = records[-1]
        if "kind" not in last:
            kind = "hang" if process.exitcode == -signal.SIGALRM else f"ended {process.exitcode}"
            record = {"number": last["number"], "kind": kind, "text": (place / "said").read_text()}
            with log.open("a") as more:
                print(json.dumps(record), file=more)
        elif process.exitcode:
            said = (place / "said").read_text()
            raise AssertionError(f"behind {last['number']} of {subject}, seed {SEED}: {said}")
        first = last["number"] + 1
    whats: dict[int, str] = {}
    for record in map(json.loads, log.read_text().splitlines()):
        number = record["number"]
        if "what" in record:
            whats[number] = record["what"]
            continue
        found[record["kind"]] += 1
        if record["kind"] not in ("refused", "accepted"):
            shown = f"{subject} {number} of seed {SEED}: {record['kind']}: {whats[number]}"
            broken.append(f"{shown}\n{record['text'][-3000:]}")
    return found, broken


@pytest.mark.few(1)
@pytest.mark.timeout(COUNT * LONGEST)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_mutated_is_used_or_refused_with_a_sentence(subject: str, tmp_path: Path) -> None:
    count = COUNT // len(SUBJECTS)
    found, broken = tried(subject, tmp_path, count)
    outcomes = ", ".join(f"{number} {kind}" for kind, number in sorted(found.items()))
    print(f"\nmutations of {subject}, seed {SEED}: {count}; {outcomes}")
    assert not broken, "\n\n".join(broken)
    assert found.total() == count
    if count >= 75:  # a reading that refuses everything would show nothing
        assert count // 20 < found["accepted"] < count - count // 4
