"""One generation of a worker: it takes up a state, trains, and leaves a sealed one behind."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from simulator.documents.problems import InputError
from simulator.spec.job import Job
from worker.checkpoint.capacity_check import check_device
from worker.checkpoint.compatibility import model_of
from worker.checkpoint.fetch import FetchedPieces, PieceNotFoundError, fetch
from worker.checkpoint.load_state import piece_digests
from worker.checkpoint.placement import pieces_needed
from worker.checkpoint.replica_check import ReplicaMismatchError, check_replicas
from worker.checkpoint.snapshot_file import NoRoomError
from worker.checkpoint.snapshot_manager import (
    SnapshotManager,
    check_node,
    load_snapshot,
    state_shape,
)
from worker.control.assignment import Assignment, OpenJob
from worker.distributed.interface import PeerLostError, Transport, TransportError
from worker.distributed.rendezvous import join_store, open_store, open_transport
from worker.engines.deepspeed.snapshot_adapter import DeepSpeedEngine, DeepSpeedStore
from worker.engines.interface import TrainingEngine
from worker.engines.select import engine_for, snapshot_job
from worker.layout.rank_layout import Holdings, holdings_of
from worker.layout.tensor_table import table_of
from worker.profiling.compute_time import ComputeTimer, slowed_by_file
from worker.profiling.fault_injection import Milestone, parse_fail_point
from worker.profiling.timeline import Recorder
from worker.training.trainer import NotANumberError, StepReport, Trainer

FAIL_POINT = "SAILOR_FAIL_AT"
"""Environment variable that lets a rank die: ``RANK:WHERE:STEP@GENERATION``, or a file beside
which one with that may stand (for tests)."""
Report = Callable[[dict[str, Any], bool], None]
"""Tells the agent how this worker stands; with True, that word is not left out."""


class GenerationEndedError(Exception):
    """The generation is over."""


@dataclass(eq=False)
class GenerationRun:
    """One rank's part in one generation."""

    assignment: Assignment
    say: Report
    taking: str = "fetching"
    step: int = 0
    _told: dict[str, Any] = field(default_factory=dict)
    _phases: dict[str, float] = field(default_factory=dict)
    _place: str = ""
    _stop_at: int | None = None
    _replicated: int = -1
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: threading.Event = field(default_factory=threading.Event)
    _transport: Transport | None = None
    _store: Store | None = None
    _trainer: TrainingEngine | None = None
    _keeper: SnapshotManager | None = None
    _since_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        about = self.assignment
        self.step = about.restore.step
        fail_at = parse_fail_point(about.fail_at or os.environ.get(FAIL_POINT, ""))
        self._recorder = Recorder(about.rank, fail_at=fail_at, generation=about.generation)
        self._recorder.at_step(self.step)
        self._busy = ComputeTimer(
            about.device, times_slower=slowed_by_file(about.snapshot_target.node)
        )

    # ---- orders, from the line's thread ---------------------------------------------------------

    def meet(self, place: str) -> None:
        """There the others are."""
        with self._changed:
            self._place = place
            self._changed.notify_all()

    def stop(self, stop_at: int) -> None:
        """Stop at the end of that step, or of the next one if that is over."""
        self._stop_at = stop_at
        if self._keeper is not None:
            self._keeper.stop_at = stop_at

    def replicated(self, step: int) -> None:
        """Copies of this node's pieces of that point are where they belong."""
        self._replicated = max(step, self._replicated)
        if self._keeper is not None:
            self._keeper.replicated(step)

    def leave(self) -> None:
        """The generation is over: end every wait."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        if self._transport is not None:
            self._transport.abort("its agent said that the generation is over")

    # ---- life, in the main thread ---------------------------------------------------------------

    def live(self, open_job: Callable[[Assignment], OpenJob]) -> bool:
        """Take part until the generation is over; can this process take part in another one?"""
        self._reached("joined")
        is_sound = True
        try:
            self._tell("fetching")
            self._take_up(open_job(self.assignment))
            self._train()
        except GenerationEndedError:
            pass
        except TransportError as error:
            self._break_off(error)
        except NoRoomError as error:
            # The node is too small, or others have filled its memory: no bug of the job's.
            self._told["room_needed"] = error.needed_bytes
            self._fail(f"{error.filename}: {error.strerror}", is_bug=False)
        except OSError as error:
            # No way to write snapshots, say, or files that cannot be read.
            self._fail(f"{error.filename or ''}: {error.strerror or error}", is_bug=True)
        except InputError as error:
            self._fail("; ".join(map(str, error.problems)), is_bug=True)
        except PieceNotFoundError as error:
            self._fail(str(error), is_bug=False)
        except (NotANumberError, ReplicaMismatchError) as error:
            self._fail(str(error), is_bug=True)
        except BaseException as error:
            # Our own defect, or the user's code: its trace is for us, the sentence for others.
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {error}", is_bug=True)
            is_sound = False
        if is_sound:
            self._over.wait()
            self._leave()
        return is_sound

    def _take_up(self, opened: OpenJob) -> None:
        """Have what the restore point holds, and a way to the others."""
        about = self.assignment
        torch.set_num_threads(about.threads)
        if about.device.type == "cuda":
            torch.cuda.set_device(about.device)
            self._recorder.finish_device_work = torch.cuda.synchronize
        holdings = _holdings(opened)
        check_node(
            snapshot_job(opened.job, opened.plan), opened.plan, holdings, about.snapshot_target
        )
        with ThreadPoolExecutor(1, thread_name_prefix="restore") as pool:
            coming = pool.submit(self._fetch, opened.job, holdings)
            transport = self._meet()
            trainer = self._build(opened, transport)
            found = self._wait(coming)
        self._phase("fetch")
        self._tell("rebuilding")
        if found is not None:
            load_snapshot(trainer, found.header.progress, found.bodies)
            for complaint in found.complaints:
                print(complaint, flush=True)
        else:
            trainer.export_state()
        self._reached("filled")
        self._open_keeper(trainer, transport)
        self._reached("reserved")
        self._phase("rebuild")
        self._tell("verifying")
        self._check_device()
        _compare(trainer)
        self._reached("verified")
        self._phase("verify")

    def _check_device(self) -> None:
        about = self.assignment
        peak, declared = about.peak, about.device_bytes
        if peak is None:
            return
        if about.device.type == "cuda":
            # The context stands already, and what is reserved is ours.
            free, _ = torch.cuda.mem_get_info(about.device)
            there = free + torch.cuda.memory_reserved(about.device)
            check_device(about.device.index, peak.tensors, there)
        elif declared is not None:
            number = int(about.spec["device"])
            check_device(number, peak.tensors + peak.context, declared)

    def _fetch(self, job: Job, holdings: Holdings) -> FetchedPieces | None:
        about = self.assignment
        groups = about.sources()
        if not groups:
            return None
        keys = pieces_needed(holdings, about.rank)
        return fetch(keys, groups, model=model_of(job), check_cancelled=self._check_cancelled)

    def _wait(self, coming: Future[FetchedPieces | None]) -> FetchedPieces | None:
        found = coming.result()
        self._reached("fetched")
        return found

    def _meet(self) -> Transport:
        """Open the place, or wait to hear where it is; then wait for the others there."""
        rendezvous = self.assignment.rendezvous
        try:
            if rendezvous.ranks > 1 and rendezvous.rank == 0:
                self._store, self._told["meeting"] = open_store(rendezvous)
                self._reached("meeting")
                self._tell("fetching")
            elif rendezvous.ranks > 1:
                self._store = self._go_to_the_place()
            self._transport = open_transport(rendezvous, self._store, self._check_cancelled)
        except TransportError:
            raise
        except (OSError, RuntimeError) as error:
            raise TransportError(f"rendezvous failed: {error}") from None
        self._reached("met")
        self._check_cancelled()
        return self._transport

    def _go_to_the_place(self) -> Store:
        with self._changed:
            while not self._place:
                self._check_cancelled()
                self._changed.wait()
        return join_store(self._place, self._check_cancelled)

    def _build(self, opened: OpenJob, transport: Transport) -> TrainingEngine:
        about = self.assignment
        engine, why = engine_for(opened.job, opened.plan)
        if why and about.rank == 0:
            print(f"generation {about.generation}: {why}", flush=True)
        snapshot_target = opened.job, opened.plan, about.rank, transport
        shared: dict[str, Any] = {
            "device": about.device,
            "recorder": self._recorder,
            "weights": opened.weights,
        }
        if engine == "deepspeed":
            place = DeepSpeedStore(self._store, about.generation, about.wait_s)
            self._trainer = DeepSpeedEngine(*snapshot_target, place, opened.data, **shared)
            return self._trainer
        self._trainer = Trainer(*snapshot_target, opened.data, busy=self._busy, **shared)
        return self._trainer

    def _open_keeper(self, trainer: TrainingEngine, transport: Transport) -> None:
        about = self.assignment
        self._keeper = SnapshotManager.open(
            trainer,
            about.snapshot_target,
            transport,
            on_sealed=self._sealed,
            reached=self._reached,
            on_short=self._short,
        )
        trainer.snapshot_hook = self._keeper
        self._keeper.stop_at = self._stop_at
        self._keeper.replicated(self._replicated)

    # ---- training -------------------------------------------------------------------------------

    def _train(self) -> None:
        trainer, keeper = self._trainer, self._keeper
        assert trainer is not None
        assert keeper is not None
        steps = trainer.job.steps
        is_done = steps is not None and trainer.progress.step >= steps
        is_stopping, has_begun = is_done, not is_done
        if has_begun:
            self._tell("running")
        while not is_stopping:
            report = trainer.step()
            keeper.after_step()
            self._note(report, keeper)
            is_done = steps is not None and trainer.progress.step >= steps
            is_stopping = report.stop or is_done
        self._reached("stopping")
        if has_begun:
            keeper.seal_at_stop(
                persist=is_done and self.assignment.snapshot_target.persist_every is not None
            )
        self._reached("stopped")
        self._tell("stopped")

    def _note(self, report: StepReport, keeper: SnapshotManager) -> None:
        if "first_step" not in self._phases:
            self._phase("first_step")
        self.step = report.step + 1
        self._told["loss"] = report.loss if math.isfinite(report.loss) else None
        self._told["tokens_per_s"] = report.label_tokens / report.seconds
        self._told["stall_s"] = keeper.stalls.stall_s
        self._told["late_s"] = keeper.stalls.late_s
        self._told["settle_s"] = keeper.stalls.settle_s
        self._told["busy_s"] = self._busy.typical_s
        self.say(self._word(), False)
        self._write_down(report)

    def _write_down(self, report: StepReport) -> None:
        """Add a line for people and programs that want to know each step's loss."""
        about = self.assignment
        line = {
            "job": about.job,
            "generation": about.generation,
            "step": self.step,
            "at": time.time(),
            "loss": report.loss,
            "sample_hash": report.sample_hash,
        }
        print(json.dumps(line), flush=True)

    def _sealed(self, step: int) -> None:
        """Called in the thread that seals."""
        self._told["sealed_at"] = {"step": step, "generation": self.assignment.generation}
        self.say(self._word(), True)

    def _short(self, needed_bytes: int) -> None:
        """A snapshot waits for room; the agent may let go of what only waits for the store."""
        self.say({**self._word(), "room_short": needed_bytes}, True)

    # ---- ends -----------------------------------------------------------------------------------

    def _break_off(self, error: TransportError) -> None:
        """The others are lost, not this one: save what is here, and wait for word."""
        print(f"generation {self.assignment.generation}: {error}", flush=True)
        if self._transport is not None:
            self._transport.abort(str(error))
        lost = [error.rank] if isinstance(error, PeerLostError) else []
        self._reached("broken")
        if self._keeper is not None and self._trainer is not None:
            report = self._trainer.roll_forward()
            if report is not None:
                self._note(report, self._keeper)
            if self._trainer.progress.step > self.assignment.restore.step:
                self._keeper.seal_what_is_whole()
        if not self._over.is_set():
            nodes = {self.assignment.node_of(rank) for rank in lost} - {None}
            self._told["broken_peers"] = sorted(nodes)
            self._tell("broken")

    def _fail(self, failure: str, *, is_bug: bool) -> None:
        print(failure, flush=True)
        if self._transport is not None:
            self._transport.abort(failure)
        self._told |= {"failure": failure, "is_bug": is_bug}
        self._tell("failed")

    def _leave(self) -> None:
        """Free all that the next generation needs."""
        if self._keeper is not None:
            self._keeper.close()
        if self._trainer is not None:
            self._trainer.close()
        if self._transport is not None:
            self._transport.close()
        self._keeper = self._trainer = self._transport = self._store = None
        gc.collect()
        if self.assignment.device.type == "cuda":
            torch.cuda.empty_cache()
        self._reached("left")
        for gone in ("failure", "is_bug", "room_needed", "broken_peers", "meeting"):
            self._told.pop(gone, None)
        self._tell("idle")

    # ---- words ----------------------------------------------------------------------------------

    def _check_cancelled(self) -> None:
        if self._over.is_set():
            raise GenerationEndedError

    def _reached(self, arrow: Milestone) -> None:
        if self._trainer is not None:
            self._recorder.at_step(self._trainer.progress.step)
        self._recorder.reached_point(arrow)

    def _phase(self, name: str) -> None:
        """A phase ends, and the next one begins."""
        self._check_cancelled()
        now_s = time.perf_counter()
        self._phases[name] = now_s - self._since_s
        self._since_s = now_s

    def _tell(self, taking: str) -> None:
        self.taking = taking
        self.say(self._word(), True)

    def _word(self) -> dict[str, Any]:
        return {
            "generation": self.assignment.generation,
            "rank": self.assignment.rank,
            "taking": self.taking,
            "step": self.step,
            "phases": [[name, seconds] for name, seconds in self._phases.items()],
            **self._told,
        }


def _holdings(opened: OpenJob) -> Holdings:
    job = opened.job
    tables = [table_of(job, index) for index in range(len(job.model.layers))]
    return holdings_of(opened.plan, tables, atoms=job.max_tp)


def _compare(trainer: TrainingEngine) -> None:
    """Do all that hold the same weights hold the same bits? It is the first thing sent, too."""
    shape = state_shape(trainer.job)
    check_replicas(
        piece_digests(trainer.buffers, shape),
        sorted(shape.keys),
        trainer.world_group,
        rank=trainer.rank,
        device=trainer.device,
        what="as it was taken up",
    )
