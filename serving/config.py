"""The configuration: one frozen struct per component. `config_file` reads them from one TOML file and flags.

The description of each field is the only copy of its documentation: `--print-config` and the README show it.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Batching and memory. Sizes are rows and tokens; times say their unit."""

    max_slots: Annotated[int, Meta(ge=1, description="sequences that generate at the same time")] = 64
    page_size: Annotated[int, Meta(ge=1, description="tokens per KV page")] = 16
    num_pages: Annotated[int, Meta(ge=0, description="KV pages; 0: from free memory")] = 0
    hard_size: Annotated[
        int, Meta(ge=1, description="dispatch a batch of scores or prompts at this many rows at once")
    ] = 16
    soft_size: Annotated[int, Meta(ge=1, description="or at this many when an urgent one waits")] = 8
    min_tokens: Annotated[int, Meta(ge=1, description="or when the waiting rows have this many tokens")] = 2048
    max_wait_ms: Annotated[float, Meta(ge=0, description="or when the oldest has waited this long")] = 2.0
    max_context: Annotated[
        int, Meta(ge=2, description="prompt + generated tokens; the model's own limit if that is smaller")
    ] = 4096
    max_score_rows: Annotated[int, Meta(ge=1, description="rows of the largest score batch")] = 64
    max_score_tokens: Annotated[
        int, Meta(ge=1, description="longest row scored in one piece; longer ones go through the KV cache in chunks")
    ] = 1024
    score_batch_tokens: Annotated[int, Meta(ge=1, description="rows x padded length of one score batch")] = 4096
    prefill_chunk: Annotated[int, Meta(ge=1, description="tokens of one prompt per step")] = 256
    prefill_batch_tokens: Annotated[int, Meta(ge=1, description="tokens of all prompts per step")] = 512
    sampling_tables: Annotated[
        bool,
        Meta(
            description="keep what penalties, logit_bias and guided output need: 8 bytes a slot and vocabulary entry "
            "on the device (66 MB for 64 slots and 129,280 tokens); off: requests that use them are refused"
        ),
    ] = True
    step_tokens: Annotated[
        int, Meta(ge=0, description="what a step costs beside its tokens, in tokens: higher fills batches more")
    ] = 64
    token_gap_ratio: Annotated[
        float,
        Meta(
            gt=1,
            description="chunks of a long prompt beside running streams stretch a token's time by no more than this, "
            "short prompts, which go whole, on average",
        ),
    ] = 3.0
    token_gap_ms: Annotated[
        float, Meta(ge=0, description="or by no more than this much of prefill between two tokens, if that is longer")
    ] = 20.0
    prefix_cache: Annotated[
        bool, Meta(description="keep the KV pages of earlier prompts for those that start the same")
    ] = True
    lru_window_s: Annotated[
        float, Meta(ge=0, description="uses of a cached page within this time of each other count once")
    ] = 1.0
    host_tier_bytes: Annotated[
        int, Meta(ge=0, description="host memory for KV pages that the device gave up; 0: none, and no profiles")
    ] = 256 * 1024 * 1024
    profile_dir: Annotated[
        str, Meta(description="directory where profiles (profile_id) outlive the process; empty: none")
    ] = ""
    profile_bytes_per_tenant: Annotated[
        int, Meta(ge=0, description="KV pages that a tenant's profiles may take; the longest unused goes")
    ] = 256 * 1024 * 1024
    deterministic: Annotated[
        bool,
        Meta(
            description="the same tokens and log-probabilities to the bit, whatever else is served and however a "
            "request is cut into steps; one device, slower (python -m scripts.check_determinism)"
        ),
    ] = False
    speculate: Annotated[
        bool,
        Meta(
            description="let the model's MTP layer guess the token after next, and check the guess with the next step: "
            "the same text in fewer steps where few rows generate (python -m scripts.bench_speculative)"
        ),
    ] = False
    speculate_rows: Annotated[
        int, Meta(ge=1, description="while at most so many rows generate: then a step's cost hardly grows by guesses")
    ] = 8
    ageing_s: Annotated[
        float, Meta(gt=0, description="a row that has waited this much longer goes before the next higher priority")
    ] = 1.0
    max_queue_rows: Annotated[int, Meta(ge=1, description="rows that may wait; more are refused with 503")] = 16384
    max_queue_tokens: Annotated[int, Meta(ge=1, description="tokens of waiting rows; more are refused")] = 4_194_304

    def __post_init__(self) -> None:
        if self.soft_size > self.hard_size:
            raise ValueError(f"soft_size {self.soft_size} must not be above hard_size {self.hard_size}")


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP server and what one request may ask for."""

    host: Annotated[str, Meta(min_length=1, description="address; other than loopback only with [auth] keys")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0: any free one")] = 8000
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body; more is 413")] = 16 * 1024 * 1024
    max_rows: Annotated[
        int, Meta(ge=1, description="inputs of one score request; prompts times n of one completion")
    ] = 1024
    body_timeout_s: Annotated[float, Meta(gt=0, description="a body that takes longer to arrive is 408")] = 30.0
    keepalive_s: Annotated[float, Meta(ge=0, description="an idle connection is kept this long")] = 75.0
    default_timeout_ms: Annotated[int, Meta(ge=0, description="deadline of requests without timeout_ms; 0: none")] = 0
    stream_behind_tokens: Annotated[
        int, Meta(ge=1, description="a stream whose reader is this many tokens a choice behind is cut")
    ] = 4096
    stream_stall_s: Annotated[float, Meta(gt=0, description="a stream whose reader takes nothing this long is cut")] = (
        30.0
    )
    shutdown_s: Annotated[float, Meta(ge=0, description="time for running requests when the server stops")] = 10.0
    encode_threads: Annotated[int, Meta(ge=1, le=64, description="threads that render and tokenise")] = 2


class ModelSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is served."""

    path: Annotated[str, Meta(min_length=1, description="a directory, a model of the zoo, or a demo model's name")] = (
        "credit-mini"
    )
    served_name: Annotated[str, Meta(max_length=256, description="name that clients use; empty: the directory's")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="of weights and activations; auto: float32 on CPU, the checkpoint's elsewhere"),
    ] = "auto"
    mesh: Annotated[str, Meta(description="device mesh such as data=2,tensor=2,expert=2; empty: one device")] = ""
    template: Annotated[str, Meta(description="a row template (TOML); empty: template.toml beside the model")] = ""


class AttentionSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a token sees of what came before it; models with windows of their own need nothing here."""

    kind: Annotated[
        Literal["full", "window"],
        Meta(
            description="full: everything; window: the last tokens and the first few, which no model was trained for: "
            "a request keeps a fixed number of KV pages, and answers get worse where what matters is further back"
        ),
    ] = "full"
    window: Annotated[int, Meta(ge=1, description="positions that a token sees, its own included")] = 128
    sinks: Annotated[int, Meta(ge=0, description="first positions that all see")] = 4
    impl: Annotated[
        Literal["auto", "xla"],
        Meta(description="what computes it; auto: Pallas kernels where there is one GPU, else xla, XLA's own code"),
    ] = "auto"


class RuntimeConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """JAX itself."""

    compile_cache: Annotated[
        str, Meta(description="directory of compiled programs; empty: the user's cache; off: none")
    ] = ""
    simulate_devices: Annotated[int, Meta(ge=0, le=512, description="pretend that the CPU is n devices; 0: do not")] = 0


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key. Only its hash is configured: printf %s KEY | sha256sum"""

    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="whose key it is")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="hex SHA-256 of the key")]


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """API keys. Without keys every request belongs to the tenant "default"."""

    keys: Annotated[tuple[ApiKey, ...], Meta(description='such as [{tenant = "acme", sha256 = "..."}]')] = ()


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Logging to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least severity shown")] = "info"
    form: Annotated[Literal["text", "json"], Meta(description="lines for people, or one JSON object a line")] = "text"
    access: Annotated[bool, Meta(description="one line per request")] = True


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything `tidegate serve` and `tidegate score` take."""

    model: ModelSection = ModelSection()
    attention: AttentionSection = AttentionSection()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()
