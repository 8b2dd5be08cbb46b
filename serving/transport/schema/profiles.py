"""GET /v1/profiles and DELETE /v1/profiles/{id}."""

from typing import Annotated

from msgspec import Meta, Struct


class ProfileOut(Struct, frozen=True):
    id: str
    object: str
    tokens: Annotated[int, Meta(description="Of the standing context, in whole pages.")]
    bytes: int
    places: Annotated[
        tuple[str, ...],
        Meta(description="Where all of it (memory, disk) is kept beyond the device's own cache; empty: nowhere yet."),
    ]


class ProfileList(Struct, frozen=True):
    object: str
    data: list[ProfileOut]


class ProfileDeleted(Struct, frozen=True):
    id: str
    object: str
    deleted: bool
