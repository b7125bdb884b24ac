"""This module has what nodes write on themselves, kept so that a test can ask for it: GET /probe/texts."""

import functools

from aiohttp import web
from server import PromptServer

TEXTS: list[list[str]] = []


def record_progress_texts() -> None:
    server = PromptServer.instance
    original = getattr(server, "send_progress_text", None)
    if original is not None:

        @functools.wraps(original)
        def recorded(text, node_id, *args, **kwargs):
            TEXTS.append([str(node_id), str(text)])
            return original(text, node_id, *args, **kwargs)

        server.send_progress_text = recorded

    @server.routes.get("/probe/texts")
    async def texts(request: web.Request) -> web.Response:
        return web.json_response({"supported": original is not None, "texts": TEXTS})
