"""What differs between two manifests, weighed by what it can do to the numbers."""

from dataclasses import dataclass
from typing import Any

from ..run.manifest import data_changes, whole_attempts

WEIGHTS = ("heavy", "medium", "light")

# where in a manifest: (weight, what it is called, why it matters)
_FACTS = {
    "device.kind": ("heavy", "device", "other kernels"),
    "device.name": ("heavy", "device name", "other kernels"),
    "world_size": ("heavy", "devices used", "sums run in another order"),
    "python": ("medium", "python", "its own library is the default text data"),
    "cuda": ("medium", "cuda", "other kernels"),
    "cudnn": ("medium", "cudnn", "other kernels"),
    "driver": ("medium", "driver", "seldom changes numbers"),
    "cpu.name": ("medium", "cpu", "other instructions round otherwise"),
    "cpu.instructions": ("medium", "cpu instructions", "other instructions round otherwise"),
    "cpu.threads": ("medium", "cpu threads", "sums run in another order"),
    "image.digest": ("medium", "image", "system libraries"),
    "image.nvidia_build": ("medium", "NVIDIA image", "system libraries"),
    "os": ("light", "os", "changes no numbers by itself"),
    "host": ("light", "host", "changes no numbers by itself"),
}
_HEAVY_PACKAGES = ("torch", "lightning", "numpy", "timm", "torchvision", "torchao", "triton")
# Choices that decide numbers; the others decide speed.
_CHOICES = ("precision", "strategy", "batch", "memory_format", "compile", "loader", "length")


@dataclass(frozen=True)
class Difference:
    """One thing that was otherwise then. `weight` is one of WEIGHTS."""

    weight: str
    what: str
    there: str
    here: str
    why: str

    def __str__(self) -> str:
        return f"{self.weight + ':':<15} {self.what}: {self.there} -> {self.here} ({self.why})"


def machine_differences(there: dict[str, Any], here: dict[str, Any]) -> list[Difference]:
    """Hardware and software that differ. `here` may leave keys out; those are not compared."""
    found = []
    for path, (weight, what, why) in _FACTS.items():
        old, new = _at(there, path), _at(here, path)
        if old != new and path.split(".")[0] in here:
            found.append(Difference(weight, what, _word(old), _word(new), why))
    return by_weight([*found, *_packages(there.get("packages", {}), here["packages"])])


def run_differences(there: dict[str, Any], here: dict[str, Any]) -> list[Difference]:
    """What is known only once the run has begun again: data, choices, variables."""
    found = []
    data = [manifest.get("data", {}).get("splits", {}) for manifest in (there, here)]
    if data[0] and data[0] != data[1]:
        words = "; ".join(data_changes(*data))
        found.append(Difference("heavy", "data", "as recorded", words, "other samples"))
    for name in _CHOICES:
        old, new = (m["choices"].get(name, {}).get("value") for m in (there, here))
        if old != new:
            found.append(Difference("heavy", name, _word(old), _word(new), "other arithmetic"))
    old, new = there["environment"], here["environment"]
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    for name in names:
        why = "may change kernels or placement"
        found.append(Difference("light", name, _word(old.get(name)), _word(new.get(name)), why))
    return by_weight(found)


def attempt_differences(manifest: dict[str, Any]) -> list[Difference]:
    """What changed between a run's own attempts: one go cannot bring all of it back."""
    attempts, found = whole_attempts(manifest), []
    for before, after in zip(attempts, attempts[1:]):
        changed = machine_differences(before, after)
        where = f"attempt from step {after['from_step']}"
        found += [Difference(d.weight, f"{where}, {d.what}", d.there, d.here, "in the run itself")
                  for d in changed if d.weight == "heavy"]  # fmt: skip
        pairs = {
            "code": ([a["code"] for a in (before, after)], "the last attempt's is taken"),
            "length": (
                [a["choices"].get("length", {}).get("value") for a in (before, after)],
                "the learning rate followed another schedule before",
            ),
        }
        for name, ((old, new), why) in pairs.items():
            if old != new:
                found.append(Difference("heavy", f"{where}, {name}", _word(old), _word(new), why))
    return found


def by_weight(found: list[Difference]) -> list[Difference]:
    return sorted(found, key=lambda difference: WEIGHTS.index(difference.weight))


def _packages(there: dict[str, str], here: dict[str, str]) -> list[Difference]:
    """Each package that computes on a line of its own, all others on one."""
    changed = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    found = [
        Difference("heavy", n, _word(there.get(n)), _word(here.get(n)), "kernels, random numbers")
        for n in changed
        if n in _HEAVY_PACKAGES
    ]
    others = [name for name in changed if name not in _HEAVY_PACKAGES]
    if others:
        more = ", ..." if len(others) > 5 else ""
        old, new = (
            ", ".join(f"{name} {_word(side.get(name))}" for name in others[:5]) + more
            for side in (there, here)
        )
        what = f"{len(others)} other package{'s' * (len(others) > 1)}"
        found.append(Difference("medium", what, old, new, "seldom changes numbers"))
    return found


def _at(manifest: dict[str, Any], path: str) -> Any:
    node: Any = manifest
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _word(value: Any) -> str:
    return "none" if value is None else str(value)
