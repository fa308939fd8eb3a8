"""Every option of the server, declared once: the keyword of `run_server`, the flag of `quire serve`, the row in
docs/options.md and the check derive from its line. Light, because the command line reads it for `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.option import option
from quire.observability.metric_prefixes import OWN_PREFIX, PREFIXES


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a user may say about the server; what is about the engine stands in EngineOptions."""

    # access
    api_keys: tuple[str, ...] = option(
        (), "key that clients must send; QUIRE_API_KEY in the environment (several: with spaces between them) does the "
        "same and is not seen in the list of processes",
        section="access", flag="--api-key",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "file of keys, tenants and quotas, of mode 0600 (docs/tenants.md); `quire api-key` makes lines for it",
        section="access",
    )  # fmt: skip
    admin_api_key: str | None = option(
        None, "key for /v1/admin/*, without which these addresses do not exist on a server with keys or one that other "
        "machines reach; QUIRE_ADMIN_API_KEY in the environment does the same",
        section="access",
    )  # fmt: skip
    admin_port: int | None = option(
        None, "port of its own for /v1/admin/*, which then leave the main port; 0 means any free one",
        section="access", least=0, greatest=65535,
    )  # fmt: skip
    admin_host: str = option(
        "127.0.0.1", "address of the admin port; others than this machine's own need admin_api_key", section="access"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web page that may call this server from a browser", section="access", flag="--allowed-origin"
    )

    root_path: str | None = option(
        None, "prefix of all paths, where a proxy hands requests on with it; paths without it are served as well",
        section="access",
    )  # fmt: skip

    # listening
    uds: str | None = option(
        None, "path of a Unix socket to listen on instead of host and port; who may open it is decided by its folder",
        section="listening",
    )  # fmt: skip
    ssl_certfile: str | None = option(
        None, "certificate for TLS, with those between it and its root, in PEM form; read again when it changes",
        section="listening",
    )  # fmt: skip
    ssl_keyfile: str | None = option(
        None, "its key without a password, where the certificate's file has none", section="listening"
    )

    # requests
    force_include_usage: bool = option(
        False, "streams of chats and completions count their tokens in every event, as if asked with stream_options",
        section="requests",
    )  # fmt: skip
    enable_per_request_metrics: bool = option(
        False, "answers of chats and completions tell their times: in metrics, of a stream in the event with usage",
        section="requests",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = option(
        False, "tokens of log-probabilities are called token_id:N, unless a request says otherwise", section="requests"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None, "values that the chat template sees unless a request gives others: {\"enable_thinking\": false}",
        section="requests",
    )  # fmt: skip
    trust_request_chat_template: bool = option(
        False, "a chat may bring its own chat_template: a program that runs in a sandbox and within bounds",
        section="requests",
    )  # fmt: skip
    tokenizer_info: bool = option(
        False, "GET /tokenizer_info shows the tokenizer's settings and the chat template", section="requests"
    )
    model_aliases: tuple[str, ...] = option(
        (), "name of another model, or a pattern such as 'claude-*', that is answered by the one that is served",
        section="requests", flag="--model-alias",
    )  # fmt: skip
    strict: bool = option(False, "refuse requests with unknown fields", section="requests")
    max_body_bytes: int = option(
        32 * 2**20, "largest body; also all pieces of a prompt together", section="requests", least=1, unit="bytes"
    )
    max_text_body_bytes: int = option(
        8 * 2**20, "largest body of a request that is JSON", section="requests", least=1, unit="bytes"
    )
    max_num_queued_requests: int = option(
        1024, "sequences that may wait to begin; more are refused with 429", section="requests", least=1
    )
    max_num_queued_tokens: int | None = option(
        None, "prompt tokens that may wait to begin; by default four times what the KV cache holds",
        section="requests", least=1, unit="tokens",
    )  # fmt: skip
    max_queue_seconds: float = option(
        60.0, "longest wait before a request begins; then it is ended with 503", section="requests", least=0.001,
        unit="seconds",
    )  # fmt: skip
    max_request_seconds: float = option(
        600.0, "longest time from a request's acceptance to its end; then it is ended with 504", section="requests",
        least=0.001, unit="seconds",
    )  # fmt: skip
    first_byte_seconds: float = option(
        10.0, "a connection is closed if a request's head, or the first message of a WebSocket, does not arrive whole "
        "in this time; a JSON body that stands still so long is refused with 408 (uploads and prompts in pieces have "
        "60 seconds)",
        section="requests", least=0.001, unit="seconds",
    )  # fmt: skip
    keep_alive_seconds: int = option(
        75, "how long an idle connection stays open for another request", section="requests", least=1, unit="seconds"
    )

    max_unfinished_connections: int = option(
        128, "connections of one address that have not said yet what they want: a head that is not whole, a WebSocket "
        "without a message; of more the oldest is closed. This machine and proxy_addresses are not bounded",
        section="requests", least=1,
    )  # fmt: skip
    proxy_addresses: tuple[str, ...] = option(
        (), "address or network (10.0.0.0/8) of a proxy in front of this server, through which many clients come",
        section="requests", flag="--proxy-address",
    )  # fmt: skip

    # further models
    further_models: tuple[str, ...] = option(
        (), "directory or hub name of a model that is loaded when a request names it, in a process of its own, and "
        "leaves when nobody has used it; what came first leaves first where memory is short",
        section="further models", flag="--further-model",
    )  # fmt: skip
    further_models_memory: int = option(
        4 * 2**30, "room for those that are loaded: program, weights, largest step and 512 MiB of KV cache each",
        section="further models", least=1, unit="bytes",
    )  # fmt: skip
    further_models_keep_alive: float = option(
        300.0, "one that nobody uses for so long leaves; Ollama's keep_alive in a request decides for that model",
        section="further models", least=0, greatest=86400, unit="seconds",
    )  # fmt: skip

    further_models_load_timeout: float = option(
        300.0, "one that is not ready in this time is given up, and its requests are refused with 503",
        section="further models", least=0.1, greatest=86400, unit="seconds",
    )  # fmt: skip

    # adapters
    adapter_root: str | None = option(
        None, "folder below which /v1/load_lora_adapter finds adapters by name; without it none are loaded over HTTP",
        section="adapters",
    )  # fmt: skip

    # weights
    weights_root: str | None = option(
        None, "folder below which /v1/admin/update_weights finds files; without it none are taken over HTTP",
        section="adapters",
    )  # fmt: skip

    # tenants
    tenant_max_requests: int | None = option(
        None, "sequences that one key's tenant may have in flight, where the key file says nothing else",
        section="tenants", least=1,
    )  # fmt: skip
    tenant_max_queued_requests: int | None = option(None, "of them, those that wait", section="tenants", least=1)
    tenant_tokens_per_minute: int | None = option(
        None, "tokens of prompts and outputs that a tenant may use in a minute, averaged", section="tenants", least=1
    )
    share_prefix_cache: bool = option(
        False, "let tenants use what others have computed; each can then find out by the time of an answer what others "
        "asked",
        section="tenants",
    )  # fmt: skip
    tenant_secret: str | None = option(
        None, "secret from which tenants' parts of the prefix cache are named, for replicas that share a cache; random "
        "by default; QUIRE_TENANT_SECRET in the environment does the same",
        section="tenants",
    )  # fmt: skip

    # seeing what goes on
    metrics_prefix: str = option(
        OWN_PREFIX, "of the names of metrics; vllm: gives those that mean the same the names of vLLM",
        section="observability", choices=PREFIXES,
    )  # fmt: skip
    enable_request_id_headers: bool = option(
        False, "answers to probes (/health, /ping, /version) bear the header x-request-id, too, as all others do",
        section="observability",
    )  # fmt: skip
    otlp_endpoint: str | None = option(
        None, "address of an OpenTelemetry collector that takes traces over HTTP, such as http://127.0.0.1:4318",
        section="observability",
    )  # fmt: skip

    # storage
    storage_url: str | None = option(
        None, "database where responses, batches and names of files are kept, such as sqlite:////srv/quire/server.db "
        "or postgresql+psycopg://user@host/name; sqlite:///:memory: forgets them at the end (default: an SQLite file "
        "in the user's data folder, made when something is stored)",
        section="storage",
    )  # fmt: skip
    storage_max_bytes: int = option(
        2**30, "room for all that is stored; what was not used for longest is deleted first", section="storage",
        least=1, unit="bytes",
    )  # fmt: skip
    storage_max_days: float = option(
        30.0, "what nobody used for so long is deleted", section="storage", least=0, greatest=36500, unit="days"
    )
    # files and batches
    files_folder: str | None = option(
        None, "folder of uploaded files and of the results of batches; beside the database of storage_url if left out",
        section="files and batches",
    )  # fmt: skip
    max_file_bytes: int = option(
        512 * 2**20, "largest file that may be uploaded", section="files and batches", least=1, unit="bytes"
    )
    max_tenant_file_bytes: int = option(
        10 * 2**30, "room for all files of one tenant", section="files and batches", least=1, unit="bytes"
    )
    max_batch_lines: int = option(
        50_000, "requests in one batch", section="files and batches", least=1, greatest=1_000_000
    )
    max_batch_concurrency: int = option(
        16, "requests of batches that run at a time; they give way to all others", section="files and batches", least=1,
        greatest=4096,
    )  # fmt: skip

    # sessions
    max_sessions: int = option(64, "open sessions of one tenant", section="sessions", least=1, greatest=100_000)
    max_session_tokens: int | None = option(
        None, "tokens that the sessions of one tenant may keep together; no bound if left out", section="sessions",
        least=1,
    )  # fmt: skip
    session_idle_timeout: float = option(
        600.0, "a session that nobody uses for so long is closed", section="sessions", least=0.1, greatest=30 * 86400,
        unit="seconds",
    )  # fmt: skip

    # life
    api_server_count: int = option(
        1, "processes that answer HTTP in front of the engine or its copies; what is kept (sessions, batches, "
        "responses and so on) is the first one's", section="life", least=1, greatest=64,
    )  # fmt: skip
    shutdown_timeout: float = option(
        30.0, "how long running requests may go on after a first signal", section="life", least=0, greatest=86400,
        unit="seconds",
    )  # fmt: skip
    stall_timeout: float | None = option(
        None, "an engine that has work and makes no progress for so long is killed and started again; by default 30 on "
        "a CPU and 120 on a GPU; large steps have longer", section="life", least=0.1, greatest=86400, unit="seconds",
    )  # fmt: skip
    max_engine_restarts: int = option(
        3, "an engine that died is started again so often within engine_restart_window; then the server ends with "
        "status 70", section="life", least=0, greatest=1000000,
    )  # fmt: skip
    engine_restart_window: float = option(
        60.0, "see max_engine_restarts", section="life", least=0.1, greatest=86400, unit="seconds"
    )
    crash_reports: str = option(
        "auto", "folder for one file a death of the engine, the newest 20; auto: crash_reports in the user's cache; "
        "none: no files", section="life",
    )  # fmt: skip
