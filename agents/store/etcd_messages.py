"""etcd's messages and methods, built from descriptors in the ``etcd3`` package.

The generated modules of etcd3 0.12.0 cannot be imported with protobuf 4 and later. They contain the
serialized descriptors as plain text, though, from which the messages are built here in a descriptor
pool of their own.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")
"""Each file needs those before it."""
PACKAGE = "etcdserverpb"


@dataclass(frozen=True, slots=True)
class Method:
    """One method of etcd's API."""

    path: str
    serialize: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def method(service: str, name: str) -> Method:
    """Return a method of a service."""
    found = _POOL.FindServiceByName(f"{PACKAGE}.{service}").FindMethodByName(name)
    request = message_factory.GetMessageClass(found.input_type)
    response = message_factory.GetMessageClass(found.output_type)
    return Method(f"/{PACKAGE}.{service}/{name}", request.SerializeToString, response.FromString)


def _load() -> Any:
    found = importlib.util.find_spec("etcd3")
    if found is None or not found.submodule_search_locations:
        raise ImportError("a store in etcd needs the package etcd3")
    folder = Path(found.submodule_search_locations[0]) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    for name in FILES:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(_description(folder / name)))
    return pool


def _description(path: Path) -> bytes:
    """Find ``serialized_pb=_b('...')``, in which each character is one byte."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.keyword(
                arg="serialized_pb", value=ast.Call(args=[ast.Constant(value=str(text))])
            ):
                return text.encode("latin-1")
            case _:
                pass
    raise ImportError(f"no descriptors in {path.name} of the package etcd3; install etcd3 0.12.0")


_POOL = _load()
