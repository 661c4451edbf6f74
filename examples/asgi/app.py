"""onecopy inside another web application: its doors under /llm, its conversations in a route of our own.

    uvicorn examples.asgi.app:app            (asyncio: the runtime has a thread that runs trio)
    hypercorn -k trio examples.asgi.app:app  (trio: the runtime runs in place)

Starlette does not run the lifespan of a mounted application, so ours enters it: that opens the model and closes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from onecopy.actors.service import Options
from onecopy.api.asgi import app_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route


def create(llm: Starlette | None = None) -> Starlette:
    """The outer application around the doors of a model."""
    llm = llm or app_of(Options(model="smollm2"))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with llm.router.lifespan_context(llm):
            app.state.service = llm.state.doors.service
            yield

    return Starlette(routes=[Route("/", index), Mount("/llm", llm)], lifespan=lifespan)


async def index(request: Request) -> Response:
    """How many conversations the model holds right now, asked of the running system itself."""
    service = request.app.state.service
    return JSONResponse({"model": service.card.id, "conversations": len(await service.sessions())})


app = create()
