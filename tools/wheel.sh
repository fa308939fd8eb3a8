#!/usr/bin/env bash
# Makes dist/quire-*.whl with the C++ kernels inside. Called by `make wheel`.
#
#   --check       installs it into a new environment, and asks a server there without a compiler on the PATH
#   PYTHON_ENV    the environment with torch and Quire's other dependencies; default: .venv
#   BUILD         a Python that has the package `build`; default: that environment's, which then gets it
set -euo pipefail
cd -P "$(dirname "$0")/.."

readonly PYTHON=${PYTHON_ENV:-.venv}/bin/python PREBUILT=src/quire/csrc/cpu/prebuilt
say() { printf 'wheel: %s\n' "$*"; }
fail() { printf 'wheel: %s\n' "$@" >&2; exit 1; }

[ -n "${BUILD:-}" ] || "$PYTHON" -m pip install --quiet build
trap 'rm -rf "$PREBUILT"' EXIT
PYTHONPATH=src "$PYTHON" -m quire.worker.kernels.cpu.build --for-wheel
if command -v objdump >/dev/null; then
    newest=$(objdump -T "$PREBUILT"/*.so | grep -oE '\b(GLIBC|GLIBCXX)_[0-9.]+' | sort -uV | awk -F_ '{n[$1] = $0} END {for (k in n) printf "%s ", n[k]}')
    say "the kernels need ${newest}or newer"
fi
# From the tree: a source distribution has no compiled kernels.
"${BUILD:-$PYTHON}" -m build --wheel --outdir dist . >/dev/null
wheel=$(ls -t dist/quire-*.whl | head -1)
say "$wheel, $(($(stat -c %s "$wheel") / 1024)) KiB"
[ "${1:-}" = --check ] || exit 0

rm -rf "$PREBUILT"
dependencies=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
place=$(mktemp -d)
server=
trap 'rm -rf "$PREBUILT" "$place"; [ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT
"$PYTHON" -m venv "$place/env"
"$place/env/bin/python" -m pip install --quiet --no-deps "$wheel"
# What Quire depends on is shared with the environment it was built in: this is about the wheel alone.
echo "$dependencies" >"$("$place/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
mkdir "$place/cache"
cd "$place"
began=$(date +%s)
env -i HOME="$place" PATH="$place/env/bin" QUIRE_CACHE_DIR="$place/cache" QUIRE_CPU_KERNELS=jit \
    "$place/env/bin/quire" serve --port 0 >"$place/out" 2>"$place/log" &
server=$!
until url=$(grep -oE 'http://127.0.0.1:[0-9]+' "$place/out" | head -1) && [ -n "$url" ]; do
    kill -0 "$server" 2>/dev/null || fail "the server ended:" "$(tail -5 "$place/log")"
    sleep 0.2
done
say "serves $(($(date +%s) - began)) s after its start, without a compiler; compiled there: $(find "$place/cache" -name '*.so' | wc -l)"
"$place/env/bin/python" - "$url" <<'END'
import json, sys, urllib.request
body = {"model": "quire-embedded", "messages": [{"role": "user", "content": "What is seven plus five?"}]}
request = urllib.request.Request(
    sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
print("wheel: it says:", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
END
