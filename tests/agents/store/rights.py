"""Sets up users and permissions of an etcd."""

from __future__ import annotations

from typing import Any

from agents.store.etcd_messages import message, method
from tests.agents.store.places import Cluster

ROOT_PASSWORD = "secret"
READ_AND_WRITE = 2
AUTH = {
    name: (method("Auth", name), message(request))
    for name, request in (
        ("RoleAdd", "AuthRoleAddRequest"),
        ("RoleGrantPermission", "AuthRoleGrantPermissionRequest"),
        ("UserAdd", "AuthUserAddRequest"),
        ("UserGrantRole", "AuthUserGrantRoleRequest"),
        ("AuthEnable", "AuthEnableRequest"),
        ("Authenticate", "AuthenticateRequest"),
    )
}


async def require_passwords(cluster: Cluster) -> None:
    """Create root with all permissions and guest with none, and require passwords."""
    await _ask(cluster, "RoleAdd", name="root")
    await _ask(cluster, "UserAdd", name="root", password=ROOT_PASSWORD)
    await _ask(cluster, "UserGrantRole", user="root", role="root")
    await _ask(cluster, "UserAdd", name="guest", password="guest")
    await _ask(cluster, "RoleAdd", name="guests")
    await _ask(cluster, "UserGrantRole", user="guest", role="guests")
    await _ask(cluster, "AuthEnable")


async def add_root(cluster: Cluster, name: str, password: str) -> None:
    """Create a further user with all permissions."""
    entered = await _ask(cluster, "Authenticate", name="root", password=ROOT_PASSWORD)
    await _ask(cluster, "UserAdd", token=entered.token, name=name, password=password)
    await _ask(cluster, "UserGrantRole", token=entered.token, user=name, role="root")


async def let_guest(cluster: Cluster, prefix: str) -> None:
    """Let guest read and write the keys with this prefix."""
    entered = await _ask(cluster, "Authenticate", name="root", password=ROOT_PASSWORD)
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    perm = {"permType": READ_AND_WRITE, "key": prefix.encode(), "range_end": end.encode()}
    await _ask(cluster, "RoleGrantPermission", token=entered.token, name="guests", perm=perm)


async def _ask(cluster: Cluster, name: str, /, *, token: str = "", **what: Any) -> Any:
    way, request = AUTH[name]
    async with cluster.channel() as channel:
        ask = channel.unary_unary(way.path, way.serialize, way.read)
        return await ask(request(**what), metadata=(("token", token),) if token else ())
