"""Tries what is shipped in a bare Debian: a tree made by debootstrap, entered by chroot. For root, on Linux, without
Docker.

    python tools/bare_debian.py image                                the steps of deploy/Dockerfile, a start, and sizes
    python tools/bare_debian.py wheel dist/quire-*.whl               a wheel in an empty environment, without a compiler
    python tools/bare_debian.py wheel WHEEL --suite bullseye --python /opt/python      on an older C library

`image` reads the Dockerfile: RUN, COPY, ARG, ENV, WORKDIR and USER do there what they do in Docker, but the Python is
Debian's own. Trees lie in --work, and bases are used again. `--wheels` names a folder of wheels that are taken before
PyPI's, such as the CPU build of torch; without a network they are all that there is.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# what Python brings beside itself in the image
PACKAGES = {"bookworm": ["python3", "python3-venv"]}
# of a Python that was compiled elsewhere
LIBRARIES = {"bullseye": ["libffi7", "libssl1.1", "libsqlite3-0", "liblzma5", "libbz2-1.0", "zlib1g"]}
PORT = 18417
QUESTION = {"messages": [{"role": "user", "content": "What is seven plus five?"}], "max_tokens": 16}
START_SECONDS = 600.0
# for one small package
INDEX_SECONDS = 60.0


class Tree:
    """A root of a system that commands run in."""

    def __init__(self, root: Path, mounts: Sequence[tuple[str, str]] = ()) -> None:
        """`mounts`: folders of this machine, and where they are seen."""
        self.root = root
        self.mounts = [("/dev", "/dev"), *mounts]
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}

    def command(self, command: Sequence[str], folder: str = "/", user: str = "") -> list[str]:
        """As it is started on this machine, with mounts that end with it."""
        inside = f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"
        lines = [f"mount -t proc proc {self.root}/proc"]
        for source, target in self.mounts:
            lines += [f"mkdir -p {self.root}{target}", f"mount --rbind {source} {self.root}{target}"]
        who = f"--userspec={user} " if user else ""
        variables = shlex.join(f"{name}={value}" for name, value in self.environment.items())
        lines.append(f"exec chroot {who}{self.root} /usr/bin/env -i {variables} /bin/sh -c {shlex.quote(inside)}")
        return ["unshare", "--mount", "sh", "-ec", "\n".join(lines)]

    def run(self, command: Sequence[str], folder: str = "/") -> None:
        subprocess.run(self.command(command, folder), check=True)


def base_of(suite: str, work: Path, packages: Sequence[str]) -> Path:
    """A tree of this Debian, with these packages and nothing else."""
    base = work / f"base-{suite}"
    if not base.exists():
        making = base.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)
        include = ",".join(["ca-certificates", *packages])
        command = ["debootstrap", "--variant=minbase", f"--include={include}", suite, str(making), MIRROR]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        making.rename(base)
    return base


def copy_of(base: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", str(base), str(target)], check=True)
    return target


# ---------------------------------------------------------------------------------------------------- pip


def pip_settings(tree: Tree, python: str, links: str) -> dict[str, str]:
    """Variables for pip. Ends the program where pip would find nothing: it tries again for minutes, one package after
    another, and says nothing of it."""
    wheels = {"PIP_FIND_LINKS": links} if links else {}
    if reaches_packages(tree, python):
        return wheels
    if not links:
        raise SystemExit(
            "pip reaches no packages from here: there is no network, or no name of a host is found. Connect this "
            "machine, or give --wheels FOLDER with the wheels of all that quire needs (pip download -d FOLDER)."
        )
    print("pip reaches no packages from here: only those of --wheels are taken", flush=True)
    return {**wheels, "PIP_NO_INDEX": "1"}


def reaches_packages(tree: Tree, python: str) -> bool:
    tree.run([python, "-m", "venv", "/tmp/probe"])
    few_tries = ["--no-deps", "--no-cache-dir", "--retries=0", "--timeout=10"]
    command = tree.command(["/tmp/probe/bin/pip", "download", *few_tries, "--dest=/tmp/probe", "pip"])
    try:
        done = subprocess.run(command, timeout=INDEX_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.rmtree(tree.root / "tmp/probe", ignore_errors=True)
    return done.returncode == 0


# ---------------------------------------------------------------------------------------------------- a Dockerfile


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each with its arguments; lines that go on are joined, comments are left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word, rest.strip()


class Build:
    """The stages of a Dockerfile, one tree each."""

    def __init__(self, base: Path, work: Path, arguments: dict[str, str], mounts: Sequence[tuple[str, str]]) -> None:
        self._base = base
        self._work = work
        self._arguments = arguments
        self._mounts = mounts
        self._trees: dict[str, Tree] = {}
        self.folder = "/"
        self.user = ""
        self.command: list[str] = []
        self.entry: list[str] = []

    @property
    def tree(self) -> Tree:
        return list(self._trees.values())[-1]

    def do(self, word: str, rest: str) -> None:
        print(f"{word} {rest[:100]}", flush=True)
        match word:
            case "FROM":
                name = rest.partition(" AS ")[2] or "last"
                tree = Tree(copy_of(self._base, self._work / f"stage-{name}"), self._mounts)
                python = tree.root / "usr/local/bin/python"
                if not python.exists():
                    python.symlink_to("/usr/bin/python3")
                tree.environment["PIP_CERT"] = CERTIFICATES
                self._trees[name] = tree
                self.folder = "/"
            case "ARG":
                name, _, default = rest.partition("=")
                self.tree.environment[name] = self._arguments.get(name, default)
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    self.tree.environment[name] = value.replace("$PATH", self.tree.environment["PATH"])
            case "WORKDIR":
                self.folder = rest
                (self.tree.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "RUN":
                self.tree.run(["/bin/sh", "-ec", rest], self.folder)
            case "COPY":
                self._copy(rest.split())
            case "USER":
                self.user = rest
            case "ENTRYPOINT":
                self.entry = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)
            case "VOLUME" | "EXPOSE" | "HEALTHCHECK" | "STOPSIGNAL":
                pass
            case _:
                raise SystemExit(f"{word}: not known here")

    def _copy(self, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self._trees[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        place = self.tree.root / os.path.join(self.folder, target).lstrip("/")
        for name in names:
            origin = source / name.lstrip("/")
            if origin.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{origin}/.", str(place)], check=True)
            else:
                shutil.copy2(origin, place)


def build_image(work: Path, mounts: Sequence[tuple[str, str]], links: str, arguments: dict[str, str]) -> int:
    base = base_of("bookworm", work, PACKAGES["bookworm"])
    build = Build(base, work, arguments, mounts)
    settings: dict[str, str] | None = None
    for word, rest in instructions((ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")):
        build.do(word, rest)
        if word == "FROM":
            if settings is None:
                settings = pip_settings(build.tree, "/usr/bin/python3", links)
            build.tree.environment |= settings
    tree = build.tree
    sizes = sizes_of(tree.root, base)
    for size, name in sorted(sizes, reverse=True):
        print(f"{size / 1e6:8.1f} MB compressed  {name}")
    print(f"{sum(size for size, _ in sizes) / 1e6:8.1f} MB compressed in all; the goal is 900", flush=True)
    # the first start packs the model's weights; a container that is started again finds them in its volume
    command = [*build.entry, *build.command, "--port", str(PORT)]
    print(f"first start: {answered(tree, command, build.user)}; second: {answered(tree, command, build.user)}")
    return 0


def sizes_of(root: Path, base: Path) -> list[tuple[int, str]]:
    """Compressed, of the base and of each package of the environment."""
    site = next((root / "opt/quire/lib").glob("python3*/site-packages"))
    parts = [("Debian and Python", [str(base)])]
    rest: list[str] = []
    for path in sorted(site.iterdir()):
        is_large = path.is_dir() and path.suffix != ".dist-info"
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if is_large else 0
        if size > 10e6:
            parts.append((path.name, [str(path)]))
        else:
            rest.append(str(path))
    parts.append(("other packages", [*rest, str(root / "opt/quire/bin")]))
    return [(compressed(paths), name) for name, paths in parts]


def compressed(paths: Sequence[str]) -> int:
    """As a layer of an image is."""
    packing = subprocess.Popen(
        ["tar", "-c", "--exclude=*/dev/*", *paths], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    squeezing = subprocess.Popen(["gzip", "-6"], stdin=packing.stdout, stdout=subprocess.PIPE)
    assert squeezing.stdout is not None
    size = 0
    while piece := squeezing.stdout.read(1 << 20):
        size += len(piece)
    packing.wait()
    squeezing.wait()
    return size


# ---------------------------------------------------------------------------------------------------- a wheel


def try_wheel(
    wheel: Path, suite: str, python: Path | None, work: Path, mounts: Sequence[tuple[str, str]], links: str
) -> int:
    packages = PACKAGES.get(suite, []) if python is None else LIBRARIES.get(suite, [])
    tree = Tree(copy_of(base_of(suite, work, packages), work / f"wheel-{suite}"), mounts)
    interpreter = "/usr/bin/python3"
    if python is not None:
        shutil.copytree(python, tree.root / "opt/python", symlinks=True)
        interpreter = "/opt/python/bin/python3"
    shutil.copy2(wheel, tree.root / "tmp" / wheel.name)
    tree.environment["PIP_CERT"] = CERTIFICATES
    tree.environment |= pip_settings(tree, interpreter, links)
    tree.run([interpreter, "-m", "venv", "/opt/quire"])
    tree.run(["/opt/quire/bin/pip", "install", "--quiet", "--no-cache-dir", "torch>=2.11,<2.14", f"/tmp/{wheel.name}"])
    tree.environment |= {"PATH": "/opt/quire/bin:/bin", "QUIRE_CPU_KERNELS": "jit", "QUIRE_CACHE_DIR": "/tmp/cache"}
    tree.run(["/opt/quire/bin/python", "-c", "import platform; print('C library', *platform.libc_ver())"])
    compilers = [name for name in ("g++", "gcc", "cc", "clang") if (tree.root / "usr/bin" / name).exists()]
    said = answered(tree, ["quire", "serve", "--port", str(PORT)])
    num_compiled = len(list((tree.root / "tmp/cache").rglob("*.so")))
    print(f"{wheel.name}: {said}")
    print(f"compilers there: {compilers or 'none'}; compiled there: {num_compiled}")
    return 0


def answered(tree: Tree, command: Sequence[str], user: str = "") -> str:
    """Starts a server, asks it as soon as it is ready, ends it, and says how long that took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    log = Path(f"{tree.root}.log")
    with log.open("w") as out:
        server = subprocess.Popen(tree.command(command, user=user), stdout=out, stderr=out)
    try:
        while not is_ready():
            if server.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        print(f"it says: {ask()}")
        seconds = time.monotonic() - began
    finally:
        server.terminate()
        server.wait(60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load, _, _ = os.getloadavg()
    return f"answered after {seconds:.1f} s ({busy:.1f} s of processors in all, a load of {load:.0f})"


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def ask() -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(QUESTION).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("image", "wheel"))
    parser.add_argument("wheel", nargs="?", help="of `wheel`; the newest in dist/ if left out")
    parser.add_argument("--work", type=Path, default=ROOT / "build/bare", help="where trees are made")
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--python", type=Path, help="a Python for that suite, made for /opt/python")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that are taken before PyPI's")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SystemExit("Needs root, and debootstrap on the PATH (apt install debootstrap).")
    given.work.mkdir(parents=True, exist_ok=True)
    work = given.work.resolve()
    mounts = [(str(given.wheels.resolve()), "/wheels")] if given.wheels else []
    if Path(CERTIFICATES).exists():
        mounts.append((os.path.dirname(CERTIFICATES), os.path.dirname(CERTIFICATES)))
    links = "/wheels" if given.wheels else ""
    if given.what == "image":
        arguments = dict(pair.split("=", 1) for pair in given.build_arg)
        return build_image(work, mounts, links, arguments)
    found = [given.wheel] if given.wheel else sorted(glob.glob(str(ROOT / "dist/quire-*.whl")), key=os.path.getmtime)
    if not found:
        raise SystemExit("No wheel: make wheel")
    return try_wheel(Path(found[-1]), given.suite, given.python, work, mounts, links)


if __name__ == "__main__":
    sys.exit(main())
