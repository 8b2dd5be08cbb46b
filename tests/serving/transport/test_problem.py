import json

from serving.errors import BadRequest, Overloaded, Unauthorized
from serving.transport.problem import error_json, error_out, error_response


def test_a_clients_error_is_told_whole() -> None:
    out = json.loads(error_json(BadRequest("n: too many", param="n")))["error"]
    assert out == {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}


def test_our_own_is_not() -> None:
    assert "secret" not in error_out(RuntimeError("secret")).message
    assert error_out(RuntimeError("secret")).code == "internal_error"


def test_headers_say_when_to_come_back_and_with_what() -> None:
    busy = error_response(Overloaded("full", retry_after_s=0.2))
    assert (busy.status, busy.headers["Retry-After"]) == (503, "1")
    assert "Retry-After" not in error_response(Overloaded("full")).headers
    assert error_response(Unauthorized("key")).headers["WWW-Authenticate"] == "Bearer"
