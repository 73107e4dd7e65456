"""An HTTP adapter that asks Google's aggregated lists for partial results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requests import PreparedRequest, Response, Session


def ask_for_partial_lists(session: Session) -> None:
    """Add ``returnPartialSuccess`` to aggregated lists, for which the client library has no field.

    Without it one zone that fails makes the list fail for all zones.
    """
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - comes with the group gcp

    class PartialListAdapter(HTTPAdapter):
        def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
            return super().send(with_partial_results(request), *args, **kwargs)

    for scheme in ("https://", "http://"):
        session.mount(scheme, PartialListAdapter())


def with_partial_results(request: PreparedRequest) -> PreparedRequest:
    """Add the parameter to the request if it is for an aggregated list."""
    if "/aggregated/" in request.path_url:
        request.prepare_url(request.url or "", {"returnPartialSuccess": "true"})
    return request
