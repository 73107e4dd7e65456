"""etcd's messages and methods, taken from the ``etcd3`` package without importing it.

What ``protoc`` wrote into etcd3 0.12.0 does not load with protobuf 4 and later. The descriptions
of the messages stand in it as plain text, though, and of these everything is built here, in a
pool of descriptors of its own.
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
"""In the order in which each needs those before."""
PACKAGE = "etcdserverpb"


@dataclass(frozen=True, slots=True)
class Method:
    """One call that etcd answers."""

    path: str
    serialize: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def message(name: str) -> Any:
    """The class of one of etcd's messages."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def method(service: str, name: str) -> Method:
    """One method of one of etcd's services."""
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
    """Find ``serialized_pb=_b('...')``, in which each character stands for one byte."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.keyword(
                arg="serialized_pb", value=ast.Call(args=[ast.Constant(value=str(text))])
            ):
                return text.encode("latin-1")
            case _:
                pass
    raise ImportError(f"{path.name} of the package etcd3 describes no messages; 0.12.0 does")


_POOL = _load()
