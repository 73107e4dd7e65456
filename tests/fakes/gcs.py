"""A Google Cloud Storage server in this process: the JSON API, as far as gcsfs asks it.

Objects have a generation; ``ifGenerationMatch=0`` creates one only where none is. An upload in one
request, or resumable in parts of 256 KiB and more, takes effect when its last byte has come.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PART_BYTES = 256 * 1024
"""All parts of a resumable upload but the last are multiples of this."""


@dataclass(frozen=True)
class StoredObject:
    """One generation of an object."""

    data: bytes
    generation: int


@dataclass
class Upload:
    """A resumable upload that has begun."""

    key: str
    only_new: bool
    data: bytearray = field(default_factory=bytearray)


class FakeGcs:
    """Buckets in memory, served on a thread of its own."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self.refuses = 0
        """So many requests to come are answered with 503, as an overloaded server does."""
        self.port = 0
        self._uploads: dict[str, Upload] = {}
        self._numbers = iter(range(1, 1_000_000))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-gcs")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2**30, middlewares=[self._answer_errors])
        object_ = "/storage/v1/b/{bucket}/o/{key:.+}"
        app.add_routes([
            web.get("/storage/v1/b/{bucket}", self._bucket),
            web.get("/storage/v1/b/{bucket}/o", self._list),
            web.get(object_, self._about),
            web.delete(object_, self._delete),
            web.get("/download" + object_, self._download),
            web.post("/upload/storage/v1/b/{bucket}/o", self._begin_upload),
            web.post("/upload/{bucket}/{id}", self._continue_upload),
            web.put("/upload/{bucket}/{id}", self._continue_upload),
            web.delete("/upload/{bucket}/{id}", self._cancel_upload),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuses:
            self.refuses -= 1
            return self._error(503, "the server is overloaded")
        try:
            answer: web.StreamResponse = await handler(request)
        except LookupError:
            return self._error(404, "Not Found")
        return answer

    @staticmethod
    def _error(status: int, message: str) -> web.Response:
        body = {"error": {"code": status, "message": message, "errors": [{"message": message}]}}
        return web.json_response(body, status=status)

    def _objects(self, request: web.Request) -> dict[str, StoredObject]:
        return self.buckets[request.match_info["bucket"]]

    def _json(self, bucket: str, key: str) -> dict[str, Any]:
        found = self.buckets[bucket][key]
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": key,
            "size": str(len(found.data)),
            "generation": str(found.generation),
            "md5Hash": b64encode(hashlib.md5(found.data).digest()).decode(),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    # ---- reading ----------------------------------------------------------------------------

    async def _bucket(self, request: web.Request) -> web.Response:
        name = request.match_info["bucket"]
        self._objects(request)
        return web.json_response({"kind": "storage#bucket", "name": name, "locationType": "region"})

    async def _list(self, request: web.Request) -> web.Response:
        bucket, asked = request.match_info["bucket"], request.query
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
        keys, prefixes = [], set()
        for key in sorted(self._objects(request)):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        first = int(asked.get("pageToken", "0"))
        end = first + int(asked.get("maxResults", "1000"))
        page: dict[str, Any] = {"items": [self._json(bucket, key) for key in keys[first:end]]}
        if prefixes:
            page["prefixes"] = sorted(prefixes)
        if end < len(keys):
            page["nextPageToken"] = str(end)
        return web.json_response(page)

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response(
            self._json(request.match_info["bucket"], request.match_info["key"])
        )

    async def _download(self, request: web.Request) -> web.Response:
        data = self._objects(request)[request.match_info["key"]].data
        wanted = request.http_range
        if wanted.start is None and wanted.stop is None:
            return web.Response(body=data)
        if (wanted.start or 0) >= len(data):
            return self._error(416, "The requested range cannot be satisfied.")
        return web.Response(body=data[wanted], status=206)

    async def _delete(self, request: web.Request) -> web.Response:
        del self._objects(request)[request.match_info["key"]]
        return web.Response(status=204)

    # ---- writing ----------------------------------------------------------------------------

    def _store(self, bucket: str, upload: Upload) -> web.Response:
        objects = self.buckets[bucket]
        if upload.only_new and upload.key in objects:
            return self._error(
                412, "At least one of the pre-conditions you specified did not hold."
            )
        objects[upload.key] = StoredObject(bytes(upload.data), next(self._numbers))
        return web.json_response(self._json(bucket, upload.key))

    async def _begin_upload(self, request: web.Request) -> web.Response:
        bucket, only_new = request.match_info["bucket"], "ifGenerationMatch" in request.query
        self._objects(request)
        body = await request.read()
        if request.query["uploadType"] == "resumable":
            key = request.query.get("name") or json.loads(body)["name"]
            id_ = str(next(self._numbers))
            self._uploads[id_] = Upload(key, only_new)
            condition = "&ifGenerationMatch=0" if only_new else ""
            location = f"{self.address}/upload/{bucket}/{id_}?uploadType=resumable{condition}"
            return web.Response(headers={"Location": location})
        (boundary,) = re.findall(r'boundary="?([^";]+)', request.headers["Content-Type"])
        _, about, content, _ = body.split(b"--" + boundary.encode())
        data = content.partition(b"\n\n")[2].removesuffix(b"\n")
        key = json.loads(about.partition(b"\n\n")[2])["name"]
        return self._store(bucket, Upload(key, only_new, bytearray(data)))

    async def _continue_upload(self, request: web.Request) -> web.Response:
        id_ = request.match_info["id"]
        upload, part = self._uploads[id_], await request.read()
        said = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers["Content-Range"])
        assert said is not None, request.headers["Content-Range"]
        first, _, total = said.groups()
        assert first is None or int(first) == len(upload.data), "a part is missing"
        upload.data += part
        if total != "*" and len(upload.data) == int(total):
            del self._uploads[id_]
            return self._store(request.match_info["bucket"], upload)
        if len(part) % PART_BYTES:
            return self._error(400, "a part must be a multiple of 256 KiB")
        there = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        return web.Response(status=308, headers=there)

    async def _cancel_upload(self, request: web.Request) -> web.Response:
        del self._uploads[request.match_info["id"]]
        return web.Response(status=499)

    @property
    def begun(self) -> int:
        """How many uploads have begun, and neither ended nor been cancelled."""
        return len(self._uploads)
