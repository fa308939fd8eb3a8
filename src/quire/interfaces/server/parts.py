"""What the endpoints of one server share. Each takes the parts that it needs from `app.state`; nothing is global."""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.life.log_level import LogLevelOfEngine
from quire.interfaces.server.observing.observed import Observed
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.request_body import Bodies
from quire.interfaces.server.served_model import Models
from quire.interfaces.server.services import NoServices
from quire.interfaces.server.serving import Serving
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import Tracing


def parts_of(options: ServerOptions, tracing: Tracing | None = None, role: ProcessRole | None = None) -> dict[str, Any]:
    """By their names in `app.state`."""
    role = role or ProcessRole()
    metrics = ServerMetrics(options.metrics_prefix)
    in_flight = InFlight(lambda kind: metrics.requests_aborted.add(1, kind))
    serving = Serving()
    models = Models(metrics)
    bodies = Bodies(options, in_flight)
    log_level = LogLevelOfEngine()
    serving.listeners += [
        models.serve,
        bodies.serve,
        lambda engine: metrics.set_model_name(engine.config.served_model_name),
        log_level.engine_serves,
    ]
    return {
        "serving": serving,
        "models": models,
        "bodies": bodies,
        "in_flight": in_flight,
        "metrics": metrics,
        "log_level": log_level,
        "tracing": tracing,
        "role": role,
        "siblings": role.siblings,
        "services": NoServices(),
        "observed": Observed(metrics, siblings=role.siblings),
        "adapter_root": options.adapter_root,
        "weights_root": options.weights_root,
        "max_body_bytes": options.max_body_bytes,
        "max_request_seconds": options.max_request_seconds,
    }
