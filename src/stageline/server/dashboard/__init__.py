"""/dashboard: the pipeline live, on one page. The page holds no data: it asks /debug for it, with the viewer's key.

One idea: plain files, put together when the server starts; no build step, nothing from elsewhere, and a policy
that lets the browser run exactly this code.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.server.operations import Operation
from stageline.server.routing import endpoint
from stageline.server.state import ServerState

PATH = "/dashboard"
_SCRIPTS = ("format.js", "timeline.js", "panels.js", "journeys.js", "main.js")

OPERATIONS = [
    Operation("GET", PATH, "The pipeline live, as a page", tag="server", answer_type="text/html", is_open=True)
]


def routes(state: ServerState) -> list[Route]:
    page, policy = assemble(bool(state.config.api_key))

    async def show_dashboard(_state: ServerState, _http: Request) -> Response:
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(page, media_type="text/html", headers=headers)

    return [Route(PATH, endpoint(state, show_dashboard), methods=["GET"])]


def assemble(needs_key: bool) -> tuple[str, str]:
    """Returns: the page, and the policy under which it runs."""
    files = resources.files(__name__)
    style = files.joinpath("style.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    page = files.joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page = page.replace('data-needs-key="no"', f'data-needs-key="{"yes" if needs_key else "no"}"')
    return page.replace("/* style */", style).replace("/* script */", script), policy


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
