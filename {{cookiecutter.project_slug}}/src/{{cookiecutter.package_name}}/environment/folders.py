"""Where the project lies, and how paths are shown."""

import os
from pathlib import Path

from ..errors import Refused


def project_root() -> Path:
    """The folder with pyproject.toml when the package runs from its source tree, else the working directory.

    So runs/ and data/ are the same from any directory, and an installed wheel never writes beside
    the interpreter.
    """
    source = Path(__file__).resolve().parents[3]
    # Both must be there: a wheel's site-packages can lie three levels under somebody's pyproject.toml.
    if (source / "pyproject.toml").is_file() and (source / "src").is_dir():
        return source
    return Path.cwd()


def shown(path: Path | str) -> str:
    """The path as a person would type it here: relative when it lies below the working directory."""
    path = Path(path)
    try:
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


def writable_folder(path: Path, key: str) -> Path:
    """Make the folder if needed and return it.

    Raises:
        Refused: naming the config key, when it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"{key}: cannot make {shown(path)} ({error.strerror}); choose another {key}"
        ) from error
    if not os.access(path, os.W_OK):
        raise Refused(f"{key}: {shown(path)} is not writable by this user; choose another {key}")
    return path
