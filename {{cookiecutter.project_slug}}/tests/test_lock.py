"""The locks fit pyproject.toml. Offline: what the newest versions are does not matter here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parent.parent
# What an image brings in its own build and must keep: locks/image-keeps.txt and the numpy of locks/image-floor.txt.
OF_THE_IMAGE = {
    canonicalize_name(re.split(r"[=<>]", line)[0])
    for name in ("image-keeps.txt", "image-floor.txt")
    for line in (PROJECT / "locks" / name).read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


def entries(lock: str) -> list[tuple[Requirement, list[str]]]:
    """Each pin of a lock, with its hashes."""
    text = (PROJECT / lock).read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        pin, *options = line.split(" --hash=")
        found.append((Requirement(pin.strip()), [option.strip() for option in options]))
    return found


def dependencies() -> list[Requirement]:
    """What pyproject.toml asks for on this platform: core and dev."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [r for r in map(Requirement, wanted) if applies(r.marker)]


def applies(marker: Marker | None) -> bool:
    return marker is None or marker.evaluate()


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements.image.lock"])
def test_lock_holds_what_pyproject_asks_for(lock: str) -> None:
    pins = {canonicalize_name(pin.name): pin for pin, _ in entries(lock) if applies(pin.marker)}
    absent = OF_THE_IMAGE if "image" in lock else set()
    stale = []
    for wanted in dependencies():
        name = canonicalize_name(wanted.name)
        if name in absent:
            continue
        if name not in pins:
            stale.append(f"{wanted} is missing")
            continue
        (pinned,) = pins[name].specifier
        if not wanted.specifier.contains(pinned.version, prereleases=True):
            stale.append(f"{wanted}, but {pins[name].specifier} is pinned")
    assert not stale, (
        f"{lock} is older than pyproject.toml ({'; '.join(stale)}). Renew it: make lock"
    )


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements.image.lock"])
def test_every_pin_is_exact_and_hashed_and_names_no_address(lock: str) -> None:
    for pin, hashes in entries(lock):
        assert pin.url is None and [s.operator for s in pin.specifier] == ["=="], pin
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), pin
    assert "://" not in (PROJECT / lock).read_text(encoding="utf-8")


def test_the_image_keeps_its_own_torch() -> None:
    assert "torch" in OF_THE_IMAGE
    pins = {canonicalize_name(pin.name) for pin, _ in entries("requirements.image.lock")}
    taken = sorted(n for n in pins if n in OF_THE_IMAGE or n.startswith(("nvidia-", "cuda-")))
    assert not taken, (
        f"requirements.image.lock would replace {taken} of the image. Renew it: make lock"
    )
