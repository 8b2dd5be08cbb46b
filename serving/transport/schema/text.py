"""POST /tokenize and /detokenize, and GET /v1/models."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from .chat import Message


class TokenizeIn(Struct, frozen=True):
    """`prompt` or `messages`, as the completions endpoints would encode them."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: Annotated[bool, Meta(description="False: without the BOS that a raw prompt gets.")] | None = (
        None
    )
    return_token_strs: bool | None = None


class TokenizeOut(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeIn(Struct, frozen=True):
    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


class DetokenizeOut(Struct, frozen=True):
    prompt: str


class ModelOut(Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, frozen=True):
    object: str
    data: list[ModelOut]


class Health(Struct, frozen=True):
    status: str
    buckets: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
