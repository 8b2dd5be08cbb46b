"""Every endpoint once: what the server answers, what the OpenAPI document says, which route label metrics have."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from msgspec import Struct

from .chat import chat_completions
from .completions import completions
from .probes import livez, metrics, model, models, readyz
from .profiles import delete_profile, profiles
from .schema.chat import ChatIn, ChatOut
from .schema.completions import CompletionIn, CompletionOut
from .schema.profiles import ProfileDeleted, ProfileList
from .schema.score import ScoreIn, ScoreOut
from .schema.text import DetokenizeIn, DetokenizeOut, Health, ModelList, ModelOut, TokenizeIn, TokenizeOut
from .score import score
from .text import detokenize, tokenize
from .unsupported import unsupported

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`asked` and `answered`: the structs of the bodies. `path` is also the metrics label."""

    method: str
    path: str
    handler: Handler
    summary: str
    asked: type[Struct] | None = None
    answered: type[Struct] | None = None
    open: bool = False  # answers without an API key
    documented: bool = True
    pattern: str = ""  # where aiohttp needs more than the path


ENDPOINTS = (
    Endpoint("POST", "/v1/score", score, "Label rows with probabilities.", ScoreIn, ScoreOut),
    Endpoint("POST", "/v1/completions", completions, "Continue prompts.", CompletionIn, CompletionOut),
    Endpoint("POST", "/v1/chat/completions", chat_completions, "Answer a conversation.", ChatIn, ChatOut),
    Endpoint("GET", "/v1/models", models, "The served model.", None, ModelList),
    Endpoint("GET", "/v1/models/{id}", model, "One model.", None, ModelOut, pattern="/v1/models/{id:.+}"),
    Endpoint("GET", "/v1/profiles", profiles, "Your standing contexts.", None, ProfileList),
    Endpoint("DELETE", "/v1/profiles/{id}", delete_profile, "Forget a standing context.", None, ProfileDeleted),
    Endpoint("POST", "/tokenize", tokenize, "Token ids of a text or a conversation.", TokenizeIn, TokenizeOut),
    Endpoint("POST", "/detokenize", detokenize, "Text of token ids.", DetokenizeIn, DetokenizeOut),
    Endpoint("GET", "/livez", livez, "Whether the process works.", None, Health, open=True),
    Endpoint("GET", "/readyz", readyz, "Whether requests are served yet.", None, Health, open=True),
    Endpoint("GET", "/metrics", metrics, "Counters for Prometheus.", open=True),
    *(
        Endpoint(method, path, unsupported, "Not supported.", documented=False)
        for method in ("POST", "GET")
        for path in (
            "/v1/embeddings",
            "/v1/responses",
            "/v1/moderations",
            "/v1/images/generations",
            "/v1/audio/transcriptions",
            "/v1/audio/speech",
            "/v1/files",
            "/v1/batches",
            "/v1/fine_tuning/jobs",
        )
    ),
)
