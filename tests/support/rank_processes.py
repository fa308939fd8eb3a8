"""The processes of ranks below a server, as the system lists them."""

import os
from collections.abc import Iterator
from pathlib import Path


def ranks_of(server_pid: int) -> list[int]:
    """Processes of further ranks below this one, by what they run; the core's, which is rank 0, is their parent."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_text()
            if "rank_process" in command and server_pid in ancestors(int(name)):
                found.append(int(name))
        except OSError:
            continue
    return sorted(found)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def is_there(pid: int) -> bool:
    """And has not ended: a zombie that nobody has waited for is no process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
