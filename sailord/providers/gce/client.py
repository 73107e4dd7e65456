"""Calls Google's client library in threads, with timeouts; its errors become ``GceError``.

The only module that imports the library, and only when it is first used.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import GceError, gce_error
from sailord.providers.gce.partial_lists import ask_for_partial_lists
from simulator.documents.problems import InputError, Problem

T = TypeVar("T")

THREADS = 8
SPARE_S = 5.0
"""Added to a request's own timeout, which ends most of them."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = (
    "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS,"
    " give the machine a service account, or name a key file as provider.credentials"
)


class GceClient:
    """The API clients of one project, each made on first use."""

    def __init__(self, credentials: Any, config: GceConfig) -> None:
        self._credentials = credentials
        self._project = config.project
        self._endpoint = config.endpoint
        self._call_s = config.call_s
        self._clients: dict[str, Any] = {}
        self._is_loaded = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gce")

    async def call(self, client: str, method: str, **fields: Any) -> Any:
        """Call a method of a client once; only the caller knows whether a retry is safe."""
        return await self._in_thread(lambda: self._call(client, method, fields))

    async def pages(
        self,
        client: str,
        method: str,
        *,
        is_enough: Callable[[Any], bool] | None = None,
        **fields: Any,
    ) -> list[Any]:
        """Call a method that lists; return its pages up to the first that ``is_enough``."""

        def read() -> list[Any]:
            found = []
            for page in self._call(client, method, fields).pages:
                found.append(page)
                if is_enough is not None and is_enough(page):
                    break
            return found

        # Each page has a timeout of its own; all together may take four times as long.
        return await self._in_thread(read, share=4.0)

    async def get_json(self, url: str, query: dict[str, str]) -> dict[str, Any]:
        """Read a JSON document from another API of Google's."""
        return await self._json("GET", url, params=query)

    async def post_json(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a JSON document to another API of Google's; return the answer."""
        return await self._json("POST", url, json=body)

    async def _json(self, method: str, url: str, **sent: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            from google.api_core import exceptions  # noqa: PLC0415 - slow to load
            from google.auth.transport import requests  # noqa: PLC0415 - slow to load

            sessions: Any = requests
            errors: Any = exceptions
            with sessions.AuthorizedSession(self._credentials) as session:
                answer = session.request(method, url, timeout=self._call_s, **sent)
            if answer.status_code != 200:
                raise errors.from_http_response(answer)
            told = answer.json()
            assert isinstance(told, dict)
            return told

        return await self._in_thread(read)

    def close(self) -> None:
        """Stop the threads; open requests end with their own timeouts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, client: str, method: str, fields: dict[str, Any]) -> Any:
        request = {"project": self._project, **fields}
        act = getattr(self._client(client), method)
        return act(request=request, retry=None, timeout=self._call_s)

    def _client(self, name: str) -> Any:
        if name not in self._clients:
            from google.cloud import compute_v1  # noqa: PLC0415 - see _load

            options = {} if self._endpoint is None else {"api_endpoint": self._endpoint}
            kind = getattr(compute_v1, f"{name}Client")
            client = kind(credentials=self._credentials, client_options=options)
            ask_for_partial_lists(client.transport._session)
            self._clients[name] = client
        return self._clients[name]

    async def _in_thread(self, act: Callable[[], T], *, share: float = 1.0) -> T:
        loop = asyncio.get_running_loop()
        if not self._is_loaded:
            # Takes seconds, which must not count against the timeout.
            await loop.run_in_executor(self._threads, _load)
            self._is_loaded = True
        deadline_s = share * self._call_s + SPARE_S
        try:
            async with asyncio.timeout(deadline_s):
                return await loop.run_in_executor(self._threads, lambda: raise_gce_error(act))
        except TimeoutError:
            raise GceError("unknown", f"Google did not answer within {deadline_s:.0f} s") from None


def _load() -> None:
    importlib.import_module("google.cloud.compute_v1")  # Takes seconds.


def raise_gce_error(act: Callable[[], T]) -> T:
    """Call ``act``; turn the library's errors into ``GceError``."""
    import requests  # noqa: PLC0415 - slow to load
    from google.api_core import exceptions  # noqa: PLC0415 - slow to load
    from google.auth.exceptions import GoogleAuthError, TransportError  # noqa: PLC0415 - slow to load
    from google.protobuf.json_format import ParseError  # noqa: PLC0415 - slow to load

    try:
        return act()
    except exceptions.GoogleAPICallError as error:
        status = int(error.code or 0)
        errors = list(_errors_of(error.errors)) or list(_details_of(error.details))
        raise gce_error(
            status, errors, message=error.message, retry_after_s=_retry_after(error)
        ) from None
    except (TransportError, requests.RequestException) as error:
        raise GceError("unknown", f"Google cannot be reached: {error}") from None
    except ParseError as error:  # A proxy may have answered instead.
        raise GceError("unknown", f"Google's answer cannot be read: {error}") from None
    except GoogleAuthError as error:
        raise GceError("permission", f"the credentials are rejected ({error})", 401) from None


def _errors_of(errors: Iterable[Any]) -> Iterable[tuple[str, str]]:
    for one in errors:
        if isinstance(one, dict):
            yield str(one.get("reason") or one.get("code") or ""), str(one.get("message") or "")
        elif getattr(one, "code", ""):
            yield str(one.code), str(getattr(one, "message", ""))


def _details_of(details: Iterable[Any]) -> Iterable[tuple[str, str]]:
    for one in details:
        # A message in the client library, a dictionary in the answers of other APIs.
        reason = one.get("reason") if isinstance(one, dict) else getattr(one, "reason", "")
        if reason:
            yield str(reason), ""


def _retry_after(error: Any) -> float | None:
    headers = getattr(error.response, "headers", None) or {}
    text = str(headers.get("Retry-After", ""))
    return float(text) if text.isdigit() else None


def find_credentials(path: Path | None, endpoint: str | None = None) -> Any:
    """Return the credentials of a key file, or this machine's default ones.

    An endpoint without TLS is a fake for tests; it gets no credentials.
    """
    try:
        import google.auth  # noqa: PLC0415 - slow to load
        from google.auth import credentials, exceptions  # noqa: PLC0415 - slow to load
        from google.oauth2 import service_account  # noqa: PLC0415 - slow to load
    except ImportError:
        what = "google-cloud-compute is not installed"
        cure = "install the group gcp: make install DESTDIR=/ GROUPS=gcp"
        raise InputError(Problem("provider", what, cure)) from None
    if endpoint is not None and endpoint.startswith("http://"):
        untyped: Any = credentials
        return untyped.AnonymousCredentials()
    try:
        if path is None:
            return google.auth.default(scopes=[SCOPE])[0]
        untyped = service_account.Credentials
        return untyped.from_service_account_file(str(path), scopes=[SCOPE])
    except (OSError, ValueError, exceptions.DefaultCredentialsError) as error:
        what = f"no credentials for Google Cloud ({error})"
        if path is not None:
            what = f"{path} is not the key of a service account ({error})"
        raise InputError(Problem("provider.credentials", what, LOGIN)) from None
