"""Answers that must be refused: one line that names the field and a good value, and no folder."""

import ast
import shutil
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException

import local_extensions
from cases import FREE_TEXT_REFUSED, REFUSED
from conftest import Generate
from tools import COOKIECUTTER, CRUFT, GIT, answer_options, run

NAMES = [(field, value) for field, values in REFUSED.items() for value in values]
FREE = [(f, *FREE_TEXT_REFUSED[case]) for case in FREE_TEXT_REFUSED for f in local_extensions.TEXTS]


def refusal(generate: Generate, output: Path, field: str, value: str) -> str:
    # The other answers are good ones, so that it is this one that is refused.
    others = {"project_slug": "my-experiment", "package_name": "my_experiment"}
    with pytest.raises(FailedHookException) as caught:
        generate(**{**others, field: value})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isascii()
    assert message.startswith(f"{field}: ")
    assert not output.exists()
    return message


@pytest.mark.parametrize(("field", "value"), NAMES, ids=[f"{f}-{v[:30]!r}" for f, v in NAMES])
def test_names(generate: Generate, tmp_path: Path, field: str, value: str) -> None:
    message = refusal(generate, tmp_path / "generated", field, value)
    good = ast.literal_eval(message.partition("A good value: ")[2])
    answers = {"project_slug": "a", "package_name": "a", "repo_owner": "a", field: good}
    assert local_extensions.checked(dict(local_extensions.TEXTS) | answers) == "yes"


@pytest.mark.parametrize(("field", "value", "word"), FREE)
def test_free_text(generate: Generate, tmp_path: Path, field: str, value: str, word: str) -> None:
    assert word in refusal(generate, tmp_path / "generated", field, value)


COMMAND = {
    "keyword": ({"project_name": "Class"}, "package_name: 'class'"),
    "dependency": ({"project_name": "Torch"}, "project_slug: 'torch'"),
    "path": ({"project_slug": "a/b"}, "project_slug: 'a/b'"),
    "parent": ({"project_slug": "../b"}, "project_slug: '../b'"),
    "expression": ({"author_name": "{{ 7*7 }}"}, "author_name: '{{ 7*7 }}'"),
    "line feed": ({"description": "a\nb"}, "description: 'a\\nb'"),
}


@pytest.mark.parametrize(("answers", "line"), COMMAND.values(), ids=COMMAND)
def test_command(template: Path, tmp_path: Path, answers: dict[str, str], line: str) -> None:
    options = ("--no-input", "--output-dir", tmp_path / "out")
    printed = run(*COOKIECUTTER, template, *options, *answer_options(answers), code=1)
    assert printed.startswith(line)
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_choice_not_offered(template: Path, tmp_path: Path) -> None:
    """cookiecutter's own error, with the choices in it."""
    options = ("--no-input", "--output-dir", tmp_path / "out", "license=WTFPL")
    assert "Apache-2.0" in run(*COOKIECUTTER, template, *options, code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("force", [(), ("--overwrite-if-exists",)], ids=["plain", "overwrite"])
def test_existing_folder_is_kept(template: Path, tmp_path: Path, force: tuple[str, ...]) -> None:
    mine = tmp_path / "my-experiment" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("kept", encoding="utf-8")
    options = ("--no-input", "--output-dir", tmp_path, *force)
    run(*COOKIECUTTER, template, *options, "package_name=torch", code=1)
    if not force:
        run(*COOKIECUTTER, template, *options, code=1)
    assert mine.read_text(encoding="utf-8") == "kept"
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_cruft(template: Path, tmp_path: Path) -> None:
    options = ("--no-input", "--output-dir", tmp_path / "out", "--extra-context")
    printed = run(*CRUFT, "create", template, *options, '{"package_name": "torch"}', code=1)
    assert "A good value:" in printed
    assert "torch_lab" in printed
    assert not (tmp_path / "out").exists()


SECOND_GUARD = {
    "project_slug": "a--b",
    "package_name": "my-exp",
    "repo_owner": "a b",
    "author_name": "",
    "project_name": "a\nb",
}


@pytest.fixture
def unguarded(template_copy: Path) -> Path:
    """The template under a tool that does not load its extension."""
    questions = template_copy / "cookiecutter.json"
    lines = questions.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"_extensions"' not in line and '"__checked"' not in line]
    assert len(kept) == len(lines) - 2
    # The comma before the last entry.
    questions.write_text("".join(kept).replace("],\n}", "]\n}"), encoding="utf-8")
    run(*GIT, "commit", "--quiet", "--all", "--message", "No guard", cwd=template_copy)
    return template_copy


@pytest.mark.parametrize("field", SECOND_GUARD)
def test_second_guard(unguarded: Path, tmp_path: Path, field: str) -> None:
    output = tmp_path / "out"
    answers = {"project_slug": "good", "package_name": "good", field: SECOND_GUARD[field]}
    options = ("--no-input", "--output-dir", output, *answer_options(answers))
    printed = run(*COOKIECUTTER, unguarded, *options, code=1)
    assert f"{field}: {ascii(SECOND_GUARD[field])} cannot be used" in printed
    assert not list(output.iterdir())


def test_lock_may_be_absent(template_copy: Path, tmp_path: Path) -> None:
    """Names of dependencies come from the lock; without it the fixed names still count."""
    for lock in template_copy.rglob("requirements*.lock"):
        lock.unlink()
    options = ("--no-input", "--output-dir", tmp_path / "out")
    run(*COOKIECUTTER, template_copy, *options, "package_name=sklearn", code=1)
    run(*COOKIECUTTER, template_copy, *options)
    shutil.rmtree(tmp_path / "out")
