"""Harmful rewards in a pool: the other completions are graded all the same."""

import fcntl
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import pool
from isobit.rewards.grading import Graders
from isobit.rewards.tally import GradeStats
from isobit.util.errors import RewardError

HANG_S = 60.0
"""What a test waits for that should come at once; a slow machine is no failure."""
MakeGraders = Callable[..., Graders]
Grade = Callable[..., tuple[list[float | None], GradeStats]]


def group(*texts: str, **row: Any) -> Group:
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), t, "stop") for t in texts]
    return Group(Prompt("train/0", "", (1,), row), 0, completions)


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def make_graders(tmp_path: Path) -> Iterator[MakeGraders]:
    """Graders of a reward with this body, in which ``text`` is the completion's."""
    made: list[Graders] = []

    def make(body: str, head: str = "", **config: Any) -> Graders:
        path = tmp_path / f"reward{len(made)}.py"
        lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        path.write_text(
            f"import os, signal, sys, threading, time\nfrom pathlib import Path\n{head}\n"
            "def reward(prompt, completion):\n    text = completion.text\n"
            f"{lines}\n    return float(len(text))\n",
            encoding="utf-8",
        )
        config = {"workers": 1, "max_failed_fraction": 1.0, **config}
        made.append(Graders(RewardConfig(function=f"{path}:reward", **config)))
        return made[-1]

    yield make
    for graders in made:
        graders.close()


@pytest.fixture
def grade(make_graders: MakeGraders) -> Grade:
    """The rewards of texts by such a reward."""

    def graded(body: str, *texts: str, **config: Any) -> tuple[list[float | None], GradeStats]:
        one = group(*texts)
        stats = make_graders(body, **config).collect([one])
        return one.rewards, stats

    return graded


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        ("time.sleep(3600)", "deadline", r"took longer than reward.deadline_s = 0\.5 allows"),
        ("any(iter(int, 1))", "deadline", "took longer"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)", "deadline", "took"),
        ("10 ** 10 ** 9", "deadline", "took longer"),
        ("os._exit(0)", "crash", "its process ended with exit code 0"),
        ("print('so', flush=True); os._exit(7)", "crash", "code 7; the last it printed was 'so'"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV; .* 'Fatal Python error: Segm"),
        ("os.killpg(0, signal.SIGKILL)", "crash", "killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(3600)", "crash", "killed by SIGKILL"),
        ("os.closerange(3, 10000)", "crash", "its process ended with exit code 1"),
        ("sys.exit(0)", "SystemExit", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('x' * 10 ** 6)", "ValueError", "ValueError: xxx"),
        ("raise type('E' * 10 ** 5, (Exception,), {})", "E" * 100, "EEE"),
        ("raise ValueError('\\udc80')", "ValueError", r"ValueError: \\udc80"),
        ("return float('nan')", "not finite", "the reward returned nan"),
        ("return '1.0'", "not a number", "the reward returned str '1.0', expected a number"),
        ('os.write(1, b\'{"item": 0, "value": 9.0}\\n\'); raise KeyError', "KeyError", "KeyError"),
    ],
)
def test_harm_fails_its_own_completion_alone(
    harm: str, kind: str, message: str, grade: Grade
) -> None:
    deadline_s = 0.5 if kind == "deadline" else 60
    texts = ("a", "bb", "!", "ccc")
    rewards, stats = grade(f"if text == '!': {harm}", *texts, deadline_s=deadline_s)
    assert rewards == [1.0, 2.0, None, 3.0]
    assert (stats.graded, stats.failed, stats.failures) == (3, 1, {kind: 1})
    assert stats.first_error is not None
    assert stats.first_error.startswith("prompt train/0, sample 2: ")
    assert re.search(message, stats.first_error)


def test_memory_is_limited_and_given_back(grade: Grade) -> None:
    body = """
        if text == '!':
            while True: kept.append(bytearray(1 << 20))
        bytearray(200 << 20)
        """
    texts = ("a", "!", "bb", "!", "ccc")
    rewards, stats = grade(body, *texts, head="kept = []", memory_mib=512, deadline_s=60)
    assert rewards == [1.0, None, 2.0, None, 3.0]
    assert stats.failures == {"MemoryError": 2}


def test_what_is_mapped_and_not_written_is_no_memory(grade: Grade, tmp_path: Path) -> None:
    """A CUDA build of torch maps its libraries and reserves addresses like this."""
    (tmp_path / "library").touch()
    os.truncate(tmp_path / "library", 8 << 30)
    head = f"""
import mmap, numpy
with open({str(tmp_path / "library")!r}, "rb") as file:
    library = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
reserved = mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
"""
    body = "if text == '!': numpy.ones(600 << 20, numpy.uint8)"
    rewards, stats = grade(body, "a", "!", "bb", head=head, memory_mib=512, deadline_s=60)
    assert rewards == [1.0, None, 2.0]
    assert stats.failures == {"MemoryError": 1}


def test_what_a_reward_forks_and_lets_return_ends_there(grade: Grade, tmp_path: Path) -> None:
    body = f"""
        child = os.fork()
        with open({str(tmp_path / "children")!r}, "a") as file: file.write(f"{{os.getpid()}}\\n")
        if child == 0 and text == '!': raise KeyboardInterrupt
        if child: os.waitpid(child, 0)
        """
    rewards, _ = grade(body, "a", "!", "bb")
    assert rewards == [1.0, 1.0, 2.0]
    assert len((tmp_path / "children").read_text().split()) == 6, "a child graded what follows"


def test_files_opened_in_place_of_the_pipes_are_left_alone(grade: Grade, tmp_path: Path) -> None:
    body = f"""
        if text == "!":
            os.closerange(3, 99)
            for _ in range(9): kept.append(open({str(tmp_path / "thesis.tex")!r}, "a+"))
        """
    rewards, stats = grade(body, "a", "!", "bb", head="kept = []")
    assert rewards == [1.0, None, 2.0] and stats.failures == {"crash": 1}
    assert (tmp_path / "thesis.tex").read_bytes() == b""


FORGED = (
    '{"refused": "end the run"}',
    '{"ready": {"reward": 5}}',
    '{"item": true, "value": 1.0}',
    '{"item": "0", "value": 1.0}',
    '{"ended": "\\u001b[2J"}',
    '{"item": 99, "value": 1.0}',
)


def test_a_line_of_a_grader_is_only_what_it_may_be(grade: Grade) -> None:
    body = """
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, text.encode() + b"\\n")
            except OSError:
                pass
    """
    rewards, stats = grade(body, *FORGED)
    assert rewards == [float(len(text)) for text in FORGED]
    assert stats.failed == 0


def test_printing_reaches_nobody_and_holds_nobody_up(
    grade: Grade, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        "print('x' * (1 << 20)); print('y' * (1 << 20), file=sys.stderr); os.write(1, b'z' * 999)"
    )
    assert grade(body, "a", "bb")[0] == [1.0, 2.0]
    assert capfd.readouterr() == ("", "")


def test_standard_input_is_empty(grade: Grade) -> None:
    assert grade("return float(len(sys.stdin.read()))", "a")[0] == [0.0]


def test_what_a_reward_changes_in_its_process_stays_there(
    make_graders: MakeGraders, tmp_path: Path
) -> None:
    import torch

    before = os.getcwd(), torch.get_default_dtype(), os.environ.copy(), sys.getrecursionlimit()
    graders = make_graders(
        f"""
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.chdir({str(tmp_path)!r})
        os.environ.clear()
        sys.setrecursionlimit(50000)
        """,
        head="import torch",
    )
    graders.collect([group("a")])
    after = os.getcwd(), torch.get_default_dtype(), os.environ.copy(), sys.getrecursionlimit()
    assert after == before and torch.is_grad_enabled()


LEAVES_CHILDREN = """
child = os.fork()
if child == 0: time.sleep(3600)
import subprocess
apart = subprocess.Popen(["sleep", "3600"], start_new_session=True)
orphan = os.fork()
if orphan == 0:
    os.setsid()
    lost = os.fork()
    if lost: os._exit(0)
    Path(text).with_suffix(".pid").write_text(str(os.getpid()))
    Path(text).with_suffix(".pid").rename(Path(text).with_suffix(".lost"))
    time.sleep(3600)
os.waitpid(orphan, 0)
threading.Thread(target=time.sleep, args=(3600,)).start()
while not Path(text).with_suffix(".lost").exists(): time.sleep(0.01)
lost = Path(text).with_suffix(".lost").read_text()
pids = [os.getpid(), os.getppid(), child, apart.pid, int(lost)]
Path(text).with_suffix(".new").write_text(" ".join(map(str, pids)))
Path(text).with_suffix(".new").rename(text)
"""
"""A child that goes on, one in a session of its own, one that lost its parent, and a thread."""


def family(path: Path) -> list[int]:
    wait_until(path.exists)
    return [int(pid) for pid in path.read_text().split()]


def test_children_and_threads_end_with_the_pool(make_graders: MakeGraders, tmp_path: Path) -> None:
    graders = make_graders(LEAVES_CHILDREN, deadline_s=HANG_S)
    graders.collect([group(str(tmp_path / "family"))])
    pids = family(tmp_path / "family")
    assert len(pids) == 5 and all(exists(pid) for pid in pids)
    graders.close()
    wait_until(lambda: not any(exists(pid) for pid in pids))


def test_children_end_with_a_deadline(make_graders: MakeGraders, tmp_path: Path) -> None:
    graders = make_graders(LEAVES_CHILDREN + "time.sleep(3600)", deadline_s=1.0)
    graded = group(str(tmp_path / "family"))
    with pytest.raises(RewardError, match="1 of 1 rewards failed"):
        graders.collect([graded])
    if (tmp_path / "family").exists():  # a slow machine may not have come that far
        assert not any(exists(pid) for pid in family(tmp_path / "family"))


def test_signals_to_all_processes_of_a_run_are_left_to_the_trainer(
    make_graders: MakeGraders,
) -> None:
    """As Slurm and systemd send them. A child of a reward still ends by them."""
    graders = make_graders(
        """
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU):
            os.kill(os.getppid(), number)
            os.kill(os.getpid(), number)
            children = os.fork(), subprocess.Popen(["sleep", "3600"]).pid
            if children[0] == 0:
                os.write(told, b"!")  # a signal before Python is up again after a fork is lost
                time.sleep(3600)
            os.read(told_to, 1)
            for child in children: os.kill(child, number)
            ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            assert ends == [-number, -number], ends
        """,
        head="import subprocess\ntold_to, told = os.pipe()",
        deadline_s=HANG_S,
    )
    graded = group("a", "bb")
    graders.collect([graded])
    assert graded.rewards == [1.0, 2.0]


def test_a_reward_that_makes_processes_without_end_is_ended(
    make_graders: MakeGraders, tmp_path: Path
) -> None:
    graders = make_graders(
        f"""
        if os.fork() == 0:
            while True:
                Path({str(tmp_path)!r}, str(os.getpid())).touch()
                if os.fork(): os._exit(0)
        """
    )
    graders.collect([group("a")])
    wait_until(lambda: sum(name.name.isdecimal() for name in tmp_path.iterdir()) > 10)
    graders.close()
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
    wait_until(lambda: not any(exists(pid) for pid in pids))
    count = len(list(tmp_path.iterdir()))
    time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == count, "one of them goes on"


TRAINER = """
import fcntl, sys
from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders

if __name__ == "__main__":
    lock = open(sys.argv[2], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    graders = Graders(RewardConfig(function=sys.argv[1], workers=1, deadline_s=3600))
    completion = Completion(TokenSequence.of_answer((1,), (2,)), sys.argv[3], "stop")
    graders.collect([Group(Prompt("train/0", "", (1,)), 0, [completion])])
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("busy", ["time.sleep(3600)", "10 ** 10 ** 9"])
def test_all_end_with_a_trainer_that_is_killed(busy: str, tmp_path: Path) -> None:
    """Also while the interpreter is busy inside one operation; and the trainer's lock is free."""
    body = textwrap.indent(LEAVES_CHILDREN + busy, "    ")
    (tmp_path / "reward.py").write_text(
        "import os, threading, time\nfrom pathlib import Path\n"
        f"def reward(prompt, completion):\n    text = completion.text\n{body}\n"
    )
    (tmp_path / "trainer.py").write_text(TRAINER)
    arguments = [f"{tmp_path / 'reward.py'}:reward", tmp_path / "lock", tmp_path / "family"]
    trainer = subprocess.Popen([sys.executable, tmp_path / "trainer.py", *map(str, arguments)])
    try:
        pids = family(tmp_path / "family")
        assert all(exists(pid) for pid in pids)
        open_files = [os.readlink(path) for path in Path(f"/proc/{pids[0]}/fd").iterdir()]
        assert str(tmp_path / "lock") not in open_files
    finally:
        trainer.kill()
        trainer.wait()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    wait_until(lambda: not any(exists(pid) for pid in pids))


def test_rewards_come_in_order_whatever_they_take(make_graders: MakeGraders) -> None:
    graders = make_graders(
        "time.sleep(0.02 * (hash(text) % 5)); return float(text)", workers=3, deadline_s=HANG_S
    )
    groups = [group(*(str(10 * place + sample) for sample in range(4))) for place in range(6)]
    for one in reversed(groups):
        graders.submit(one)
    graders.collect(groups)
    assert [one.rewards for one in groups] == [
        [10.0 * place + sample for sample in range(4)] for place in range(6)
    ]


def test_the_rest_of_a_group_is_graded_by_others(make_graders: MakeGraders, tmp_path: Path) -> None:
    graders = make_graders(
        f"""
        with open({str(tmp_path / "asked")!r}, "a") as file: file.write(text)
        if text in "be": os._exit(1)
        """,
        workers=2,
    )
    graded = group(*"abcdef")
    graders.collect([graded])
    assert graded.rewards == [1.0, None, 1.0, 1.0, None, 1.0]
    assert sorted((tmp_path / "asked").read_text()) == list("abcdef")


def test_grading_goes_on_while_other_work_is_done(
    make_graders: MakeGraders, tmp_path: Path
) -> None:
    graders = make_graders(f"Path({str(tmp_path)!r}, text).touch()")
    graders.describe()
    graders.submit(group("early"))
    wait_until((tmp_path / "early").exists)


@pytest.mark.exhaustive
def test_a_batch_function_has_the_deadlines_of_its_completions_together(tmp_path: Path) -> None:
    path = tmp_path / "batch.py"
    path.write_text(
        "import os, time\ndef reward(completions, **columns):\n"
        "    if '!' in completions: os._exit(1)\n"
        "    if '?' in completions: time.sleep(3600)\n"
        "    time.sleep(0.6)\n    return [float(len(text)) for text in completions]\n"
    )
    config = RewardConfig(
        function=f"{path}:reward", workers=1, deadline_s=0.4, max_failed_fraction=1.0
    )
    with Graders(config) as graders:
        graded = [group(*("a",) * 100), group("a", "!", "b"), group("?", "b"), group(*("b",) * 100)]
        stats = graders.collect(graded)
    assert graded[0].rewards == graded[3].rewards == [1.0] * 100
    assert (graded[1].rewards, graded[2].rewards) == ([None] * 3, [None] * 2)
    assert stats.failures == {"crash": 3, "deadline": 2}


def test_async_functions_have_their_deadlines(tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    path.write_text(
        "import asyncio\nasync def compute_score(solution_str, ground_truth):\n"
        "    await asyncio.sleep(3600 if solution_str == '!' else 0)\n"
        "    return {'score': len(solution_str), 'acc': 1}\n"
    )
    config = RewardConfig(function=f"{path}:compute_score", workers=1, deadline_s=0.5)
    with Graders(config) as graders:
        assert "async, verl's form: solution_str, ground_truth" in graders.describe()[0]
        graded = group("!", "aa", "b", answer="22")
        stats = graders.collect([graded])
    assert graded.rewards == [None, 2.0, 1.0] and stats.failures == {"deadline": 1}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("import no_such_package", "fails on import: ModuleNotFoundError: No module named"),
        ("sys.exit(3)", "fails on import: SystemExit: 3"),
        ("raise KeyboardInterrupt", "a reward cannot be loaded: KeyboardInterrupt"),
        ("print('dying'); sys.stdout.flush(); os._exit(3)", "exit code 3; the last .* 'dying'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "cannot be loaded: .* killed by SIGKILL"),
        ("bytearray(1 << 40)", r"fails on import: MemoryError: \(reward.memory_mib is what"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_told_in_a_line(
    head: str, message: str, make_graders: MakeGraders
) -> None:
    graders = make_graders("pass", head=head, workers=2)
    with pytest.raises(RewardError, match=message) as told:
        graders.describe()
    assert "\n" not in str(told.value)


def test_a_module_that_does_not_finish_loading_is_told(
    make_graders: MakeGraders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "START_DEADLINE_S", 0.5)
    with pytest.raises(RewardError, match="did not import its rewards within"):
        make_graders("pass", head="time.sleep(3600)").describe()


def test_processes_are_not_started_without_end(
    make_graders: MakeGraders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "BARREN_ENDS", 3)
    graders = make_graders("os._exit(0)")
    with pytest.raises(RewardError, match="3 grading processes in a row ended without a single"):
        graders.collect([group(*"abcdefgh")])


@pytest.mark.exhaustive
def test_a_module_that_loads_once_alone_is_told(make_graders: MakeGraders, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    graders = make_graders(
        "os._exit(0)", head=f"if Path({seen!r}).exists(): os._exit(9)\nPath({seen!r}).touch()"
    )
    with pytest.raises(RewardError, match=r"the rewards cannot be loaded: .* exit code 9"):
        graders.collect([group("a", "b")])


def test_waiting_ends_where_the_watch_raises(make_graders: MakeGraders) -> None:
    """As a signal to the trainer does; rewards that are there already are kept for later."""

    class StopError(Exception):
        pass

    calls = iter(range(1000))

    def watch() -> None:
        if next(calls) == 3:
            raise StopError

    graded = group("a", "!")
    graders = make_graders("if text == '!': time.sleep(3600)", deadline_s=3600)
    with pytest.raises(StopError):
        graders.collect([graded], watch=watch)
    assert graded.rewards == []


def test_a_reward_error_of_the_reward_itself_ends_the_grading(make_graders: MakeGraders) -> None:
    head = "from isobit.util.errors import RewardError"
    graders = make_graders("raise RewardError('no such scorer')", head=head)
    with pytest.raises(RewardError, match="no such scorer"):
        graders.collect([group("a")])


def test_rows_hold_what_the_dataset_does(make_graders: MakeGraders) -> None:
    import datetime

    import numpy as np

    graders = make_graders(
        "return float(prompt.row['when'].year + prompt.row['numbers'].sum() + len(prompt.row['b']))"
    )
    graded = group("a", when=datetime.date(2026, 1, 1), numbers=np.arange(3), b=b"\xff" * (1 << 20))
    graders.collect([graded])
    assert graded.rewards == [2026.0 + 3 + (1 << 20)]
    with pytest.raises(RewardError, match="row of prompt train/0 cannot be handed to a grading"):
        graders.collect([group("a", column=lambda: None)])


def test_a_working_directory_has_no_say_in_what_is_imported(
    grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemError")
    monkeypatch.chdir(tmp_path)
    assert grade("pass", "a")[0] == [1.0]


def test_a_process_that_grades_is_up_soon(grade: Grade) -> None:
    body = "return float('pydantic' in sys.modules or 'asyncio' in sys.modules)"
    assert grade(body, "a")[0] == [0.0]


def test_modules_are_found_where_the_trainer_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("def f(prompt, completion): return 4.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    graded = group("a")
    with Graders(RewardConfig(function="my_rewards:f", workers=1)) as graders:
        graders.collect([graded])
    assert graded.rewards == [4.0]


def test_a_pool_that_was_closed_holds_no_process(make_graders: MakeGraders) -> None:
    graders = make_graders("return os.getppid() + os.getpid() / 2 ** 23", workers=2)
    graded = [group("a"), group("b")]
    graders.collect(graded)
    rewards = [one.rewards[0] or 0.0 for one in graded]
    pids = [pid for reward in rewards for pid in (int(reward), round(reward % 1 * 2**23))]
    assert all(exists(pid) for pid in pids)
    graders.close()
    assert not any(exists(pid) for pid in pids)
    graders.close()
