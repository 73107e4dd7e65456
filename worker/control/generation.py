"""One generation of a worker: restores a state, trains, and leaves a sealed snapshot."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from simulator.documents.problems import InputError
from worker.checkpoint.capacity_check import check_device
from worker.checkpoint.fetch import PieceNotFoundError
from worker.checkpoint.snapshot_file import NoRoomError
from worker.checkpoint.snapshots.snapshot_manager import (
    SnapshotManager,
    check_node,
    check_state,
    continue_from,
    load_piece,
)
from worker.control.after_loss import OF_ONE_GENERATION, AfterLoss
from worker.control.assignment import Assignment, OpenJob
from worker.control.hang_report import hang_reporter
from worker.control.state_fetch import StateFetch
from worker.control.work_folder import redact
from worker.devices.rank_device import DeviceMissingError, device_failure, set_up
from worker.distributed.interface import Transport, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.rank_protocol import OtherCodeError
from worker.distributed.rendezvous import RankStore, join_store, open_store, open_transport
from worker.engines.deepspeed.snapshot_adapter import DeepSpeedEngine
from worker.engines.interface import TrainingEngine
from worker.engines.select import engine_for, snapshot_job
from worker.host_memory import return_freed_memory
from worker.layout.tensor_table import holdings_for
from worker.profiling.fault_injection import FAIL_POINT, Milestone, parse_fail_point
from worker.profiling.kept_steps import timer_of_rank
from worker.profiling.timeline import Recorder
from worker.script.script_error import in_brief, print_script_traceback, script_line, sentence
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.step_report import StepReport, finite
from worker.training.trainer import NotANumberError, RankTrainer

EVALUATIONS_MAX = 32
"""How many evaluations each status repeats, since the leader may be down for some seconds."""
ReportStatus = Callable[[dict[str, Any], bool], None]
"""Reports the worker's status to the agent; with True, the report must be delivered."""


class GenerationEndedError(Exception):
    """The generation is over."""


@dataclass(eq=False)
class GenerationRun:
    """One rank's run of one generation."""

    assignment: Assignment
    report: ReportStatus
    state: str = "fetching"
    step: int = 0
    _extra_status: dict[str, Any] = field(default_factory=dict)
    _phases: dict[str, float] = field(default_factory=dict)
    _evaluations: deque[dict[str, Any]] = field(
        default_factory=partial(deque, maxlen=EVALUATIONS_MAX)
    )
    _address: str = ""
    _stop_at: int | None = None
    _replicated: int = -1
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    """Held while a status is read and handed over, so that the last one is the newest."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _fetch: StateFetch | None = None
    _transport: Transport | None = None
    _rank_store: RankStore | None = None
    _trainer: TrainingEngine | None = None
    _snapshots: SnapshotManager | None = None
    _since_s: float = field(default_factory=time.perf_counter)
    _is_reusable: bool = True
    was_bug: bool = False
    """The process cannot be used again because of an error of the job or of ours."""

    def __post_init__(self) -> None:
        about = self.assignment
        self.step = about.restore.step
        fail_at = parse_fail_point(about.fail_at or os.environ.get(FAIL_POINT, ""))
        self._recorder = Recorder(about.rank, fail_at=fail_at, generation=about.generation)
        self._recorder.at_step(self.step)
        own = Path(about.spec["folder"])
        self._busy = timer_of_rank(about.device, about.snapshot_target.node, own)
        self._after_loss = AfterLoss(
            restored_step=self.step,
            node_of=about.node_of,
            has_ended=self._ended.is_set,
            report=self._report_now,
        )

    # ---- commands, in the connection's thread ----------------------------------------------------

    def meet(self, address: str) -> None:
        """Receive the address of the rendezvous."""
        with self._changed:
            self._address = address
            self._changed.notify_all()

    def stop(self, stop_at: int) -> None:
        """Stop once ``stop_at`` steps are done; if they are done already, after the next step."""
        self._stop_at = stop_at
        if self._snapshots is not None:
            self._snapshots.stop_at = stop_at

    def replicated(self, step: int) -> None:
        """Record that this rank's replicas of that step are stored, or were given up."""
        self._replicated = max(step, self._replicated)
        if self._snapshots is not None:
            self._snapshots.replicated(step)

    def end(self) -> None:
        """End the generation and every wait."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._transport is not None:
            self._transport.abort("the agent ended the generation")

    # ---- start, in the main thread ---------------------------------------------------------------

    def run(self, open_job: Callable[[Assignment], OpenJob]) -> bool:
        """Run one generation; return True if the process can be reused."""
        self._milestone("joined")
        is_sound = True
        try:
            self._set_state("fetching")
            self._restore(open_job(self.assignment))
            self._train()
        except GenerationEndedError:
            pass
        except TransportError as error:
            self._save_after_loss(error)
        except NoRoomError as error:
            # The node is too small or its memory is full, which is not a bug of the job.
            self._extra_status["room_needed"] = error.needed_bytes
            self._fail(f"{error.filename}: {error.strerror}", is_bug=False)
        except OSError as error:
            # Snapshots cannot be written, for example, or files cannot be read.
            if is_sound := (script_line(error) is None):
                self._fail(f"{error.filename or ''}: {error.strerror or error}", is_bug=True)
            else:
                self._fail_in_script(error)
        except InputError as error:
            if error.__cause__ is not None:
                print_script_traceback(error.__cause__)
            self._fail("; ".join(map(str, error.problems)), is_bug=True)
        except PieceNotFoundError as error:
            self._fail_to_fetch(error)
        except (DeviceMissingError, OtherCodeError) as error:
            self._fail(str(error), is_bug=False)
        except (NotANumberError, ReplicaMismatchError) as error:
            if isinstance(error, ReplicaMismatchError) and self._snapshots is not None:
                self._extra_status["withdrew"] = self._snapshots.withdraw_if_blamed(error)
                self._extra_status |= self._after_loss.of_difference(error)
            self._fail(str(error), is_bug=True)
        except BaseException as error:
            self._fail_in_script(error)
            is_sound = False
        if is_sound:
            self._ended.wait()
            self._release()
        self.was_bug = not is_sound
        return is_sound and self._is_reusable

    def _restore(self, opened: OpenJob) -> None:
        """Fetch the state that this rank holds, connect to the peers, and build the trainer."""
        about = self.assignment
        torch.set_num_threads(about.threads)
        if about.device.type == "cuda":
            set_up(about.device)
        holdings = holdings_for(opened.plan, opened.job)
        job = snapshot_job(opened.job, opened.plan)
        has_room = check_node(job, opened.plan, holdings, about.snapshot_target)
        self._fetch = StateFetch(about, job, holdings, self._check_cancelled)
        with self._fetch:
            transport = self._meet()
            trainer = self._build(opened, transport)
            found = self._fetch.fill(partial(load_piece, trainer))
            self._milestone("fetched")
        self._fetch = None
        self._check_cancelled()
        self._end_phase("fetch")
        self._set_state("rebuilding")
        if found is not None:
            continue_from(trainer, found.header.progress)
            for problem in found.problems:
                print(problem, flush=True)
        else:
            trainer.export_state()
        self._milestone("filled")
        self._open_snapshots(trainer, transport, has_room)
        self._milestone("reserved")
        self._check_cancelled()
        self._end_phase("rebuild")
        self._set_state("verifying")
        self._check_device()
        check_state(trainer)
        self._milestone("verified")
        self._check_cancelled()
        self._end_phase("verify")

    def _check_device(self) -> None:
        about = self.assignment
        peak, declared = about.peak, about.device_bytes
        if peak is None:
            return
        if about.device.type == "cuda":
            # The CUDA context exists already, and reserved memory is ours.
            free, _ = torch.cuda.mem_get_info(about.device)
            there = free + torch.cuda.memory_reserved(about.device)
            check_device(about.device.index, peak.tensors, there)
        elif declared is not None:
            number = int(about.spec["device"])
            check_device(number, peak.tensors + peak.context, declared)

    def _meet(self) -> Transport:
        """Open the rendezvous as rank 0, or wait for its address; then connect to all ranks."""
        rendezvous = self.assignment.rendezvous
        try:
            if rendezvous.ranks > 1 and rendezvous.rank == 0:
                self._rank_store = open_store(rendezvous)
                self._extra_status["meeting"] = self._rank_store.address
                self._milestone("meeting")
                self._set_state("fetching")
            elif rendezvous.ranks > 1:
                self._rank_store = self._join_rendezvous(rendezvous.rank)
            self._transport = open_transport(
                rendezvous, self._rank_store, self._check_cancelled, self._give_up_process
            )
        except TransportError:
            raise
        except (OSError, RuntimeError) as error:
            raise TransportError(f"rendezvous failed: {error}") from None
        self._milestone("met")
        self._check_cancelled()
        if isinstance(self._transport, ProcessTransport):
            self._transport.activity = lambda: self._recorder.activity_text
            self._transport.on_failure = self._after_loss.announce
            self._transport.on_stall = hang_reporter(
                self._extra_status, self._after_loss.nodes_of, self._report_now
            )
        return self._transport

    def _join_rendezvous(self, rank: int) -> RankStore:
        with self._changed:
            while not self._address:
                self._check_cancelled()
                self._changed.wait()
        return join_store(self._address, rank, self._check_cancelled)

    def _build(self, opened: OpenJob, transport: Transport) -> TrainingEngine:
        about = self.assignment
        engine, why = engine_for(opened.job, opened.plan)
        if why and about.rank == 0:
            print(f"generation {about.generation}: {why}", flush=True)
        rank = opened.job, opened.plan, about.rank, transport
        shared: dict[str, Any] = {
            "device": about.device,
            "recorder": self._recorder,
            "weights": opened.weights,
        }
        if engine == "deepspeed":
            store: Store = HashStore()  # For a single rank.
            if self._rank_store is not None:
                store = PrefixStore(f"deepspeed/{about.generation}", self._rank_store.store)
            self._trainer = DeepSpeedEngine(
                *rank, store, opened.data, deadline_s=about.wait_s, **shared
            )
            return self._trainer
        self._trainer = RankTrainer(
            *rank, opened.data, busy=self._busy, module=opened.module, **shared
        )
        return self._trainer

    def _open_snapshots(self, trainer: TrainingEngine, transport: Transport, room: bool) -> None:
        self._snapshots = SnapshotManager.open(
            trainer,
            self.assignment.snapshot_target,
            transport,
            on_sealed=self._sealed,
            on_milestone=self._milestone,
            on_no_room=self._report_no_room,
            all_at_once=room,
        )
        trainer.snapshot_hook = self._snapshots
        self._after_loss.trainer, self._after_loss.snapshots = trainer, self._snapshots
        if self._stop_at is not None:  # Else an order may arrive between the two.
            self._snapshots.stop_at = self._stop_at
        self._snapshots.replicated(self._replicated)

    # ---- training -------------------------------------------------------------------------------

    def _train(self) -> None:
        trainer, snapshots = self._trainer, self._snapshots
        assert trainer is not None
        assert snapshots is not None
        steps = trainer.job.steps
        is_done = steps is not None and trainer.progress.step >= steps
        is_stopping, has_begun = is_done, not is_done
        if has_begun:
            self._set_state("running")
        if self.assignment.restore.source != "start":
            # The evaluation of this step was put off by a stop, or a loss may have interrupted it.
            self._evaluate_if_due(trainer)
        while not is_stopping:
            step_report = trainer.step()
            snapshots.after_step()
            self._report_step(step_report)
            trainer.log(step_report)
            is_done = steps is not None and trainer.progress.step >= steps
            # Who goes on from an ordered stop evaluates: a notice leaves no time for that.
            self._evaluate_if_due(trainer, waits=is_done or not step_report.stop)
            is_stopping = step_report.stop or is_done
        if is_done:  # Also if a loss has interrupted the last evaluation, which was repeated now.
            trainer.end_log()
        self._milestone("stopping")
        # A generation that begins at the last step seals it, too: only its own can become durable.
        if has_begun or self.assignment.restore.source == "memory":
            snapshots.seal_at_stop(
                persist=is_done and self.assignment.snapshot_target.persist_every is not None
            )
        self._milestone("stopped")
        self._set_state("stopped")

    def _report_step(self, step_report: StepReport) -> None:
        if "first_step" not in self._phases:
            self._end_phase("first_step")
        self.step = step_report.step + 1
        self._extra_status.pop("hang", None)
        if isinstance(self._transport, ProcessTransport):
            self._transport.expect_steps(step_report.seconds)
        self._extra_status["loss"] = step_report.loss if math.isfinite(step_report.loss) else None
        # What the planner predicts; a script's samples count as one token each.
        assert self._trainer is not None
        assert self._snapshots is not None
        tokens = step_report.samples * self._trainer.job.sequence
        self._extra_status["tokens_per_s"] = tokens / step_report.seconds
        stalls = self._snapshots.stalls
        self._extra_status |= {"stall_s": stalls.stall_s, "late_s": stalls.late_s}
        self._extra_status |= {"settle_s": stalls.settle_s, "busy_s": self._busy.typical_s}
        # The log has every step's loss; a later status may replace this one before it is sent.
        line = {**self.assignment.named, **step_report.line(), "step": self.step, "at": time.time()}
        print(json.dumps(line), flush=True)
        self._report_now(must_deliver=False)

    def _evaluate_if_due(self, trainer: TrainingEngine, *, waits: bool = True) -> None:
        found = trainer.evaluate_if_due() if waits else None
        self._extra_status["unlogged"] = redact(trainer.unlogged)
        if found is not None and self.assignment.rank == 0:
            metrics = finite(found)
            line = {**self.assignment.named, "step": self.step, "evaluation": metrics}
            print(json.dumps(line), flush=True)
            self._evaluations.append({"step": self.step, "metrics": [*map(list, metrics.items())]})
            *earlier, last = self._evaluations
            self._extra_status |= {"evaluation": last, "earlier_evaluations": earlier}
            self._report_now()

    def _sealed(self, step: int) -> None:
        """Report a sealed snapshot; called in the snapshot thread."""
        self._extra_status["sealed_at"] = {"step": step, "generation": self.assignment.generation}
        self._report_now()

    def _report_no_room(self, needed_bytes: int, complete_step: int) -> None:
        """Report that a snapshot waits for room, so that the agent may free some."""
        self._check_cancelled()
        self._report_now(room_short=needed_bytes, complete_step=complete_step)

    # ---- end and failure -------------------------------------------------------------------------

    def _save_after_loss(self, error: TransportError) -> None:
        """Save the state after losing other ranks, and wait for the agent."""
        print(f"generation {self.assignment.generation}: {error}", flush=True)
        if self._transport is not None:
            self._transport.abort(str(error))
        self._milestone("broken")
        try:
            self._after_loss.announce(error)
            self._after_loss.save(self._report_step)
        except Exception as second:
            # Earlier snapshots stay; the original failure is still reported.
            print(f"the last step is not saved or logged: {sentence(second, redact)}", flush=True)
            self._is_reusable &= isinstance(second, OSError)
        self._after_loss.end()
        if not self._ended.is_set():
            self._extra_status["broken_peers"] = self._after_loss.lost_nodes(error)
            self.state = "broken"
        self._report_now()

    def _fail_to_fetch(self, error: PieceNotFoundError) -> None:
        """Report nodes that no longer answer as lost peers: what is missing may have been there."""
        if not error.unreachable:
            self._fail(str(error), is_bug=False)
            return
        print(error, flush=True)
        if self._transport is not None:
            self._transport.abort(str(error))
        if not self._ended.is_set():
            self._extra_status |= {"failure": str(error), "broken_peers": sorted(error.unreachable)}
            self._set_state("broken")

    def _fail_in_script(self, error: BaseException) -> None:
        """Log the trace of a bug, in a script or of ours, and report one sentence."""
        print_script_traceback(error)
        about = self.assignment
        on_device = device_failure(
            error, rank=about.rank, device=about.device, activity=self._recorder.activity_text
        )
        self._fail(on_device or f"after {self.step} steps: {sentence(error, redact)}", is_bug=True)

    def _fail(self, failure: str, *, is_bug: bool) -> None:
        self._after_loss.end()
        print(failure := redact(failure), flush=True)
        failure = in_brief(failure)
        if self._transport is not None:
            self._transport.abort(failure)
        self._extra_status |= {"failure": failure, "is_bug": is_bug}
        self._set_state("failed")

    def _release(self) -> None:
        """Release everything that the next generation needs."""
        self._after_loss.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._trainer is not None:
            self._trainer.close()
        if self._transport is not None:
            self._transport.close()
            if self._transport.is_stuck:
                self._give_up_process("a group did not open or close")
        if self._rank_store is not None:
            self._rank_store.close()
        if self._fetch is not None and not self._fetch.has_ended():
            self._give_up_process("a read of the state does not end")
        self._fetch = self._snapshots = self._trainer = self._transport = self._rank_store = None
        return_freed_memory()
        if self.assignment.device.type == "cuda" and self._is_reusable:
            torch.cuda.empty_cache()
        self._milestone("left")
        for key in OF_ONE_GENERATION:
            self._extra_status.pop(key, None)
        if self._is_reusable:
            self._set_state("idle")

    def _give_up_process(self, why: str) -> None:
        print(f"{why}: this process is not used again", flush=True)
        self._is_reusable = False

    # ---- status ----------------------------------------------------------------------------------

    def _check_cancelled(self) -> None:
        if self._ended.is_set():
            raise GenerationEndedError

    def _milestone(self, milestone: Milestone) -> None:
        if self._trainer is not None:
            self._recorder.at_step(self._trainer.progress.step)
        self._recorder.reached_point(milestone)

    def _end_phase(self, name: str) -> None:
        """Record the time of a phase and start the next one."""
        now_s = time.perf_counter()
        self._phases[name] = now_s - self._since_s
        self._since_s = now_s

    def _set_state(self, state: str) -> None:
        self.state = state
        self._report_now()

    def _report_now(self, *, must_deliver: bool = True, **more: Any) -> None:
        with self._reporting:
            self.report({**self._status(), **more}, must_deliver)

    def _status(self) -> dict[str, Any]:
        return {
            "generation": self.assignment.generation,
            "rank": self.assignment.rank,
            "taking": self.state,
            "step": self.step,
            "phases": [[*each] for each in list(self._phases.items())],
            **self._extra_status,
            **self._after_loss.status,
        }
