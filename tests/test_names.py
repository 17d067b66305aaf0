"""Names: what a project name gives by itself, and what the lists of taken names must hold."""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_for_config

import local_extensions
from cases import DERIVED
from tools import run

Answers = dict[str, str]
# What each name is for, and the grammar that it must have there.
GRAMMARS = {
    "project_slug": r"(?=.{1,40}$)[a-z][a-z0-9]*(-[a-z0-9]+)*",
    "package_name": r"(?=.{1,40}$)[a-z][a-z0-9]*(_[a-z0-9]+)*",
    "__kubernetes_name": r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "__image_name": r"ghcr\.io/[a-z0-9]+([-_][a-z0-9]+)*/[a-z0-9]+(-[a-z0-9]+)*",
    "__slurm_job": r"[A-Za-z0-9._-]{1,64}",
    "__wandb_project": r"[^/\\#?%:]{1,128}",
}


@pytest.fixture
def ask(template: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    """The questions without the files: what cookiecutter would render with."""
    monkeypatch.syspath_prepend(str(template))
    questions = str(template / "cookiecutter.json")

    def ask(**answers: str) -> Answers:
        return dict(prompt_for_config(generate_context(questions, extra_context=answers), True))

    return ask


@pytest.mark.parametrize(("name", "expected"), DERIVED.items(), ids=[n[:20] for n in DERIVED])
def test_derived(ask: Callable[..., Answers], name: str, expected: tuple[str, str]) -> None:
    answers = ask(project_name=name)
    assert (answers["project_slug"], answers["package_name"]) == expected


def test_derived_from_anything(ask: Callable[..., Answers]) -> None:
    """Random names from all of Unicode: every derived name is valid, or the answer is refused."""
    dice = random.Random(0)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x1FFF), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF)]
    refused = 0
    for _ in range(400):
        length = dice.randint(1, 60)
        name = "".join(chr(dice.randint(*dice.choice(ranges))) for _ in range(length))
        try:
            answers = ask(project_name=name, repo_owner="Big-Team")
        except FailedHookException:
            refused += 1
            continue
        for field, grammar in GRAMMARS.items():
            assert re.fullmatch(grammar, answers[field]), (name, field, answers[field])
    assert refused < 40


def test_standard_library_is_complete() -> None:
    ours = {name for name in sys.stdlib_module_names if name.islower() and name[0] != "_"}
    assert ours <= local_extensions.STANDARD_LIBRARY


# Generated projects themselves are installed from a folder, which leaves such a file; after a wheel
# was built of one, its source tree tells of it a second time, without.
ENVIRONMENT = """
import importlib.metadata, json
found = list(importlib.metadata.distributions())
own = {d.name for d in found if d.read_text("direct_url.json")}
packages = [d for d in found if d.name not in own]
names = {d.name for d in packages}
owners = importlib.metadata.packages_distributions()
modules = sorted(name for name in owners if names & set(owners[name]))
commands = sorted(e.name for d in packages for e in d.entry_points if e.group == "console_scripts")
print(json.dumps([modules, commands]))
"""


@pytest.mark.project
@pytest.mark.timeout(1200)
def test_dependencies_are_taken(project: Path, project_env: Path) -> None:
    """No project can be named like something that its own environment installs."""
    assert project.is_dir()
    modules, commands = json.loads(run(project_env / "bin" / "python", "-c", ENVIRONMENT))
    assert len(modules) > 50
    is_package = re.compile(local_extensions.PACKAGE[0]).fullmatch
    free = [m for m in modules if is_package(m) and not local_extensions._taken_package(m)]
    assert not free
    is_slug = re.compile(local_extensions.SLUG[0]).fullmatch
    free = [c for c in commands if is_slug(c) and not local_extensions._taken_slug(c)]
    assert not free
