"""Serves the web pages: the playground at /, the dashboard, and their files."""

import hashlib
import mimetypes
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.figures import Figures

HEADERS = {
    # Nothing from elsewhere, nothing inline, no frame around it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file's content and headers."""

    body: bytes
    media_type: str
    etag: str


def load_assets() -> dict[str, Asset]:
    """Reads the files of gateway/web by name, once: they are few and small."""
    assets = {}
    for file in resources.files("gateway").joinpath("web").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        media_type = _TYPES.get(suffix) or mimetypes.types_map.get(suffix)
        if media_type is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            assets[file.name] = Asset(body, f"{media_type}; charset=utf-8", etag)
    return assets


def make_router(figures: Figures) -> APIRouter:
    """Creates the routes of the pages and of the dashboard's numbers."""
    router = APIRouter(include_in_schema=False)
    assets = load_assets()

    def answer(request: Request, name: str) -> Response:
        asset = assets.get(name)
        if asset is None:
            raise HTTPException(404, "Not Found")
        headers = {**HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.media_type)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def playground(request: Request) -> Response:
        return answer(request, "playground.html")

    @router.api_route("/dashboard", methods=["GET", "HEAD"])
    async def dashboard(request: Request) -> Response:
        return answer(request, "dashboard.html")

    @router.api_route("/web/{name}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        return answer(request, name)

    @router.get("/dashboard/figures")
    async def dashboard_figures() -> dict[str, Any]:
        return await figures.get()

    @router.get("/dashboard/history")
    async def dashboard_history() -> dict[str, Any]:
        return await figures.history()

    return router
