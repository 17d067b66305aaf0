#!/bin/sh
# Makes the virtual environment that the lock describes and puts this project into it. `make setup` runs it.
# Nothing to do: over in a moment. Interrupted: run it again. Broken or moved environment: made anew.
set -eu
unset CDPATH
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} LOCK=${LOCK:-requirements.lock}
# The lock alone decides: a constraint or `user = true` that an image or a cluster has set would break it.
unset PIP_CONSTRAINT PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

stop() { printf '%s\n' "$@" >&2; exit 1; }
suitable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

find_python() {
    bare=
    for python in "$PYTHON" python3.12 python3.11 python3.13; do
        suitable "$python" || continue
        # Debian and Ubuntu keep this in a package of its own.
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then return; fi
        bare=${bare:-$python}
    done
    [ -z "$bare" ] || stop "$bare cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv), then run this again."
    stop "This project needs Python 3.11, 3.12 or 3.13; '$PYTHON' is $("$PYTHON" -V 2>/dev/null || echo not a Python)." \
        "Install one, or name one you have: make setup PYTHON=/path/to/python3.12"
}

# What a person wants to see of pip's output: the large downloads, and that unpacking takes a while.
progress() {
    while IFS= read -r line; do
        case $line in
            *"("[0-9]*[0-9].[0-9]" MB)") echo "  ${line#"${line%%[! ]*}"}" ;;
            "Installing collected packages"*) echo "  Everything is here. Unpacking it, which takes a minute or two without output ..." ;;
        esac
    done
}

pip_install() { # a pipe hides the exit status, hence the mark
    rm -f "$VENV/.setup-done"
    { "$VENV/bin/python" -m pip install --no-deps "$@" && : >"$VENV/.setup-done"; } 2>&1 | tee -a "$VENV/setup.log" | progress
    [ -f "$VENV/.setup-done" ] || {
        tail -n 15 "$VENV/setup.log" >&2
        stop "The installation stopped; all of pip's output is in $VENV/setup.log. Run the same command again to go on: what was downloaded is kept."
    }
}

marks() { # what must have been done, in words that change when it must be done again
    where=$(cd "$VENV" 2>/dev/null && pwd -P) || where=
    lock_now="$(cksum <"$LOCK") $where"
    project_now="$(cksum <pyproject.toml) $(pwd -P)"
    # One environment may serve several projects: each has its own mark.
    project_mark="$VENV/.setup-$(sed -n '/^\[project\]/,/^\[/s/^name = "\(.*\)"/\1/p' pyproject.toml)"
}

marks
if is "$VENV/.setup-lock" "$lock_now" && is "$project_mark" "$project_now" && suitable "$VENV/bin/python"; then
    [ $# = 0 ] || echo "Ready: $VENV is what $LOCK says."
    exit 0
fi

# Scripts in a virtual environment hold its path: a moved one is made anew, like a broken one.
moved() { [ -f "$VENV/.setup-where" ] && ! is "$VENV/.setup-where" "$where"; }
if moved || ! suitable "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    # Only what this script made is removed.
    [ -f "$VENV/.setup-where" ] || [ -z "$(ls -A "$VENV" 2>/dev/null)" ] ||
        stop "$VENV is there already, but not as an environment of Python 3.11 to 3.13 with pip. Remove it, or name another: make setup VENV=.venv"
    case $(uname -sm) in "Darwin x86_64") stop "PyTorch has ended its builds for Intel Macs: use Linux, an Apple silicon Mac, or the dev container." ;; esac
    find_python
    echo "Making $VENV with $("$python" -V) ($python) ..."
    mkdir -p "$VENV"
    find "$VENV/" -mindepth 1 -delete
    marks
    echo "$where" >"$VENV/.setup-where"
    "$python" -m venv "$where"
fi
: >"$VENV/setup.log"

if ! is "$VENV/.setup-lock" "$lock_now"; then
    if [ -f "$VENV/.setup-lock" ]; then
        echo "$LOCK has changed: bringing $VENV up to date ..."
    else
        echo "Installing what $LOCK names ($(grep -c '==' "$LOCK") packages), once ..."
        if [ "$(uname -s)" = Linux ] && grep -q '^torch==' "$LOCK"; then
            echo "  With PyTorch for CUDA: about 3 GB to download, 6 GB on disk, 2 to 5 minutes on a good line."
        fi
    fi
    rm -f "$VENV/.setup-lock"
    # Some packages come as source. The setuptools of the lock builds them, not whichever is newest today.
    sed -n '/^setuptools==/,/[^\\]$/p' "$LOCK" >"$VENV/.setup-first"
    pip_install --quiet --require-hashes -r "$VENV/.setup-first"
    pip_install --require-hashes --no-build-isolation -r "$LOCK"
    echo "$lock_now" >"$VENV/.setup-lock"
fi
if ! is "$project_mark" "$project_now"; then
    pip_install --quiet --no-build-isolation -e .
    echo "$project_now" >"$project_mark"
fi
echo "Ready: $VENV is what $LOCK says, with this project in it."
