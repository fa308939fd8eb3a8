"""By what the workers of an engine are placed: children of one process on this machine, or Ray on several."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from pathlib import Path

from quire.config.engine_options import EngineOptions
from quire.config.network_addresses import is_of_all_networks
from quire.errors import OptionError

# Where a cluster of Ray that runs on this machine says so.
_RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def resolve_executor_backend(
    options: EngineOptions, num_workers: int, num_weight_bytes: int
) -> tuple[str, tuple[str, str]]:
    """`mp` or `ray`, and why."""
    backend, why = _backend(options, num_workers, num_weight_bytes)
    if backend == "ray":
        _check_host_ip(options.host_ip)
        if options.hf_overrides:
            raise OptionError(
                "hf_overrides: workers on other machines read the model's own files. Leave it out, or write the values "
                "into config.json on every machine."
            )
        if options.data_parallel_size > 1:
            raise OptionError(
                f"data_parallel_size={options.data_parallel_size}: copies of an engine are processes of this machine. "
                "Leave out distributed_executor_backend=ray, or have Ray Serve place whole copies (quire deploy)."
            )
    elif options.host_ip is not None:
        raise OptionError(
            f"host_ip={options.host_ip}: nothing listens there, because all workers are on this machine. Leave it out, "
            "or choose distributed_executor_backend=ray."
        )
    return backend, (backend, why)


def _backend(options: EngineOptions, num_workers: int, num_weight_bytes: int) -> tuple[str, str]:
    asked = options.distributed_executor_backend
    if num_workers == 1:
        if asked == "ray":
            raise OptionError(
                "distributed_executor_backend=ray: it places several workers that share a model, and there is one. "
                "Give tensor_parallel_size or pipeline_parallel_size, or leave it out."
            )
        return "mp", "there is one worker"
    if asked is not None:
        return asked, "as asked"
    here = _memory_bytes()
    # what is quantised while it is read takes less than its file; nobody knows yet how much
    if num_weight_bytes * options.data_parallel_size <= here or options.quantization is not None:
        return "mp", "the weights fit into the memory of this machine"
    if _has_ray():
        return "ray", "the weights do not fit into the memory of this machine, and a cluster of Ray runs here"
    raise OptionError(
        f"distributed_executor_backend: the weights take {num_weight_bytes / 2**30:.1f} GiB, this machine has "
        f"{here / 2**30:.1f} GiB, and no cluster of Ray runs here (pip install 'quire[ray]', ray start). Choose ray "
        "once it runs, mp if they fit here all the same, or a smaller model."
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _has_ray() -> bool:
    is_running = bool(os.environ.get("RAY_ADDRESS")) or _RAY_CLUSTER.exists()
    return is_running and importlib.util.find_spec("ray") is not None


def _check_host_ip(host_ip: str | None) -> None:
    if host_ip is None:
        raise OptionError(
            "host_ip: distributed_executor_backend=ray listens for the workers of other machines, and only where it is "
            "told to. Give the address of this machine in their network; 127.0.0.1 if there are none."
        )
    try:
        address = ipaddress.ip_address(host_ip)
    except ValueError:
        raise OptionError(f"host_ip={host_ip}: must be an address of this machine, such as 10.0.0.5.") from None
    if is_of_all_networks(host_ip) or address.is_multicast:
        raise OptionError(
            f"host_ip={host_ip}: stands for many networks, and workers listen in one of them. Give the address of "
            "this machine in the network of the others."
        )
