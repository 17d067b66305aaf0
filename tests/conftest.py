"""What all tests share: a clean copy of the template, a way to render it, one environment."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cookiecutter.main import cookiecutter

from cases import HARD
from tools import COOKIECUTTER, GIT, ROOT, answer_options, run, tracked_files

Generate = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _no_user_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody's ~/.cookiecutterrc or git settings take part, and nothing is written there."""
    home = tmp_path_factory.mktemp("home")
    config = home / "cookiecutter.yaml"
    folders = {f"{name}_dir": str(home / name) for name in ("cookiecutters", "replay")}
    config.write_text(yaml.safe_dump(folders), encoding="utf-8")
    (home / "gitconfig").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        patch.setenv("GIT_CONFIG_GLOBAL", str(home / "gitconfig"))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, _no_user_settings: None) -> Path:
    """The template as a fresh clone has it, with what is not committed yet. Do not change it."""
    return copy_template(tmp_path_factory.mktemp("template") / "template")


def copy_template(target: Path) -> Path:
    for name in tracked_files(ROOT):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    run("git", "init", "--quiet", cwd=target)
    run("git", "add", "--all", cwd=target)
    run(*GIT, "commit", "--quiet", "--message", "Template", cwd=target)
    return target


@pytest.fixture
def template_copy(tmp_path: Path) -> Path:
    """A copy of its own for a test that changes the template."""
    return copy_template(tmp_path / "template")


@pytest.fixture
def generate(template: Path, tmp_path: Path) -> Generate:
    """Renders the template in this process: what the command does, without starting Python."""

    def generate(**answers: str) -> Path:
        output = tmp_path / "generated"
        made = cookiecutter(
            str(template), no_input=True, extra_context=answers, output_dir=str(output)
        )
        return Path(made)

    return generate


@pytest.fixture(scope="session")
def project_env() -> Path:
    """One environment for all generated projects, kept between runs: torch is installed once."""
    return ROOT / "build" / "env"


@pytest.fixture(scope="session", params=["default", "hard"])
def project(
    request: pytest.FixtureRequest,
    template: Path,
    project_env: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A generated project, installed: from the defaults, and with hard names."""
    folder = render(template, tmp_path_factory.mktemp(request.param), hard=request.param == "hard")
    make(folder, "setup", project_env, timeout=1200)
    return folder


@pytest.fixture
def twin(project: Path, template: Path, tmp_path: Path) -> Path:
    """The same project once more, as it was generated: not installed, nothing run in it."""
    return render(template, tmp_path, hard=project.name == HARD["project_slug"])


def render(template: Path, output: Path, hard: bool) -> Path:
    answers = HARD if hard else {}
    run(*COOKIECUTTER, template, "--no-input", "--output-dir", output, *answer_options(answers))
    return output / answers.get("project_slug", "my-experiment")


def make(
    project: Path, target: str, env: Path, *variables: str, code: int = 0, timeout: int = 900
) -> str:
    """A command of the generated project's Makefile, with the shared environment."""
    fixed = (f"VENV={env}", f"PYTHON={sys.executable}")
    return run("make", "-C", project, target, *fixed, *variables, code=code, timeout=timeout)
