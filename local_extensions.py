"""Checks the answers while cookiecutter collects them, before any folder exists.

`checked` is applied by the last entry of cookiecutter.json. A refusal is one line and exit code 1.

Keep the class name: `cruft update` renders the old and the new template with one imported copy of
this module, so a class that only the new template names would not be found. New code that the JSON
calls goes into a new module; escaping stays in the JSON.
"""

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

Check = Callable[[str], str | None]
FOLDER = "{{cookiecutter.project_slug}}"
MARKS = ("{{", "{%", "{#")
TEXTS = {
    "project_name": "My Experiment",
    "author_name": "Your Name",
    "description": "Deep-learning experiments in PyTorch.",
}
LONGEST_TEXT = 200
LONGEST_NAME = 40
SLUG = (
    r"[a-z][a-z0-9]*(-[a-z0-9]+)*",
    "lower-case letters, digits and single hyphens, a letter first",
)
PACKAGE = (
    r"[a-z][a-z0-9]*(_+[a-z0-9]+)*",
    "lower-case letters, digits and inner underscores, a letter first",
)
# GitHub's grammar; the part after `_` is the short code of an enterprise's managed users.
OWNER = r"(?=.{1,39}$)[A-Za-z0-9]+(-[A-Za-z0-9]+)*(_[A-Za-z0-9]+)?"

# Written out for Python 3.11 to 3.14, not asked of the running one: an answer is right everywhere
# or nowhere.
SOFT_KEYWORDS = frozenset({"case", "match", "type"})
STANDARD_LIBRARY = frozenset(
    """
    abc aifc annotationlib antigravity argparse array ast asynchat asyncio asyncore atexit audioop
    base64 bdb binascii bisect builtins bz2 calendar cgi cgitb chunk cmath cmd code codecs codeop
    collections colorsys compileall compression concurrent configparser contextlib contextvars copy
    copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest
    email encodings ensurepip enum errno faulthandler fcntl filecmp fileinput fnmatch fractions
    ftplib functools gc genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac
    html http idlelib imaplib imghdr imp importlib inspect io ipaddress itertools json keyword
    lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes mmap modulefinder
    msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode operator
    optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib
    posix posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue
    quopri random re readline reprlib resource rlcompleter runpy sched secrets select selectors
    shelve shlex shutil signal site smtpd smtplib sndhdr socket socketserver spwd sqlite3
    sre_compile sre_constants sre_parse ssl stat statistics string stringprep struct subprocess
    sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios textwrap this
    threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle
    turtledemo types typing unicodedata unittest urllib uu uuid venv warnings wave weakref
    webbrowser winreg winsound wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
    """.split()
)
# What a dependency is imported as, where the lock file has it under another name, and what the
# optional dependencies bring.
IMPORT_NAMES = frozenset(
    """
    absl antlr4 attr coreweave_evaluations cuda dateutil functorch git google grpc hydra
    hydra_plugins isympy jwt lightning_fabric mypyc nvidia opentelemetry pip py pydevd_plugins
    pytorch_lightning ruamel sklearn slugify torchgen wheel yaml
    apex flash_attn fastapi ipykernel jupyter jupyterlab litserve onnx onnxruntime onnxscript
    boto3 botocore gcsfs moto s3fs starlette tiktoken tokenizers transformer_engine uvicorn
    webdataset xdist
    """.split()
)
# Folders and files that a project has or will have beside its package.
TAKEN = frozenset(
    """
    bin build checkpoints configs conftest data dist docs launch lib locks main notebooks outputs
    recipes remote runs scripts setup src test tests tmp venv
    """.split()
)
# The slug becomes a console command, which must not hide a common one or one of a dependency's;
# `con`, `nul` and the like cannot be folder names on Windows.
COMMANDS = frozenset(
    """
    alias apt aux awk bash bc bg break bunzip2 cat cd check-added-large-files check-ast
    check-builtin-literals check-case-conflict check-docstring-first check-executables-have-shebangs
    check-json check-merge-conflict check-shebang-scripts-are-executable check-symlinks check-toml
    check-vcs-permalinks check-xml check-yaml chmod chown clear cmake code com1 com2 com3 com4 con
    conda continue cookiecutter cp cron cruft curl cut date dd debug-statement-hook
    destroyed-symlinks detect-aws-credentials detect-private-key detect-secrets-hook df diff dirname
    distro dmesg dmypy do docker done double-quote-string-fixer du echo ed emacs end-of-file-fixer
    env esac eval exec exit export expr f2py fabric false fg fi file file-contents-sorter find
    fix-byte-order-marker for forbid-new-submodules free g++ gcc gdb gh git go grep groups gunzip
    gzip hash head help hf history host hostname httpx id identify-cli if in ip isympy java jobs
    join jq jupyter k9s kill kubectl last ldd less let link ln local lpt1 lpt2 lpt3 lpt4 ls lsof
    make mamba man mixed-line-ending mkdir mount mpirun mv mypyc name-tests-test nano nc ncu nice
    no-commit-to-branch node nodeenv nohup normalizer npm npx nsys nul numpy-config nvcc nvidia-smi
    nvtop od passwd paste perf perl ping pip pip3 pipx podman pre-commit-hooks-removed
    pretty-format-json prn proton proton-viewer ps pwd py pygmentize pyright pytest python python3
    read reboot requirements-txt-fixer reset return rm rmdir rsync ruby ruff sacct salloc sbatch
    scancel scontrol scp screen sed select seq service set sftp sh shift shutdown sinfo sleep sort
    sort-simple-yaml source split squeue srun ssh stat stty stubgen stubtest su sudo sync tail tar
    tee test then time timeout times tiny-agents tmux top torchfrtrace torchrun touch tr
    trailing-whitespace-fixer trap true tty type typer ulimit umask umount unalias uname uniq unset
    until unzip uptime users uv uvx vi vim virtualenv wait watch wb wc wget what whereis which while
    who whoami xargs xz yes zip zsh
    """.split()
)


class Answers(Extension):
    """Adds the filter `checked` and takes an answer such as `{{ 7*7 }}` as the text that it is."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["checked"] = checked
        self._asking: bool | None = None

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Jinja hands over every text here. Answers given on the command line are among them."""
        if name is not None:  # a file of the template
            return source
        if self._asking is None:
            # Each step has an environment of its own: the questions, a hook, the files. The files
            # begin with the folder's name, a hook is its only text.
            self._asking = source != FOLDER and source not in _hooks()
        if self._asking and _mark(source) and source not in _own_expressions():
            return "{{ " + json.dumps(source, ensure_ascii=False) + " }}"
        return source


def checked(answers: Mapping[str, Any]) -> str:
    """Returns `yes`, or refuses with the field, what is wrong with it, and a good value."""
    for field, good in TEXTS.items():
        _check_text(field, answers[field], good)
    _check_name("project_slug", answers["project_slug"], SLUG, _taken_slug, "-")
    _check_name("package_name", answers["package_name"], PACKAGE, _taken_package, "_")
    owner = answers["repo_owner"]
    if not _matches(OWNER, owner):
        _refuse("repo_owner", owner, "is not a GitHub user or organisation name", "your-team")
    return "yes"


def _check_text(field: str, value: Any, good: str) -> None:
    if not isinstance(value, str):
        _refuse(field, value, "is not text", good)
    if not value.strip() and field != "description":
        _refuse(field, value, "is empty", good)
    if len(value) > LONGEST_TEXT:
        _refuse(field, value, f"is longer than {LONGEST_TEXT} characters", good)
    if mark := _mark(value):
        _refuse(field, value, f"holds the template mark {mark}", good)
    for character in value:
        # Control (tab excepted), lone surrogate, line and paragraph separator, and the two that
        # YAML and XML forbid.
        category = unicodedata.category(character)
        if (
            character != "\t"
            and category in ("Cc", "Cs", "Zl", "Zp")
            or character in "\ufffe\uffff"
        ):
            _refuse(field, value, f"holds the character U+{ord(character):04X}", good)
    if value != value.strip():
        _refuse(field, value, "begins or ends with a blank", value.strip() or good)


def _check_name(field: str, name: Any, rule: tuple[str, str], taken: Check, joint: str) -> None:
    pattern, words = rule
    if not _matches(pattern, name):
        problem: str | None = f"is not made of {words}"
    elif len(name) > LONGEST_NAME:
        problem = f"is longer than {LONGEST_NAME} characters"
    else:
        problem = taken(name)
    if problem:
        _refuse(field, name, problem, free_slug(str(name)).replace("-", joint))


def _taken_package(package: str) -> str | None:
    if keyword.iskeyword(package) or package in SOFT_KEYWORDS:
        return "is a word of the Python language"
    if package in STANDARD_LIBRARY:
        return "is a module of Python's standard library"
    if package in IMPORT_NAMES | _locked():
        return "is one of the project's dependencies"
    return "is a folder or file that every project has or makes" if package in TAKEN else None


def _taken_slug(slug: str) -> str | None:
    if slug in COMMANDS:
        return "is the name of another command, or no folder name on Windows"
    if slug.replace("-", "_") in IMPORT_NAMES | _locked():
        return "is one of the project's dependencies"
    return "is a folder or file that every project has or makes" if slug in TAKEN else None


def free_slug(wish: str) -> str:
    """A name near the wish that is good for the folder and, with underscores, for the package."""
    slug = re.sub(r"[^a-z0-9]+", "-", wish.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"project-{slug}".strip("-")
    slug = slug[:LONGEST_NAME].strip("-")
    if not (_taken_slug(slug) or _taken_package(slug.replace("-", "_"))):
        return slug
    return f"{slug[: LONGEST_NAME - 4].strip('-')}-lab"


def _refuse(field: str, value: Any, problem: str, good: str) -> NoReturn:
    # ASCII only: the line must print on any terminal, whatever the answer holds.
    shown = value if len(str(value)) <= 60 else f"{str(value)[:57]}..."
    raise FailedHookException(f"{field}: {shown!a} {problem}. A good value: {good!a}")


def _matches(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _mark(text: str) -> str | None:
    return next((mark for mark in MARKS if mark in text), None)


def _template() -> Path:
    """The template in use. cookiecutter and cruft put it last on sys.path; this file may be older
    or gone, as one process can render several copies with one imported module."""
    folders = (Path(entry) for entry in reversed(sys.path) if entry)
    found = (p for p in folders if (p / "cookiecutter.json").is_file() and (p / FOLDER).is_dir())
    return next(found, Path(__file__).parent)


def _own_expressions() -> set[str]:
    questions = json.loads((_template() / "cookiecutter.json").read_text(encoding="utf-8"))
    return {value for value in questions.values() if isinstance(value, str)}


def _hooks() -> set[str]:
    return {hook.read_text(encoding="utf-8") for hook in (_template() / "hooks").glob("*.py")}


def _locked() -> frozenset[str]:
    """Names pinned in the project's lock, as they would be imported; none before it is written."""
    lock = _template() / FOLDER / "requirements.lock"
    text = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    names = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==", text, re.MULTILINE)
    return frozenset(re.sub(r"[-_.]+", "_", name).lower() for name in names)
