"""What the endpoints of one server share. Each takes the parts that it needs from `app.state`; nothing is global."""

from __future__ import annotations

from typing import Any

from quire.config.images import MOST_OPEN_BYTES
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.form import Forms
from quire.interfaces.server.further_models import FurtherModels, configs_of
from quire.interfaces.server.life.log_level import LogLevelOfEngine
from quire.interfaces.server.observing.observed import Observed
from quire.interfaces.server.openai.sound_room import SoundRoom
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
    memory = options.further_models_memory
    configs = configs_of(options.further_models, memory)
    further = FurtherModels(
        configs,
        memory,
        options.further_models_keep_alive,
        check_place=_check_place,
        load_seconds=options.further_models_load_timeout,
        restarts=(options.max_engine_restarts, options.engine_restart_window),
    )
    models = Models(
        metrics,
        options.model_aliases,
        further,
        num_processes=options.api_server_count,
        template_kwargs=options.default_chat_template_kwargs,
        client=_client,
    )
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
        "forms": Forms(options.first_byte_seconds, options.max_queue_seconds),
        "sound_room": SoundRoom(MOST_OPEN_BYTES // options.api_server_count, metrics.rejected),
        "in_flight": in_flight,
        "metrics": metrics,
        "log_level": log_level,
        "tracing": tracing,
        "role": role,
        "siblings": role.siblings,
        "services": NoServices(),
        "observed": Observed(metrics, siblings=role.siblings),
        "force_include_usage": options.force_include_usage,
        "trusts_templates": options.trust_request_chat_template,
        "names_tokens_by_id": options.return_tokens_as_token_ids,
        "shows_times": options.enable_per_request_metrics,
        "shows_tokenizer_info": options.tokenizer_info,
        "adapter_root": options.adapter_root,
        "weights_root": options.weights_root,
        "max_body_bytes": options.max_body_bytes,
        "max_request_seconds": options.max_request_seconds,
    }


def _client() -> str | None:
    """Without keys all are the same caller, and nobody knows who is who."""
    caller = current_caller()
    return None if caller.is_alone else caller.name


def _check_place() -> None:
    """For one more request of the current caller."""
    caller = current_caller()
    caller.admission.check(caller.tenant, 1)
