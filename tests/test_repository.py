"""Rules for every committed file of the template, and for the workflows."""

import re
import sys
from pathlib import Path

import pytest

from tools import FOLDER, ROOT, run, tracked_files

# Broken up, so that this file does not hold what it looks for.
HOSTS = re.compile(r"pyp[i]\.org|pythonh[o]sted|npmj[s]\.|deb\.debia[n]|download\.pytorc[h]")
ACTION = re.compile(r"uses:\s*(\S+)(.*)")
WORKFLOWS = sorted(
    ROOT / name
    for name in tracked_files(ROOT)
    if name.parent.name == "workflows" and name.suffix in (".yml", ".yaml")
)


@pytest.fixture(scope="module")
def texts() -> dict[Path, bytes]:
    return {name: (ROOT / name).read_bytes() for name in tracked_files(ROOT)}


def test_no_registry_host(texts: dict[Path, bytes]) -> None:
    """A lock or a script that names one would not work behind a company's own index."""
    found = {name for name, text in texts.items() if HOSTS.search(text.decode("utf-8", "replace"))}
    assert not found


def test_locks_hold_no_address(texts: dict[Path, bytes]) -> None:
    locks = {name: text for name, text in texts.items() if name.suffix == ".lock"}
    assert len(locks) == 4, "requirements, a project's two, what some of its tests need"
    assert not [name for name, text in locks.items() if b"://" in text or b"--index" in text]


def test_line_feeds(texts: dict[Path, bytes]) -> None:
    """Carriage returns break scripts on Linux (L5)."""
    assert not [name for name, text in texts.items() if b"\0" not in text and b"\r\n" in text]
    attributes = run("git", "check-attr", "--all", ".ci/run", "Makefile", f"{FOLDER}/Makefile")
    assert attributes.count("eol: lf") == 3


def test_files_are_short(texts: dict[Path, bytes]) -> None:
    long = {name: text.count(b"\n") for name, text in texts.items() if name.suffix == ".py"}
    assert not {name: lines for name, lines in long.items() if lines > 300}


def test_workflows_follow_the_schema() -> None:
    assert WORKFLOWS
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema")
    run(*command, "vendor.github-workflows", *WORKFLOWS)


def test_workflows_are_safe() -> None:
    """Pinned actions, least permissions, no injection: zizmor's own rules, without the network."""
    zizmor = Path(sys.executable).with_name("zizmor")
    run(zizmor, "--offline", "--no-progress", "--persona", "pedantic", *WORKFLOWS)


def test_actions_are_pinned() -> None:
    for workflow in WORKFLOWS:
        for action, comment in ACTION.findall(workflow.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{workflow}: {action}"
            assert re.match(r" # v\d", comment), f"{workflow}: {action} says no version"
