"""A server of openenv-core, with its own classes: ``python real_openenv.py echo|tools PORT``."""

# pyright: reportMissingImports=false
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class EchoAction(Action):
    """Say something."""

    message: str


class EchoObservation(Observation):
    echoed: str = ""


class Echo(Environment):
    """Ends with "bye"."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        return EchoObservation(echoed=f"seed {seed}")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if action.message == "raise":
            raise ValueError("no")
        said = action.message
        return EchoObservation(echoed=said, reward=len(said), done=said == "bye")

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("two tools")

        @server.tool
        def add(a: int, b: int = 0) -> int:
            return a + b

        @server.tool
        def greet(name: str) -> str:
            return f"Hello, {name}!"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        return Observation(reward=0.0)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        return Observation()

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        app = create_app(Echo, EchoAction, EchoObservation)
    else:
        app = create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]))
