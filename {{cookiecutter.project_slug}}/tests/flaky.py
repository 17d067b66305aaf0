"""An object store in memory that fails on request, and what lies in it."""

import json
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

RUNS = "flaky://bucket/runs"
RUN = f"{RUNS}/vision/run"


class Flaky(MemoryFileSystem):
    """An object store in memory.

    Attributes:
        fault: raised by everything that would go over the network.
    """

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fault: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("flaky://")))


def faulty(name: str) -> Any:
    def method(self: Flaky, *words: Any, **options: Any) -> Any:
        if Flaky.fault is not None:
            raise Flaky.fault
        return getattr(MemoryFileSystem, name)(self, *words, **options)

    return method


for name in ("put_file", "pipe_file", "cat_file", "get_file", "ls", "info", "find", "rm"):
    setattr(Flaky, name, faulty(name))


def stored(run: str = RUN) -> set[str]:
    start = run.removeprefix("flaky:/") + "/"
    return {name.removeprefix(start) for name in Flaky.store if name.startswith(start)}


def stored_json(name: str, run: str = RUN) -> dict[str, Any]:
    found = Flaky.store[f"{run.removeprefix('flaky:/')}/{name}"]
    content: dict[str, Any] = json.loads(found.getvalue())
    return content
