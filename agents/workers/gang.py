"""This node's worker processes: started, reused for the next generation, found again, killed.

A worker connects to the agent's Unix socket and writes its status as lines of JSON
(``agents.workers.status``). The agent writes orders, each with the ``generation`` that it is for:
``{"order": "join", "spec": {...}}`` to an idle worker, ``{"order": "meet", "address": ...}``,
``{"order": "stop", "stop_at": N}``, ``{"order": "replicated", "point": {...}}`` and
``{"order": "abort"}``. Orders are sent again to a worker that reconnects, so that they must be
idempotent. A worker survives its agent and connects to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.core.model import Event, GangExited, GangReported
from agents.daemon.clock import Clock
from agents.daemon.error_text import describe_error
from agents.daemon.tasks import Tasks
from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.codec import read
from agents.protocol.records import GenerationRecord, JobId
from agents.workers.fork_client import ForkClient
from agents.workers.pidfd import ProcessId, peer_of
from agents.workers.process import (
    WorkerProcess,
    describe_exit,
    is_bug,
    join_order,
    wait_exit_code_written,
    write_order,
)
from agents.workers.status import WorkerStatus, agreed_at, combine, contradicted_of, sealing_of
from worker.atomic_file import replace_file
from worker.plain_file import read_plain

IDLE_S = 60.0
"""Workers without a generation are killed after this time."""
LINE_BYTES_MAX = 1 << 20
SENDER_ATTEMPTS = 50
SENDER_RETRY_S = 0.01
ENDED_RETRY_S = 0.005
RECONNECT_S = 1.0
"""Workers of a previous agent process have this time to connect before they count as lost."""
KEEP_ALIVE_S = 60.0
ENDED_KEPT = 8
"""Ended processes whose folders, with their logs, are kept."""


@dataclass(eq=False)
class WorkerGang:
    """All worker processes of this node: those of the present generation, and idle ones."""

    folder: Path
    fork_client: ForkClient
    clock: Clock
    feed: Callable[[Event], None]
    ended: Callable[[], None] = lambda: None
    """Called when a process has ended."""
    hear: Callable[[JobId, WorkerStatus], None] = lambda *_: None
    """Called with each status: it may report a sealed snapshot or the rendezvous."""
    job: JobId | None = None
    generation: int = 0
    members: list[WorkerProcess] = field(default_factory=list)
    outputs: dict[int, Path] = field(default_factory=dict)
    """The output file of each rank of the present generation."""
    _rendezvous: str = ""
    """Where the ranks of the present generation meet, once that is known."""
    _failure: str = ""
    _is_bug: bool = False
    _room_needed: int = 0
    _is_starting: bool = False
    _is_over: bool = False
    """The generation was aborted or left: nothing more is started for it."""
    _reconnect_by: float = 0.0
    _unreadable: UnreadableRecords = field(default_factory=UnreadableRecords)
    _tasks: Tasks = field(default_factory=Tasks)
    _server: asyncio.Server | None = None
    _idle: asyncio.TimerHandle | None = None

    # ---- taking over ----------------------------------------------------------------------------

    async def open(self, job: JobId | None, generation: int, count: int) -> None:
        """Listen, and take over the workers of a previous agent process."""
        self.job, self.generation = job, generation
        path = self.folder / "workers.sock"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_BYTES_MAX)
        path.chmod(0o660 if self.fork_client.is_service else 0o600)
        await self.fork_client.wait_settled()
        for home in sorted(self.folder.glob("process/*")):
            with contextlib.suppress(OSError, ValueError):
                self._adopt(home)
        self._reconnect_by = self.clock.now() + RECONNECT_S
        found = len(list(self._gang()))
        if generation and not found:
            self._report_exit("the workers ended while the agent was down")
        elif generation and found < count:
            self._fail("some workers ended while the agent was down")
        if generation:
            await self._kill_unused()
        else:
            self._dismiss_idle_later()
        self._tasks.start(self._keep_fork_server())

    def _adopt(self, home: Path) -> None:
        born = _read_spec(home / "process.json", "pid", "start")
        spec, was_reused = born, (home / "seat.json").exists()
        if was_reused:
            spec = _read_spec(home / "seat.json")
        member = self._watch(home, ProcessId(born["pid"], born["start"]), spec)
        if member is not None and was_reused:
            member.orders["join"] = join_order(spec)  # It may not have received it.

    async def wait_reconnected(self) -> None:
        """Wait for the workers that were taken over: only connected ones can be reused."""
        while self.clock.now() < self._reconnect_by and any(
            member.status is None for member in self.members
        ):
            await asyncio.sleep(ENDED_RETRY_S)

    async def _keep_fork_server(self) -> None:
        """Keep the fork server from ending as an orphan, and start another if it died."""
        while True:
            with contextlib.suppress(OSError):  # The next start of workers reports it.
                await self.fork_client.ensure_running()
            await asyncio.sleep(min(KEEP_ALIVE_S, self.fork_client.orphan_s / 3))

    # ---- starting -------------------------------------------------------------------------------

    def begin(self, record: GenerationRecord) -> None:
        """Make this the present generation; ``start`` follows."""
        self.job, self.generation = record.job, record.number
        self._rendezvous, self._failure, self._is_bug, self._room_needed = "", "", False, 0
        self._is_starting, self._is_over = True, False
        self.outputs.clear()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def start(self, specs: list[dict[str, Any]]) -> None:
        """Give each spec to the idle process on its device, or to a new process."""
        # Generations are counted per job: a worker of another job could mistake ours for its own.
        idle = {
            member.device: member
            for member in self.members
            if member.is_idle() and member.spec["job"] == self.job
        }
        missing = []
        try:
            self.fork_client.check_version()
            for spec in [] if self._is_over else specs:
                if (member := idle.get(spec["device"])) is not None:
                    self._reuse(member, spec)
                else:
                    missing.append(spec)
            await self._kill_unused()
            for spec in missing:
                await self.fork_client.ensure_running()
                if self._is_over:
                    break
                await self._fork(spec)
        except (OSError, ValueError) as error:
            self._fail(f"the workers cannot be started: {describe_error(error, self.folder)}")
        self._is_starting = False
        self._report_progress()

    def refuse(self, failure: str) -> None:
        """Report that no worker of the present generation can be started."""
        self._is_starting = False
        self._report_exit(failure)

    async def _kill_unused(self) -> None:
        """Kill the processes that have no rank, and wait until their devices are free."""
        gang = list(self._gang())
        unused = [member for member in self.members if member not in gang]
        for member in unused:
            member.dismiss()
        while any(member in self.members for member in unused):
            await asyncio.sleep(ENDED_RETRY_S)
        self._delete_old_homes()

    def _reuse(self, member: WorkerProcess, spec: dict[str, Any]) -> None:
        # Recorded before it is sent, so that the next agent process knows the spec.
        replace_file(member.home / "seat.json", json.dumps(spec), is_durable=False)
        member.spec = spec
        member.orders.clear()
        self.outputs[member.rank] = member.home / "output"
        member.send(join_order(spec))

    async def _fork(self, spec: dict[str, Any]) -> None:
        home = self.folder / "process" / f"{spec['job']}.{spec['generation']}.{spec['rank']}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        home.chmod(
            0o770
        )  # The fork server writes there; access is limited by the folder's parents.
        id_ = await self.fork_client.fork(home, spec)
        if self._watch(home, id_, spec) is None:
            self._fail(f"rank {spec['rank']} {describe_exit(home)}", is_bug=is_bug(home))

    def _watch(self, home: Path, id_: ProcessId, spec: Mapping[str, Any]) -> WorkerProcess | None:
        if (spec["job"], spec["generation"]) == (self.job, self.generation):
            self.outputs[spec["rank"]] = home / "output"
        process = self.fork_client.open(id_)
        if process is None:
            return None
        member = WorkerProcess(home, process, spec)
        self.members.append(member)
        self._tasks.start(self._wait_end(member))
        return member

    def ended_before(self) -> list[Path]:
        """Return the folders of processes that ended before this generation, oldest first."""
        shown = {path.parent for path in self.outputs.values()}
        return [home for home in self._list_ended() if home not in shown]

    def _list_ended(self) -> list[Path]:
        living = {member.home for member in self.members}
        homes = [home for home in self.folder.glob("process/*") if home not in living]
        return sorted(homes, key=lambda home: home.stat().st_mtime)

    def _delete_old_homes(self) -> None:
        for home in self._list_ended()[:-ENDED_KEPT]:
            shutil.rmtree(home, ignore_errors=True)

    # ---- statuses -------------------------------------------------------------------------------

    def _gang(self) -> Iterator[WorkerProcess]:
        """Yield the living processes that have a rank in the present generation."""
        present = (self.job, self.generation)
        return (
            member
            for member in self.members
            if not member.is_dismissed
            and (member.spec["job"], member.spec["generation"]) == present
        )

    def spec(self) -> Mapping[str, Any] | None:
        """Return the spec of a member of the gang."""
        return next((member.spec for member in self._gang()), None)

    def rank_folder(self, job: JobId, generation: int, rank: int) -> Path | None:
        """Return the folder of a rank of the present generation."""
        if (job, generation) != (self.job, self.generation):
            return None
        found = (member.spec["folder"] for member in self._gang() if member.rank == rank)
        return next(map(Path, found), None)

    async def _serve(self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = await self._sender(writer)
        try:
            while member is not None and (line := await lines.readline()):
                try:
                    status = read(WorkerStatus, json.loads(line))
                    member.check_rank(status)
                except (ValueError, RecursionError) as error:
                    about = f"status of a worker in {member.home}"
                    if about not in self._unreadable.found:  # A job could fill our log.
                        self._unreadable.note(about, str(error))
                    continue
                if member.line is not writer:
                    member.line = writer
                    for order in member.orders.values():
                        write_order(writer, order)
                self._take_status(member, status)
        except (OSError, ValueError):
            pass  # The worker reconnects if it still lives.
        finally:
            if member is not None and member.line is writer:
                member.line = None
            writer.close()

    async def _sender(self, writer: asyncio.StreamWriter) -> WorkerProcess | None:
        """Find the process at the other end of a connection, by its pid from the kernel."""
        pid, _ = peer_of(writer.get_extra_info("socket"))
        for _ in range(SENDER_ATTEMPTS):
            member = next((m for m in self.members if m.process.id.pid == pid), None)
            if member is not None:
                return member
            await asyncio.sleep(SENDER_RETRY_S)  # It may connect before the fork is answered.
        return None

    def _take_status(self, member: WorkerProcess, status: WorkerStatus) -> None:
        member.status = status
        if member.present_status() is None:
            return  # It has not yet received its new spec.
        member.orders.pop("join", None)
        self.hear(JobId(member.spec["job"]), status)
        if member.is_dismissed or member not in self._gang():
            return
        if self._rendezvous and "meet" not in member.orders:
            member.send(self._meet_order())
        if status.taking == "failed":
            self._room_needed = max(self._room_needed, status.room_needed)
            self._fail(f"rank {status.rank}: {status.failure}", is_bug=status.is_bug)
        else:
            self._report_progress()

    def _report_progress(self) -> None:
        """Report the gang's status, once each member has sent one."""
        gang = list(self._gang())
        statuses = [each for member in gang if (each := member.present_status()) is not None]
        if self._is_starting or not self.generation:
            return
        if not gang:
            self._report_exit(self._failure or "the workers ended as they started")
        if not gang or len(statuses) < len(gang):
            return
        if any(status.taking == "failed" for status in statuses):
            self._report_failure()  # The others may seal, or have sealed.
            return
        combined = combine(statuses, at=self.clock.now())
        if combined.taking == "idle":
            self._is_over = True
            self._dismiss_idle_later()
        self.feed(combined)

    async def _wait_end(self, member: WorkerProcess) -> None:
        await member.process.wait_ended()
        # Processes that it started itself may hold the device.
        member.process.kill_group()
        await wait_exit_code_written(member.home)
        is_ours = member in self._gang() and not self._is_over
        self.members.remove(member)
        member.process.close()
        self.ended()
        if is_ours:
            failure = f"rank {member.rank} {describe_exit(member.home)}"
            self._fail(failure, is_bug=is_bug(member.home))
        if not member.is_dismissed:
            self._report_progress()

    def _fail(self, failure: str, *, is_bug: bool = False) -> None:
        """Report that the gang has failed; its first failure is the one that counts."""
        if not self._failure:
            self._failure, self._is_bug = failure, is_bug
        self._report_failure()

    def _report_failure(self) -> None:
        found = (member.present_status() for member in self._gang())
        statuses = [each for each in found if each is not None]
        self.feed(
            GangReported(
                self.clock.now(),
                self.generation,
                "failed",
                failure=self._failure,
                is_bug=self._is_bug,
                room_needed=self._room_needed,
                sealing=sealing_of(statuses),
                contradicted=contradicted_of(statuses),
                agreed_at=agreed_at(statuses),
            )
        )

    def _report_exit(self, failure: str) -> None:
        self._is_over = True
        self.feed(GangExited(self.clock.now(), self.generation, failure, self._is_bug))

    # ---- orders ---------------------------------------------------------------------------------

    def send_rendezvous(self, generation: int, address: str) -> None:
        """Tell all members where the ranks meet, those that connect later included."""
        if generation == self.generation and address != self._rendezvous:
            self._rendezvous = address
            for member in self._gang():
                member.send(self._meet_order())

    def _meet_order(self) -> dict[str, Any]:
        return {"order": "meet", "generation": self.generation, "address": self._rendezvous}

    def order(self, generation: int, order: dict[str, Any], *, rank: int | None = None) -> None:
        """Send an order to all workers of the generation, or to one rank."""
        if generation != self.generation:
            return
        for member in self._gang():
            if rank in {None, member.rank}:
                member.send({**order, "generation": generation})

    def abort(self, generation: int) -> None:
        """Order the workers to leave the generation."""
        if generation == self.generation:
            self._is_over = self._is_over or self._is_starting
        self.order(generation, {"order": "abort"})

    def kill(self, generation: int) -> None:
        """Kill the workers that have not left the generation."""
        if generation != self.generation:
            return
        self._is_over = self._is_over or self._is_starting
        for member in self._gang():
            if not member.is_idle():
                member.process.kill_group()
        self._report_progress()

    def _dismiss_idle_later(self) -> None:
        if self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.dismiss_all)

    def dismiss_all(self) -> None:
        """Kill all processes; none of them has a generation any more."""
        for member in self.members:
            member.dismiss()

    async def close(self, *, is_over: bool) -> None:
        """Stop listening; with ``is_over`` end the processes and the fork server too."""
        if self._server is not None:
            self._server.close()
        self._tasks.cancel()
        if is_over:
            self.dismiss_all()
            await self.fork_client.close()


def _read_spec(path: Path, *more: str) -> dict[str, Any]:
    """Read a worker's spec; ``ValueError`` if it is none: a job may have replaced the file."""
    spec = json.loads(read_plain(path))
    numbers = ("generation", "rank", "device", *more)
    is_spec = isinstance(spec, dict) and isinstance(spec.get("job"), str)
    if not is_spec or any(type(spec.get(name)) is not int for name in numbers):
        raise ValueError(f"{path} is no spec of a worker")
    return dict(spec)
