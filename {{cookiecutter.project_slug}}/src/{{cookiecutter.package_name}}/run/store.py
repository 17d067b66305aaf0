"""A folder on s3://, gs:// or another fsspec file system: tried out, read, and copied to and from here."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ..environment.folders import here, is_remote, url_of
from ..errors import Refused
from .weights import INDEX

OWNER = ".owner.json"  # who is writing there: host, pid, and the time of the last sign of life
BEAT = 30.0  # seconds between two signs of life
ANSWER = 20.0  # seconds that a store has for its first answer; libraries would try for minutes
TRIES = 4
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

T = TypeVar("T")


class Store:
    """A remote folder and its local copy.

    Raises:
        Refused: for a protocol that is unknown or whose package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url, self.local = url.rstrip("/"), here(url)
        protocol = url.partition("://")[0]
        if ".." in url.split("/"):
            raise Refused(f"{url}: '..' has no meaning there; give the whole path")
        # Object stores need no folders; a mounted file system, as file://, does.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            self.fs, self.path = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = EXTRAS.get(protocol)
            mend = f"pip install -e '.[{extra}]'" if extra else first_line(error)
            raise Refused(f"{url}: a package for {protocol}:// is missing: {mend}") from error
        except ValueError as error:
            raise Refused(f"{url}: {first_line(error)}") from error

    def check_access(self) -> None:
        """Write, list, read and remove a small object.

        Raises:
            Refused: when one of these is denied, or there is no answer.
        """
        name = f"{self.path}/.probe-{secrets.token_hex(4)}"

        def attempt() -> None:
            with tempfile.TemporaryDirectory() as scratch:
                probe = Path(scratch, "probe")
                probe.write_text("can this run be written here?")
                self.fs.put_file(str(probe), name)  # makes folders where they are needed
            self.fs.ls(self.path)
            self.fs.cat_file(name)
            self.fs.rm_file(name)

        self._ask(attempt, "a run must be able to write, list, read and delete there")

    def _ask(self, question: Callable[[], T], need: str) -> T:
        """The first question to a store, with a time limit."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return answer.result(ANSWER)
        except TimeoutError as error:
            raise Refused(f"{self.url}: no answer within {ANSWER:.0f} s; {need}") from error
        except Exception as error:
            raise Refused(f"{self.url}: {first_line(error)}; {need}") from error

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file's content; empty when it is absent or broken."""
        try:
            content: dict[str, Any] = json.loads(
                self.again(self.fs.cat_file, f"{self.path}/{name}")
            )
        except (FileNotFoundError, ValueError):
            return {}
        return content

    def again(self, action: Callable[..., T], *words: Any) -> T:
        """Do it, a few times if the network fails. For the start: training itself never waits.

        Raises:
            FileNotFoundError: there is no such object.
            Refused: when it fails each time.
        """
        for number in range(TRIES):
            try:
                return action(*words)
            except FileNotFoundError:
                raise
            except Exception as error:
                if number == TRIES - 1:
                    raise Refused(f"{self.url}: {first_line(error)}") from error
                time.sleep(2**number)
        raise AssertionError

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The runs in this folder: summary.json by URL. Asked for all at once: there may be hundreds."""
        self.fs.invalidate_cache()
        try:
            found = self.again(self.fs.ls, self.path, True)
        except FileNotFoundError:
            return {}
        names = [entry["name"].rstrip("/") for entry in found if entry["type"] == "directory"]
        answers = self.again(self._read_all, [f"{name}/summary.json" for name in names])
        return {f"{self.url}/{name.split('/')[-2]}": summary for name, summary in answers.items()}

    def _read_all(self, names: list[str]) -> dict[str, dict[str, Any]]:
        found = self.fs.cat(names, on_error="return") if names else {}
        contents = {}
        for name, content in found.items():
            if isinstance(content, bytes):
                with contextlib.suppress(ValueError):
                    contents[name] = json.loads(content)
            elif not isinstance(content, FileNotFoundError):
                raise content  # not the same as absent: a run that could go on would be passed over
        return contents

    def download(self, name: str) -> None:
        """Bring a file or a whole folder here, under its name only once it is complete.

        Raises:
            FileNotFoundError: there is nothing of that name.
        """
        source, target = f"{self.path}/{name}", self.local / name
        found = self.again(self.fs.find, source)
        if not found:
            raise FileNotFoundError(source)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        for file in found:
            to = part / file[len(source) :].lstrip("/") if file != source else part
            to.parent.mkdir(parents=True, exist_ok=True)
            self.again(self.fs.get_file, file, str(to))
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)

    def bring(self, name: str) -> None:
        """Download what is not here yet in that size."""
        target = self.local / name
        if target.is_dir():
            return
        size = target.stat().st_size if target.exists() else None
        try:
            theirs = self.again(self.fs.info, f"{self.path}/{name}").get("size")
        except FileNotFoundError:
            theirs = size  # only here: not uploaded yet
        if size is None or size != theirs:
            self.download(name)

    def refresh(self) -> None:
        """Bring a run's files, its newest and its best checkpoint here if it is further there.

        The index comes last: it names only what is here, whenever this is cut off.
        """
        theirs = self.read("summary.json"), self.read(f"checkpoints/{INDEX}")
        ours = (
            local_json(self.local / "summary.json"),
            local_json(self.local / "checkpoints" / INDEX),
        )
        if theirs[0] and progress(*theirs) > progress(*ours):
            if entries := theirs[1].get("checkpoints"):
                newest = max(entries, key=lambda entry: entry["step"])["file"]
                for file in {newest, theirs[1]["best"] or newest}:
                    self.bring(f"checkpoints/{file}")
            for entry in self.again(self.fs.ls, self.path, True):
                name = entry["name"].rpartition("/")[2]
                if entry["type"] == "file" and not name.startswith("."):
                    self.download(name)
            if entries:
                self.download(f"checkpoints/{INDEX}")

    def send(self, path: Path) -> None:
        """Upload one file of the local copy."""
        self.fs.put_file(str(path), f"{self.path}/{path.relative_to(self.local).as_posix()}")

    def beat(self) -> None:
        """Leave a sign of life."""
        life = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        self.fs.pipe_file(f"{self.path}/{OWNER}", json.dumps(life).encode())


def progress(summary: dict[str, Any], index: dict[str, Any]) -> tuple[int, bool, bool]:
    """How far a run is, to compare two copies of it."""
    entries = index.get("checkpoints") or [{"step": -1 if summary else -2, "validated": False}]
    newest = max(entries, key=lambda entry: entry["step"])
    return newest["step"], newest["validated"], summary.get("status") == "finished"


def local_json(path: Path) -> dict[str, Any]:
    """A JSON file's content; empty when it is absent or broken."""
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return {}


def first_line(error: BaseException) -> str:
    text = (str(error).strip() or "no more is said").splitlines()[0]
    return f"{type(error).__name__}: {text[:200]}"


def brought(word: str, checkpoint: str = "best") -> Path:
    """The local path of a run folder or checkpoint; what lies elsewhere is downloaded.

    Args:
        word: a path, or a URL.
        checkpoint: of a run, which one is needed: best, last, or a file's name.

    Raises:
        Refused: when it is elsewhere and cannot be had.
    """
    if not is_remote(word):
        return here(word)
    store = Store(word)
    need = "it must be there and readable"
    index = store._ask(lambda: store.read(f"checkpoints/{INDEX}"), need)
    try:
        if not index:
            parent, _, name = store.url.rpartition("/")
            Store(parent).bring(name)
            return store.local
        store.refresh()
        index = local_json(store.local / "checkpoints" / INDEX)
        chosen = index["best"] or index["last"] if checkpoint == "best" else checkpoint
        store.bring(f"checkpoints/{index['last'] if chosen == 'last' else chosen}")
    except FileNotFoundError as error:
        raise Refused(f"{word}: {need}") from error
    return store.local


def send_result(path: Path) -> None:
    """Upload a file that was written into a remote run's local copy; a failure is only said."""
    run = next((parent for parent in path.parents if (parent / "config.yaml").is_file()), None)
    if run is None or (url := url_of(run)) is None:
        return
    try:
        Store(url).send(path)
    except Exception as error:
        print(f"{'warning:':<15} {path} did not arrive at {url} ({first_line(error)})", flush=True)
