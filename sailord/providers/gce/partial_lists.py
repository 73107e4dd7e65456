"""An HTTP adapter that asks Google's aggregated lists for partial results."""

from __future__ import annotations

from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter


class PartialListAdapter(HTTPAdapter):
    """Adds ``returnPartialSuccess``, for which the client library has no field.

    Without it one zone that fails makes the list fail for all zones.
    """

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        return super().send(with_partial_results(request), *args, **kwargs)


def with_partial_results(request: PreparedRequest) -> PreparedRequest:
    """Add the parameter to the request if it is for an aggregated list."""
    if "/aggregated/" in request.path_url:
        request.prepare_url(request.url or "", {"returnPartialSuccess": "true"})
    return request
