"""Where the project lies, what a path or URL means here, and how it is shown."""

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


def is_remote(word: object) -> bool:
    """Whether a config value is a URL such as s3://bucket/runs."""
    return "://" in str(word)


def _copies() -> Path:
    """Below this lie the local copies of remote runs: <protocol>/<bucket>/<key>, so that a path tells
    its URL. Local disk of a cluster node serves well."""
    chosen = os.environ.get("REMOTE_RUNS_DIR")
    return Path(chosen).expanduser().absolute() if chosen else project_root() / "runs" / ".remote"


def here(word: str) -> Path:
    """The path that a config value means on this machine: a URL means its local copy."""
    if not is_remote(word):
        return Path(word).expanduser().absolute()
    protocol, _, rest = word.partition("://")
    bucket, _, key = rest.partition("/")
    return _copies() / protocol / (bucket or "_") / key.strip("/")


def url_of(path: Path | str) -> str | None:
    """The URL whose local copy a path is; None for any other path."""
    try:
        protocol, bucket, *keys = Path(path).absolute().relative_to(_copies()).parts
    except ValueError:
        return None
    return f"{protocol}://{'' if bucket == '_' else bucket}/{'/'.join(keys)}"


def shown(path: Path | str) -> str:
    """The path as a person would type it here as an override: its URL, or as `typed`."""
    return url_of(path) or typed(path)


def typed(path: Path | str) -> str:
    """The path for a shell on this machine: relative when it lies below the working directory."""
    path = Path(path)
    try:
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


def place(path: Path) -> str:
    """Where a run lies, for a line of its own."""
    return shown(path) + (f" (local copy {typed(path)})" if url_of(path) else "")


def writable_folder(path: Path, key: str) -> Path:
    """Make the folder if needed and return it.

    Raises:
        Refused: naming the config key, when it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"{key}: cannot make {typed(path)} ({error.strerror}); choose another {key}"
        ) from error
    if not os.access(path, os.W_OK):
        raise Refused(f"{key}: {typed(path)} is not writable by this user; choose another {key}")
    return path
