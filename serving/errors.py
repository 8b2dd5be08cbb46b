"""What a client can cause or meet, each with an HTTP status, a stable code and what to do about it.

Raised anywhere in serving, mapped to a response in `transport.middleware` only. Messages say what was got, what is
allowed and what to do; they never quote a value that JSON could not carry.
"""

from collections.abc import Sequence


class ServingError(Exception):
    """Base: an answer for a client. `param` names the field at fault, dotted."""

    status = 500
    code = "internal_error"
    kind = "server_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(ServingError):
    """Our fault; the request may be sent again."""

    retryable = True


class BadRequest(ServingError):
    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class Unsupported(BadRequest):
    """A part of the OpenAI interface that this server does not have."""

    code = "unsupported"


class Unauthorized(ServingError):
    status, code, kind = 401, "invalid_api_key", "authentication_error"


class NotFound(ServingError):
    status, code, kind = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ServingError):
    status, code, kind = 405, "method_not_allowed", "invalid_request_error"

    def __init__(self, message: str, *, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class BodyTooLarge(ServingError):
    status, code, kind = 413, "body_too_large", "invalid_request_error"


class UnsupportedMedia(ServingError):
    status, code, kind = 415, "unsupported_media_type", "invalid_request_error"


class Cancelled(ServingError):
    """The client left, or asked to stop. 499 is what proxies log for it."""

    status, code, kind = 499, "cancelled", "cancelled"


class StepFailed(ServingError):
    """The device step that this request was part of failed; the engine goes on."""

    status, code, retryable = 503, "step_failed", True


class Overloaded(ServingError):
    status, code, kind, retryable = 503, "overloaded", "overloaded_error", True


class NotReady(ServingError):
    status, code, kind, retryable = 503, "not_ready", "overloaded_error", True


class DeadlineExceeded(ServingError):
    status, code, kind = 504, "deadline_exceeded", "timeout_error"


class RequestTimeout(ServingError):
    """The body did not arrive in time."""

    status, code, kind = 408, "request_timeout", "timeout_error"


class HeadersTooLarge(ServingError):
    status, code, kind = 431, "headers_too_large", "invalid_request_error"
