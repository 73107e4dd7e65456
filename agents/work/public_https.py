"""Reads ``https`` addresses of jobs, without being led to what the operator did not allow.

An address of a job, a name that the job's user owns, or a redirect could lead to the metadata
server or to services of the private network, which know this machine and not the job. So each
request is checked, redirected or not, and of a name's addresses only public ones are used. A
prefix that names a host is the operator's word that its address may be private.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import aiohttp
import fsspec
from aiohttp import abc

from agents.daemon.allowed_uris import ANY, MOUNTS, check_uri, is_host_allowed, is_public
from simulator.documents.problems import InputError


class RefusedError(aiohttp.ClientError):
    """A request leads to where jobs may have no data."""


def open_allowed(uri: str, allowed: Sequence[str]) -> tuple[Any, str]:
    """Return fsspec's file system of a URI, and the path in it; blocks.

    Raises ``InputError`` unless the URI is allowed.
    """
    check_uri(uri, allowed, MOUNTS, "")
    if not uri.startswith("https://") or ANY in allowed:
        files, path = fsspec.core.url_to_fs(uri)
        return files, path
    is_private = is_host_allowed(uri, allowed)

    async def client(**options: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=None if is_private else _PublicResolver(), ssl=ssl.create_default_context()
        )
        return aiohttp.ClientSession(connector=connector, middlewares=(check,), **options)

    async def check(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        where = str(request.url)
        try:
            check_uri(where, allowed, MOUNTS, "")
        except InputError:
            raise RefusedError(f"it leads to {where}, which is not allowed") from None
        if is_private and not is_host_allowed(where, allowed):
            raise RefusedError(f"it leads to {where}, whose host no allowed prefix names")
        return await handler(request)

    files, path = fsspec.core.url_to_fs(uri, get_client=client, skip_instance_cache=True)
    return files, path


class _PublicResolver(abc.AbstractResolver):
    """Looks names up, and forgets addresses that are not public."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[abc.ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        public = [each for each in found if is_public(each["host"])]
        if not public:
            what = f"{host} has no public address; an allowed prefix may name it"
            raise OSError(errno.EACCES, what)
        return public

    async def close(self) -> None:
        await self._resolver.close()
