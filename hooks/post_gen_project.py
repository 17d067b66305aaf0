"""Prints the next two commands. Changes nothing: cruft runs it at every diff and update."""

import json
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
SLUG = ANSWERS["project_slug"]


def is_throwaway() -> bool:
    """cruft, which adds `_commit`, renders copies to compare. `cruft diff` prints a diff only."""
    if "_commit" not in ANSWERS:
        return False
    from tempfile import gettempdir

    return Path(gettempdir()).resolve() in Path.cwd().resolve().parents


if not is_throwaway():
    print(f"Train the default experiment:  cd {SLUG} && make train")
    print(f"Run the project's own tests:   cd {SLUG} && make test")
