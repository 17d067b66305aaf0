"""Answers that must work: the project is valid and holds exactly what was answered."""

import ast
import json
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_for_config

from cases import CHOICES, HARD, TEXTS
from conftest import Generate
from parsers import QUESTIONS, check_all, heading
from tools import COOKIECUTTER, answer_options, run

CHOSEN = [(name, value) for name, values in CHOICES.items() for value in values]


def check(project: Path, answers: dict[str, str]) -> None:
    check_all(project)
    meta = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = {"description": meta["description"], "author_name": meta["authors"][0]["name"]}
    expected["project_slug"] = meta["name"]
    assert {name: answers.get(name, value) for name, value in expected.items()} == expected
    assert list(meta["scripts"]) == [meta["name"]]
    title = heading((project / "README.md").read_text(encoding="utf-8"))
    assert title == answers.get("project_name", "My Experiment")
    run(sys.executable, "-m", "ruff", "check", "--no-cache", project)
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", project)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text(generate: Generate, text: str) -> None:
    answers = {"project_name": text, "author_name": text, "description": text}
    check(generate(**answers, project_slug="any-text"), answers)


@pytest.mark.parametrize(("name", "value"), CHOSEN, ids=[f"{n}-{v[:30]}" for n, v in CHOSEN])
def test_every_choice(generate: Generate, name: str, value: str) -> None:
    check(generate(**{name: value}), {name: value})


def test_choices_are_all_listed() -> None:
    """A choice that is added to cookiecutter.json is added here too."""
    offered = {name: tuple(v) for name, v in QUESTIONS.items() if isinstance(v, list)}
    public = {name: values for name, values in offered.items() if not name.startswith("_")}
    assert public == {name: CHOICES[name] for name in public}


def test_machine_answers_are_kept_for_the_tools(generate: Generate) -> None:
    for image in CHOICES["base_image"]:
        slug = f"p-{CHOICES['base_image'].index(image)}"
        project = generate(base_image=image, project_slug=slug, target_gpu="H200")
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        assert table["research-template"] == {"target-gpu": "H200", "base-image": image}


def test_hard_names_through_the_command(template: Path, tmp_path: Path) -> None:
    """Also what the hooks print: two lines in ASCII."""
    options = ("--no-input", "--output-dir", tmp_path)
    printed = run(*COOKIECUTTER, template, *options, *answer_options(HARD))
    check(tmp_path / HARD["project_slug"], HARD)
    assert printed.isascii()
    assert [line.partition("cd ")[2] for line in printed.splitlines()] == [
        "groesse-x && make train",
        "groesse-x && make test",
    ]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_prepared_forms(template: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that templates use mean exactly the text: quoted four times, and Markdown."""
    monkeypatch.syspath_prepend(str(template))
    answers = {"project_name": text, "author_name": text, "description": text}
    context = generate_context(
        str(template / "cookiecutter.json"), extra_context={**answers, "project_slug": "any-text"}
    )
    made = prompt_for_config(context, no_input=True)
    for field in ("project_name", "author", "description"):
        quoted = made[f"__{field}_quoted"]
        assert tomllib.loads(f"x = {quoted}")["x"] == text
        assert json.loads(quoted) == text
        assert yaml.safe_load(f"x: {quoted}")["x"] == text
        assert ast.literal_eval(quoted) == text
        assert heading(f"# {made[f'__{field}_markdown']}") == text
