"""Second guard, for replayed answers and for tools that do not load the template's extension.

local_extensions.py checks more, and before the folder exists. Changes nothing.
"""

import json
import re
import sys

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
GRAMMAR = {
    "project_name": r"\S[^\x00-\x08\x0a-\x1f\x7f]*",
    "author_name": r"\S[^\x00-\x08\x0a-\x1f\x7f]*",
    "project_slug": r"[a-z][a-z0-9]*(-[a-z0-9]+)*",
    "package_name": r"[a-z][a-z0-9]*(_+[a-z0-9]+)*",
    "repo_owner": r"[A-Za-z0-9]+([-_][A-Za-z0-9]+)*",
}

for field, pattern in GRAMMAR.items():
    if re.fullmatch(pattern, str(ANSWERS.get(field, ""))) is None:
        sys.exit(f"{field}: {ANSWERS.get(field)!a} cannot be used. It must match {pattern}")
