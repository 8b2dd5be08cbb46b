"""The tenant's own profiles: what is kept of its standing contexts, and its removal."""

from aiohttp import web

from serving.errors import NotFound

from .context import CONTEXT, EXCHANGE
from .schema.profiles import ProfileDeleted, ProfileList, ProfileOut
from .wire import json_response


async def profiles(request: web.Request) -> web.StreamResponse:
    engine = request.app[CONTEXT].startup.service().engine
    found = engine.profiles(request[EXCHANGE].tenant)
    data = [ProfileOut(p.id, "profile", p.num_tokens, p.num_bytes, p.places) for p in found]
    return json_response(ProfileList("list", data))


async def delete_profile(request: web.Request) -> web.StreamResponse:
    name = request.match_info["id"]
    engine = request.app[CONTEXT].startup.service().engine
    if not engine.delete_profile(request[EXCHANGE].tenant, name):
        raise NotFound("no profile of this id is kept; GET /v1/profiles lists yours")
    return json_response(ProfileDeleted(name, "profile.deleted", deleted=True))
