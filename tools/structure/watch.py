"""Looks at the calls of one tree while a run goes on, and counts the files that things pass
through: what ``tools.structure.trace`` reports.
"""

import gc
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from inspect import CO_OPTIMIZED, CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

TOKENS = re.compile(r"(?<!stop_)(?<!stop)(token|log_?prob)")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
MATRIX = 128
WEIGHT_DEPTH, LOOK_AT = 2, 4
SPANS = {
    "checkpoint_files": re.compile(r"store/.*:\w*Keeper\._save$"),
    "log_files": re.compile(r"run/.*:(RlLog|Log)\.step$"),
    "reward_files": re.compile(r"run/.*:(RecordedGrading\.__call__|grade)$"),
}
"""Figure -> ``path:function`` of the functions whose calls are the span."""
CONFIGURATION = "isobit.config."
RUN = re.compile(r"run/loop\.py:train$")
"""``path:function`` that is given the configuration of a run."""


class Watch:
    """Looks at the calls of one tree; files are in the order of their first call."""

    def __init__(self, tree: Path, layers: Sequence[Sequence[str]] = ()) -> None:
        """``layers`` are the packages, the uppermost first."""
        import torch

        self._tensor, self._parameter = torch.Tensor, torch.nn.Parameter
        self._root = f"{tree}{os.sep}"
        self._stacks = threading.local()
        self._layers = {package: -at for at, names in enumerate(layers) for package in names}
        self._earlier = self._parameters_alive()
        self._masters: list[Any] = []
        self._kinds: dict[type, bool] = {}
        self.token_files: dict[str, str] = {}
        self.hand_overs: dict[str, str] = {}
        self.containers: dict[str, str] = {}
        self.weight_files: dict[str, str] = {}
        self.config_files: dict[str, str] = {}
        self.climbs: list[str] = []
        self._config_file = ""
        self._run_has_begun = False
        self.span_files: dict[str, dict[str, str]] = {name: {} for name in SPANS}
        self._spans_of: dict[CodeType, list[str]] = {}
        self.gradients_are_there = False
        self.gemm_was_reached = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Look at an event of ``sys.setprofile``."""
        code = frame.f_code
        if not code.co_filename.startswith(self._root):
            return
        if not code.co_flags & CO_OPTIMIZED or code.co_name in COMPREHENSIONS:
            return
        file = code.co_filename.removeprefix(self._root)
        if file.startswith("training"):
            self._look_at_gradients()
        if event in ("call", "return"):
            self._follow_spans(code, file, is_call=event == "call")
        if event == "call":
            self._look(frame, file, given := _given(frame))
            self._follow_configuration(code, file, given)
        elif event == "return":
            self._look(frame, file, [value])
            self._inside().discard(id(frame))

    def _follow_spans(self, code: CodeType, file: str, is_call: bool) -> None:
        """Count ``file`` for the spans that this thread is in."""
        if not hasattr(self._stacks, "spans"):
            self._stacks.spans = []
        if code not in self._spans_of:
            name = f"{file}:{code.co_qualname}"
            self._spans_of[code] = [span for span, begins in SPANS.items() if begins.search(name)]
        mine, doing = self._spans_of[code], self._stacks.spans
        if is_call:
            doing.extend(mine)
            for span in doing:
                self.span_files[span].setdefault(file, code.co_qualname)
        elif mine:
            del doing[-len(mine) :]

    def _follow_configuration(self, code: CodeType, file: str, given: Sequence[Any]) -> None:
        """Count ``file`` where it is given the configuration before a weight is loaded."""
        if not self._run_has_begun:
            self._run_has_begun = RUN.search(f"{file}:{code.co_qualname}") is not None
        if not self._run_has_begun or self.weight_files:
            return
        if any(type(value).__module__.startswith(CONFIGURATION) for value in given):
            before, self._config_file = self._config_file, file
            if before and self._layer(file) > self._layer(before):
                self.climbs.append(f"{before} -> {file}:{code.co_qualname}")
            self.config_files.setdefault(file, code.co_qualname)

    def _layer(self, file: str) -> int:
        return self._layers.get(file.split("/", maxsplit=1)[0].removesuffix(".py"), 0)

    def _inside(self) -> set[int]:
        """The frames of this thread that hold a container."""
        if not hasattr(self._stacks, "frames"):
            self._stacks.frames = set()
        return self._stacks.frames

    def _look(self, frame: FrameType, file: str, values: Sequence[Any]) -> None:
        name = frame.f_code.co_qualname
        if not self.gradients_are_there:
            inside = self._inside()
            if any(self._is_container(value) for value in values):
                inside.add(id(frame))
                self.hand_overs.setdefault(file, name)
                self.token_files.setdefault(file, name)
            elif inside and any(self._is_per_token(value) for value in values):
                self.token_files.setdefault(file, name)
        if not self.gemm_was_reached and any(self._holds_matrix(value) for value in values):
            self.weight_files.setdefault(file, name)
            if "gemm" in name:
                self.gemm_was_reached = True
                self._look_up_the_stack(frame.f_back)

    def _look_up_the_stack(self, frame: FrameType | None) -> None:
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self._root) and any(
                self._holds_matrix(value, any_object=True) for value in _given(frame)
            ):
                self.weight_files.setdefault(name.removeprefix(self._root), frame.f_code.co_name)
            frame = frame.f_back

    def _is_container(self, value: Any, depth: int = 0) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._is_container(one, depth) for one in value[:LOOK_AT])
        if depth > 2 or not self._is_of_the_tree(value):
            return False
        attributes = _attributes(value)
        found = any(
            name[0] != "_" and TOKENS.search(name) is not None
            for name, held in attributes
            if isinstance(held, self._tensor) or _are_numbers(held)
        )
        if is_dataclass(value) and not any(self._is_a_part(held) for _, held in attributes):
            found = any(self._is_container(held, depth + 1) for _, held in attributes) or found
        if found:
            self.containers.setdefault(type(value).__name__, type(value).__module__)
        return found

    def _is_a_part(self, value: Any) -> bool:
        is_record = is_dataclass(value) or isinstance(value, self._tensor)
        return not is_record and (callable(value) or self._is_of_the_tree(value))

    def _is_per_token(self, value: Any, depth: int = 0) -> bool:
        if isinstance(value, self._tensor):
            return not isinstance(value, self._parameter)
        if _are_numbers(value):
            return True
        if isinstance(value, (list, tuple)):
            return any(self._is_per_token(one, depth) for one in value[:LOOK_AT])
        if depth < 2 and is_dataclass(value) and self._is_of_the_tree(value):
            return any(self._is_per_token(held, depth + 1) for _, held in _attributes(value))
        return False

    def _holds_matrix(self, value: Any, depth: int = 0, any_object: bool = False) -> bool:
        if isinstance(value, self._tensor):
            return value.ndim == 2 and min(value.shape) >= MATRIX
        if isinstance(value, Mapping):
            try:
                value = list(value.values())
            except AttributeError:  # its constructor has only been called
                return False
        if isinstance(value, (list, tuple)):
            return any(self._holds_matrix(one, depth, any_object) for one in value[:LOOK_AT])
        if depth < WEIGHT_DEPTH and self._is_of_the_tree(value):
            return (any_object or is_dataclass(value)) and any(
                self._holds_matrix(held, depth + 1, any_object) for _, held in _attributes(value)
            )
        return False

    def _is_of_the_tree(self, value: Any) -> bool:
        kind = type(value)
        if kind not in self._kinds:
            module = sys.modules.get(kind.__module__)
            file = getattr(module, "__file__", None) or ""
            self._kinds[kind] = file.startswith(self._root)
        return self._kinds[kind]

    def _parameters_alive(self) -> list[Any]:
        return [one for one in gc.get_objects() if type(one) is self._parameter]

    def _look_at_gradients(self) -> None:
        if self.gradients_are_there:
            return
        if not self._masters:
            earlier = set(map(id, self._earlier))
            self._masters = [one for one in self._parameters_alive() if id(one) not in earlier]
        self.gradients_are_there = bool(self._masters) and all(
            master.grad is not None and bool(master.grad.any()) for master in self._masters
        )


def _given(frame: FrameType) -> list[Any]:
    """The arguments of a call."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return [values[name] for name in code.co_varnames[:count] if name in values]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(value, "__dict__", {})
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _are_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.size > 0
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(one, (int, float)) for one in value[:LOOK_AT])
    )
