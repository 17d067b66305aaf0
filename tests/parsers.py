"""Every generated file through its real parser."""

import fnmatch
import json
import re
import sys
import tomllib
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tools import ROOT, files, run

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
UNRENDERED = QUESTIONS["_copy_without_render"]
# A JSON string, or a comment as VS Code and dev containers allow it.
JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
LOCKED = re.compile(
    r"[A-Za-z0-9._-]+==\S+( ; [^\\]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+"
)


def parse_python(text: str, path: Path) -> None:
    compile(text, path, "exec", dont_inherit=True)


def parse_toml(text: str, path: Path) -> None:
    tomllib.loads(text)


def parse_yaml(text: str, path: Path) -> None:
    list(yaml.safe_load_all(text))


def parse_json(text: str, path: Path) -> None:
    json.loads(JSON_PART.sub(lambda part: part[0] if part[0][0] == '"' else "", text))


def parse_shell(text: str, path: Path) -> None:
    if sys.platform != "win32":
        run("bash", "-n", path)


def parse_make(text: str, path: Path) -> None:
    if sys.platform != "win32":
        run("make", "--dry-run", "-C", path.parent, "help")


def parse_markdown(text: str, path: Path) -> None:
    assert MarkdownIt().parse(text), f"{path} is empty"


def parse_lock(text: str, path: Path) -> None:
    assert LOCKED.sub("", text) == "", f"{path} holds more than pins with hashes"


def parse_lines(text: str, path: Path) -> None:
    """Formats without a parser of their own: lists of patterns, names, and settings."""
    assert text.endswith("\n") or not text, f"{path} does not end with a line feed"


PARSERS = {
    "*.py": parse_python,
    "*.toml": parse_toml,
    "*.yaml": parse_yaml,
    "*.yml": parse_yaml,
    "*.cff": parse_yaml,
    "*.json": parse_json,
    "*.json5": parse_json,
    "*.sh": parse_shell,
    "*.sbatch": parse_shell,
    "*.md": parse_markdown,
    "Makefile": parse_make,
    "*.lock": parse_lock,
    # Checked further by the generated project's own tests.
    "*Dockerfile*": parse_lines,
    "*ignore": parse_lines,
    "*_config*": parse_lines,
    "*.conf": parse_lines,
    "*.txt": parse_lines,
    "*.example": parse_lines,
    ".gitattributes": parse_lines,
    ".editorconfig": parse_lines,
    "CODEOWNERS": parse_lines,
    "LICENSE": parse_lines,
    "py.typed": parse_lines,
}


def check_file(path: Path, project: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    assert "\r" not in text, f"{path} has a carriage return"
    if text.startswith(("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env bash", "#!/usr/bin/env sh")):
        parse_shell(text, path)
    parser = next((p for name, p in PARSERS.items() if fnmatch.fnmatch(path.name, name)), None)
    assert parser, f"{path.relative_to(project)}: add a parser for this kind of file"
    parser(text, path)
    name = path.relative_to(project).as_posix()
    if not any(fnmatch.fnmatch(name, pattern) for pattern in UNRENDERED):
        left = re.findall(r"\{\{.*|\{%.*|.*\bcookiecutter\..*", text)
        assert not left, f"{name}: left-over delimiters: {left}"


def check_all(project: Path) -> None:
    found = files(project)
    assert found, f"{project} is empty"
    for path in found:
        check_file(path, project)


def heading(markdown: str) -> str:
    """The text that a reader sees in the first heading; fails when it holds anything but text."""
    return plain(next(t for t in MarkdownIt().parse(markdown) if t.type == "inline"))


def plain(inline: Token) -> str:
    kinds = {child.type for child in inline.children or []}
    assert kinds <= {"text"}, f"not only text: {kinds}"
    return "".join(child.content for child in inline.children or [])
