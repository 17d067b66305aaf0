"""cruft: create, check, diff, update (L2, L4)."""

import json
from pathlib import Path

import pytest

from cases import HARD
from tools import COOKIECUTTER, CRUFT, FOLDER, GIT, answer_options, assert_same, run

CASES = {"default": ({}, "my-experiment"), "hard": (HARD, "groesse-x")}


@pytest.fixture(autouse=True)
def _throwaway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cruft's temporary copies elsewhere than the projects, as on a person's machine."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


@pytest.fixture(params=CASES)
def linked(request: pytest.FixtureRequest, template_copy: Path, tmp_path: Path) -> Path:
    """A project made by cruft, committed to a repository of its own."""
    answers, slug = CASES[request.param]
    options = ("--no-input", "--output-dir", tmp_path / "linked")
    extra = ("--extra-context", json.dumps(answers))
    assert f"cd {slug} && make train" in run(*CRUFT, "create", template_copy, *options, *extra)
    project = tmp_path / "linked" / slug
    run("git", "init", "--quiet", cwd=project)
    commit(project)
    return project


def commit(repository: Path) -> None:
    run("git", "add", "--all", cwd=repository)
    run(*GIT, "commit", "--quiet", "--message", "Change", cwd=repository)


def test_create_equals_cookiecutter(linked: Path, template_copy: Path, tmp_path: Path) -> None:
    answers = next(answers for answers, slug in CASES.values() if slug == linked.name)
    output = tmp_path / "plain"
    command = (*COOKIECUTTER, template_copy, "--no-input", "--output-dir", output)
    run(*command, *answer_options(answers))
    (linked / ".cruft.json").unlink()
    (linked / ".git").rename(tmp_path / "git")
    assert_same(output / linked.name, linked)


def test_check_and_diff_are_quiet(linked: Path) -> None:
    run(*CRUFT, "check", cwd=linked)
    assert run(*CRUFT, "diff", "--exit-code", cwd=linked) == ""


def test_update_brings_a_change(linked: Path, template_copy: Path) -> None:
    """Template and user have each changed something: afterwards the project has both."""
    ours, new = Path("pyproject.toml"), Path("docs") / "{{ cookiecutter.package_name }}.md"
    folder = template_copy / FOLDER
    (folder / new).parent.mkdir(exist_ok=True)
    (folder / new).write_text("{{ cookiecutter.__project_name_markdown }}\n", encoding="utf-8")
    append(folder / ours, "\n[tool.brought-by-the-template]\nyes = true\n")
    append(template_copy / "local_extensions.py", "\nNEWER = True\n")
    commit(template_copy)
    append(linked / "Makefile", "\nmine: ## A target of the user's\n\t@echo mine\n")
    (linked / "mine.txt").write_text("mine\n", encoding="utf-8")
    commit(linked)

    run(*CRUFT, "check", cwd=linked, code=1)
    assert "make train" not in run(*CRUFT, "update", "--skip-apply-ask", cwd=linked)

    assert "[tool.brought-by-the-template]" in (linked / ours).read_text(encoding="utf-8")
    assert len(list((linked / "docs").glob("*.md"))) == 1
    assert "mine: ##" in (linked / "Makefile").read_text(encoding="utf-8")
    assert (linked / "mine.txt").read_text(encoding="utf-8") == "mine\n"
    assert not list(linked.rglob("*.rej"))
    commit(linked)
    run(*CRUFT, "check", cwd=linked)


def test_update_of_a_project_inside_a_larger_repository(linked: Path, template_copy: Path) -> None:
    """The project is a folder of a repository, as in a monorepo."""
    larger = linked.parent
    (linked / ".git").rename(larger / ".git")
    commit(larger)
    append(template_copy / FOLDER / "README.md", "\nBrought by the template.\n")
    commit(template_copy)
    run(*CRUFT, "update", "--skip-apply-ask", cwd=linked)
    assert "Brought by the template." in (linked / "README.md").read_text(encoding="utf-8")


def test_hooks_commit_nothing(linked: Path, template_copy: Path) -> None:
    before = run("git", "rev-list", "--all", "--count", cwd=linked)
    append(template_copy / FOLDER / "README.md", "\nBrought by the template.\n")
    commit(template_copy)
    run(*CRUFT, "update", "--skip-apply-ask", cwd=linked)
    assert run("git", "rev-list", "--all", "--count", cwd=linked) == before
    assert "README.md" in run("git", "status", "--porcelain", cwd=linked)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
