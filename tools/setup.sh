#!/usr/bin/env bash
# Creates .venv and installs Quire into it, with what the tests need. Called by `make setup`; it says what it does.
#
#   PYTHON        the interpreter to use; default: the first of python3, python3.11 .. 3.13 that can make a venv
#   TORCH_INDEX   an index of CPU wheels of torch, for machines where plain pip would take a CUDA build
#
# The stamp, written last, holds the folder: a tree that was moved is set up anew. The marker stands while an
# installation runs: where it is found, an earlier one was interrupted, and the venv is made from nothing again.
set -euo pipefail
cd -P "$(dirname "$0")/.." # -P: make knows the tree by its physical path

readonly VENV=.venv STAMP=.venv/.quire-ready MARKER=.venv/.quire-unfinished
readonly PROBE_SECONDS=10

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
version_of() { "$1" -V 2>/dev/null || echo "not there, or it does not run"; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

# Sets `python`. A name on the PATH may be a shim that does not run, so each candidate is tried.
find_python() {
    local candidate without_venv="" version
    for candidate in ${PYTHON:-python3 python3.12 python3.13 python3.11}; do
        is_supported "$candidate" || continue
        if has_venv "$candidate"; then
            python=$candidate
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$without_venv is Python $version, but its venv module is incomplete, so no .venv can be made." \
             "Install it:  sudo apt install python$version-venv   and run make again."
    fi
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON: Python 3.11, 3.12 or 3.13 is needed, this one: $(version_of "$PYTHON")." \
             "Name another one with  make ... PYTHON=/path/to/python3.12"
    fi
    fail "Python 3.11, 3.12 or 3.13 is needed; none is on the PATH (python3: $(version_of python3))." \
         "Install it:  sudo apt install python3 python3-venv   or name one:  make ... PYTHON=/path/to/python3.12"
}

is_ready() {
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$PWD" ] && [ ! "$STAMP" -ot pyproject.toml ] && [ ! "$STAMP" -ot "$0" ]
}

# A venv is kept if it was left whole: right folder, right Python, working pip, no marker.
is_whole() {
    [ ! -e "$MARKER" ] && is_supported "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 &&
        { [ ! -f "$STAMP" ] || [ "$(cat "$STAMP")" = "$PWD" ]; }
}

# Prints the options for pip that belong to TORCH_INDEX. An index that does not answer is left out, and said.
torch_index_options() {
    [ -n "${TORCH_INDEX:-}" ] || return 0
    local answer
    # `timeout` also covers what a socket's own limit does not: the look-up of the name.
    if answer=$(timeout "$PROBE_SECONDS" "$python" - "${TORCH_INDEX%/}/torch/" "$PROBE_SECONDS" 2>&1 <<'PROBE'
import sys, urllib.request
url, seconds = sys.argv[1:]
if "://" not in url or url.startswith("file:"):  # a folder: pip reads it at once or says why not
    sys.exit()
try:
    urllib.request.urlopen(url, timeout=float(seconds)).close()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
PROBE
    ); then
        printf -- '--extra-index-url=%s\n' "$TORCH_INDEX"
    else
        say "TORCH_INDEX=$TORCH_INDEX does not answer (${answer:-no reply within $PROBE_SECONDS s}); going on with pip's own index." >&2
    fi
}

main() {
    # Two commands may start at once (make serve, make test): the second waits here, then finds the work done.
    if command -v flock >/dev/null; then
        exec 9<pyproject.toml
        flock -n 9 || { say "waiting for another set-up of this tree"; flock 9; }
    fi
    if is_ready; then return; fi

    if is_whole; then
        python=$VENV/bin/python
        say "updating $VENV"
    else
        find_python
        say "creating $VENV with $("$python" -V)"
        "$python" -m venv --clear "$VENV" || fail "$python -m venv failed." "On Debian and Ubuntu:  sudo apt install python3-venv"
    fi
    rm -f "$STAMP"
    : >"$MARKER"

    local options
    mapfile -t options < <(torch_index_options)
    say "installing Quire and its dependencies (1.3 GB on disk with a CPU build of torch; a minute or two)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "${options[@]}" --editable '.[test]' ||
        fail "pip could not install Quire; its reason stands above. Nothing is lost: make setup starts again."

    printf '%s\n' "$PWD" >"$STAMP"
    rm -f "$MARKER"
    say "done"
}

main
