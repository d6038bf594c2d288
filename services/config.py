"""The API service's settings. Where their values come from (flags, environment, files) is not decided here."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import settings
from protocol.settings import setting


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Everything one API process needs to know. Raises SettingError for a value outside what is allowed."""

    model: str = setting("", help="path of the model (GGUF file or Hugging Face directory): tokenizer, chat template")
    served_model_name: str = setting("smollm2-135m-instruct", help="the model's name in requests and answers")
    model_alias: tuple[str, ...] = setting((), help="further names that requests may use for the model")
    accept_any_model: bool = setting(False, help="answer requests for any model name instead of 404")
    chat_template: str = setting("", help="path of a chat template that replaces the model's own")
    tool_call_parser: str = setting(
        "auto",
        help="format in which the model calls tools; `auto`: as its chat template shows",
        choices=("auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder"),
    )
    reasoning_parser: str = setting(
        "auto",
        help="how the model marks its thoughts; `qwen3`: when it does so, `deepseek_r1`: every answer begins with them",
        choices=("auto", "none", "qwen3", "deepseek_r1"),
    )
    generation_config: str = setting(
        "auto",
        help="`auto`: sampling defaults from the model's generation_config.json; `none`: OpenAI's defaults",
        choices=("auto", "none"),
    )
    host: str = setting("127.0.0.1", help="address the HTTP server binds")
    port: int = setting(8000, help="TCP port of the HTTP server; 0 picks a free one", minimum=0, maximum=65535)
    uds: str = setting("", help="path of a unix socket to serve HTTP on instead of host and port")
    listen_fd: int = setting(
        -1, help="inherited descriptor of a listening socket to serve HTTP on instead; -1: none", minimum=-1
    )
    process_number: int = setting(
        0,
        help="this process's number among several API processes with one runtime_dir; 0: it is the only one",
        minimum=0,
        maximum=255,
    )
    runtime_dir: str = setting("/tmp/triptych", help="private directory (0700) for sockets")
    scheduler_address: str = setting(
        "", help="ZeroMQ address of the scheduler; empty: ipc://{runtime_dir}/scheduler.sock"
    )
    curve_key_file: str = setting(
        "", help="key pair that `triptych keygen` wrote; over TCP the scheduler must have the same pair"
    )
    log_level: str = setting("info", help="lowest level that is logged", choices=("debug", "info", "warning", "error"))
    log_interval_s: float = setting(10.0, help="time between summary lines in the log; 0: none", unit="s", minimum=0)
    metrics_port: int = setting(0, help="extra TCP port for /metrics alone; 0: none", minimum=0, maximum=65535)
    metrics_host: str = setting("127.0.0.1", help="address of the extra metrics port")
    metrics_open: bool = setting(False, help="serve /metrics on the HTTP port without an API key")
    api_key: tuple[str, ...] = setting((), help="keys that clients must send as bearer token; none: open", secret=True)
    api_key_file: str = setting(
        "",
        help="file with further API keys, one per line, each perhaps with tenant=, priority=, requests_per_minute=, "
        "tokens_per_minute=, concurrent_requests=; only for its owner to read; read again when it changes",
    )
    admin_key: tuple[str, ...] = setting(
        (), help="further keys, whose bearers also see the requests of others", secret=True
    )
    allowed_origins: tuple[str, ...] = setting((), help="origins that browsers may call from (CORS); `*` for all")
    ssl_certfile: str = setting("", help="PEM file with the server's certificate chain: HTTPS instead of HTTP")
    ssl_keyfile: str = setting("", help="PEM file with its private key; empty: it is in ssl_certfile")
    max_body_bytes: int = setting(32 * 2**20, help="largest request body", unit="bytes", minimum=1024)
    body_timeout_s: float = setting(
        60.0, help="how long a client may take to send a request body; 0: for ever", unit="s", minimum=0
    )
    max_choices: int = setting(
        1024, help="most choices (prompts times n) that one HTTP request may ask for", minimum=1, maximum=16384
    )
    engine_wait_s: float = setting(
        30.0, help="how long requests wait for an absent scheduler or runner before they fail", unit="s", minimum=0
    )
    request_timeout_s: float = setting(0.0, help="longest life of one request; 0: no limit", unit="s", minimum=0)
    heartbeat_timeout_s: float = setting(
        3.0, help="silence of the scheduler after which /health fails", unit="s", minimum=1
    )
    stall_timeout_s: float = setting(
        60.0, help="work pending without a finished step after which /health fails", unit="s", minimum=1
    )
    write_timeout_s: float = setting(
        60.0, help="how long a client may lag behind in reading before it is cut off; 0: for ever", unit="s", minimum=0
    )
    sse_ping_s: float = setting(
        15.0, help="silence on a stream after which a comment is sent; 0: no comments", unit="s", minimum=0
    )
    shutdown_grace_s: float = setting(
        30.0, help="how long running requests may go on after SIGTERM", unit="s", minimum=0
    )
    keep_alive_s: int = setting(75, help="how long an idle HTTP connection is kept", unit="s", minimum=1)
    record: str = setting(
        "", help="file to which each request's times, lengths and prefix hashes are appended; empty: none"
    )
    record_tokens: bool = setting(False, help="record the token ids of prompts instead of hashes: they are the text")
    responses_max_count: int = setting(
        1000, help="most answers of /v1/responses that are kept in memory; 0: none are", minimum=0
    )
    responses_max_bytes: int = setting(
        64 * 2**20, help="most bytes of conversations kept with those answers", unit="bytes", minimum=0
    )
    responses_max_age_s: float = setting(
        3600.0, help="how long an answer of /v1/responses is kept", unit="s", minimum=0
    )
    responses_background_max: int = setting(
        64, help="most answers of /v1/responses that may be under way without a client", minimum=0
    )
    text_threads: int = setting(2, help="threads for tokenizing long prompts", minimum=1, maximum=64)

    def __post_init__(self) -> None:
        settings.check(self)
        if self.record_tokens and not self.record:
            raise settings.SettingError("record_tokens: needs record, the file to write to")
        if not self.served_model_name:
            raise settings.SettingError("served_model_name: got '', allowed is any text that is not empty")

    @property
    def metrics_socket(self) -> str:
        """The path of the unix socket where this process serves its own metrics."""
        number = f"-{self.process_number}" if self.process_number else ""
        return f"{self.runtime_dir}/api{number}.metrics.sock"

    @property
    def scheduler_link(self) -> str:
        """The scheduler's address with the default filled in."""
        return self.scheduler_address or f"ipc://{self.runtime_dir}/scheduler.sock"
