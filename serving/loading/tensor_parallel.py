"""Tensor parallelism: rank 0 tells the other ranks of a target what to run, and they obey.

An order is a few integers in a store of the host, numbered; its tensors follow by broadcast over the ranks' devices.

Shape legend: B requests, N packed rows, L columns of the slot table, W widest tree, M rows whose logits are wanted.

Every rank holds its share of the weights by transformers' own tensor-parallel plan and, in its KV pool, its share of the
KV heads. Rank 0 runs the engine and tells the others of every forward and commit before it does its own; they repeat it,
and the plan's collectives meet. Of a graph they capture the forwards and commits that it contains, with the broadcasts
that bring their inputs, and an order replays it. Logits and features are whole on every rank, so everything behind the
forward (drafting, sampling, scheduling) exists on rank 0 only, and so do the whole embedding and output head that
drafters read.

A checkpoint is read whole into each rank's RAM and split from there: transformers' loader of shares needs a package that
is not among the requirements.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from paceline.errors import ConfigError, RankError
from paceline.machine import free_port
from paceline.serving.loading.target import pick_device, read_target
from paceline.serving.target_model.graph_capture import CudaGraphs, EagerGraphs, Graph, GraphBackend
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=10)
"""For joining, for one collective and for one capture; between orders a rank may wait for ever."""
_JOIN_POLL_S = 0.05
"""Between looks whether all ranks have joined, which takes seconds: each imports torch."""

LOST_RANK_EXIT = 70
"""Exit code of a process whose other ranks are gone (sysexits' EX_SOFTWARE)."""
_NUM_KEPT = 4096
"""Orders kept in the store; the ranks meet in every forward, so none lags behind by so many."""


class Order(IntEnum):
    STOP = 0
    POOL = 1
    FORWARD = 2
    COMMIT = 3
    CAPTURE = 4
    REPLAY = 5


Step = tuple[Order, list[int]]
"""A forward or a commit and its sizes."""


class Orders:
    """The numbered orders of rank 0 in a store of the host: a rank without work waits there and not on its device."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store, self._next = store, 0

    def put(self, order: Order, sizes: Sequence[int]) -> None:
        """Rank 0: publish the next order."""
        self._store.set(f"order{self._next}", ",".join(map(str, (int(order), *sizes))))
        if self._next >= _NUM_KEPT:
            self._store.delete_key(f"order{self._next - _NUM_KEPT}")
        self._next += 1

    def take(self, wait_s: float = 60.0) -> Step:
        """Other ranks: the next order, waited for as long as it takes.

        Raises: RuntimeError when rank 0 is gone.
        """
        key = f"order{self._next}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=wait_s))
                break
            except dist.DistStoreError:  # nothing was ordered in this time
                continue
        self._next += 1
        order, *sizes = (int(n) for n in self._store.get(key).decode().split(","))
        return Order(order), sizes

    def answer(self, rank: int, trouble: str) -> None:
        """Other ranks: what went wrong with the latest order; '' = nothing."""
        self._store.set(f"answer{self._next}:{rank}", trouble)

    def answers(self, num_ranks: int) -> list[str]:
        """Rank 0: what went wrong with the latest order on the others, waited for."""
        keys = [f"answer{self._next}:{rank}" for rank in range(1, num_ranks)]
        self._store.wait(keys, _TIMEOUT)
        found = [self._store.get(key).decode() for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return found


class Leader:
    """Rank 0's line to the other ranks: orders through the store, tensors by broadcast."""

    def __init__(self, orders: Orders, num_ranks: int) -> None:
        self._orders, self._num_ranks = orders, num_ranks
        self._program: list[Step] | None = None
        """What was sent since `program_of` began; None outside of it."""
        self._is_known = False
        """The others know what comes next: they run a graph, and get its tensors alone."""
        self._num_shared = 0

    def share(self, backend: GraphBackend) -> GraphBackend:
        """A backend whose graphs the others replay, too, as far as they contain forwards and commits."""
        return _SharedGraphs(backend, self)

    def program_of(self, run: Callable[[], None]) -> list[Step]:
        """Run some work and return what of it the others had to do.

        Raises: what the work raises; RankError where others were in its midst.
        """
        program: list[Step] = []
        self._program = program
        try:
            run()
        except Exception as e:
            if program:  # they wait in a collective for what does not come
                raise RankError(f"rank 0 failed within a step that all ranks take: {e}; start the service again") from e
            raise
        finally:
            self._program = None
        return program

    def start_capture(self, program: list[Step]) -> int:
        """The others capture these steps now, as rank 0 must; returns the graph's number."""
        self._send(Order.CAPTURE, [n for order, sizes in program for n in (order, len(sizes), *sizes)], [])
        self._num_shared += 1
        return self._num_shared - 1

    def check_capture(self) -> None:
        """Raise RuntimeError when another rank could not capture the latest graph, RankError when one says nothing of it."""
        try:
            answers = self._orders.answers(self._num_ranks)
        except (RuntimeError, dist.DistStoreError) as e:
            raise RankError(
                f"a rank says nothing of a graph that it was to capture: {e}; start the service again"
            ) from e
        for rank, trouble in enumerate(answers, 1):
            if trouble:
                raise RuntimeError(f"rank {rank}: {trouble}")

    def start_replay(self, number: int) -> None:
        """The others replay this graph now, as rank 0 must."""
        self._send(Order.REPLAY, [number], [])

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """The others know what is sent in this block, and only tensors are."""
        self._is_known = True
        try:
            yield
        finally:
            self._is_known = False

    def send_pool(self, num_pages: int, page_tokens: int, num_scratch_rows: int) -> None:
        """The others allocate a pool of this shape; it replaces the one before."""
        self._send(Order.POOL, [num_pages, page_tokens, num_scratch_rows], [])

    def send_forward(self, batch: TargetBatch) -> None:
        """The others run this batch over their pool."""
        ancestors, logit_rows = batch.ancestors, batch.logit_rows
        columns = batch.slot_table.shape[1]
        width = -1 if ancestors is None else ancestors.shape[1]
        num_logits = -1 if logit_rows is None else logit_rows.numel()
        parts = [batch.token_ids, batch.positions, batch.cu_rows, batch.context_lens, batch.slot_table, batch.out_rows]
        parts += [t for t in (ancestors, logit_rows) if t is not None]
        self._send(
            Order.FORWARD, [batch.token_ids.numel(), batch.context_lens.numel(), columns, width, num_logits], parts
        )

    def send_commit(self, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
        """The others copy these pool rows."""
        self._send(Order.COMMIT, [src_rows.numel()], [src_rows, dst_rows])

    def stop(self) -> None:
        """The others leave their loops; nothing can be sent afterwards."""
        self._send(Order.STOP, [], [])

    def _send(self, order: Order, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        if not self._is_known:
            self._orders.put(order, sizes)
            if self._program is not None:
                self._program.append((order, list(sizes)))
        if parts:
            dist.broadcast(torch.cat([p.reshape(-1).long() for p in parts]), 0)


class _SharedGraphs:
    """Graphs of rank 0 that contain forwards and commits: captured and replayed by every rank at once."""

    def __init__(self, backend: GraphBackend, leader: Leader) -> None:
        self._backend, self._leader = backend, leader

    def capture(self, run: Callable[[], None]) -> Graph:
        """As the backend. Raises: what the capture raises, RuntimeError when another rank's did not succeed."""
        program = self._leader.program_of(run)
        if not program:  # drafting, cuts: rank 0's alone
            return self._backend.capture(run)
        number = self._leader.start_capture(program)
        try:
            with self._leader.known():
                graph = self._backend.capture(run)
        finally:  # whatever became of this rank's, the others are behind theirs before the next order
            self._leader.check_capture()
        return _SharedGraph(graph, self._leader, number)


@dataclass(frozen=True, slots=True)
class _SharedGraph:
    graph: Graph
    leader: Leader
    number: int

    def replay(self) -> None:
        self.leader.start_replay(self.number)
        with self.leader.known():
            self.graph.replay()


def follow(target: TargetModel, orders: Orders, rank: int) -> None:
    """Obey rank 0 until it says stop: what every other rank does."""
    kv: KVPool | None = None
    graphs: list[Graph | None] = []
    backend = CudaGraphs(target.device) if target.device.type == "cuda" else EagerGraphs()

    def obey(steps: Sequence[Step]) -> None:
        assert kv is not None, "a pool comes before its first use"
        for order, sizes in steps:
            if order == Order.COMMIT:
                kv.commit_padded(*_receive([sizes[0], sizes[0]], target.device))
            else:
                target.forward(_receive_batch(sizes, target.device), kv)

    while True:
        order, sizes = orders.take()
        if order == Order.STOP:
            return
        if order == Order.POOL:
            kv = target.new_kv_pool(*sizes)
        elif order == Order.CAPTURE:
            graphs.append(None)
            steps = _program(sizes)
            try:
                graphs[-1] = backend.capture(lambda steps=steps: obey(steps))  # type: ignore[misc]
            except Exception as e:  # as graph_capture.capture_all: rank 0 gives that family up
                logger.exception("a graph could not be captured")
                orders.answer(rank, str(e) or type(e).__name__)
                continue
            orders.answer(rank, "")
        elif order == Order.REPLAY:
            graph = graphs[sizes[0]]
            assert graph is not None, "rank 0 replays what every rank has captured"
            graph.replay()
        else:
            obey([(order, sizes)])


def _program(numbers: Sequence[int]) -> list[Step]:
    """Steps as `Leader.start_capture` writes them."""
    steps, rest = [], list(numbers)
    while rest:
        order, size = rest[:2]
        steps.append((Order(order), rest[2 : 2 + size]))
        rest = rest[2 + size :]
    return steps


def _receive(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    flat = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    dist.broadcast(flat, 0)
    return list(flat.split(list(sizes)))


def _receive_batch(sizes: Sequence[int], device: torch.device) -> TargetBatch:
    rows, requests, columns, width, num_logits = sizes
    lengths = [rows, rows, requests + 1, requests, requests * columns, rows, rows * max(width, 0), max(num_logits, 0)]
    parts = _receive(lengths, device)
    return TargetBatch(
        token_ids=parts[0],
        positions=parts[1],
        cu_rows=parts[2],
        context_lens=parts[3],
        slot_table=parts[4].view(requests, columns),
        out_rows=parts[5],
        ancestors=parts[6].view(rows, width).bool() if width >= 0 else None,
        logit_rows=parts[7] if num_logits >= 0 else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """What a rank is started with."""

    path: str
    size: int
    port: int
    device: str  # cpu | cuda
    dtype: str = "auto"
    tap_layers: tuple[int, ...] | None = None


# ---- splitting ------------------------------------------------------------------------------------------------------


def check_split(model: Any, size: int) -> None:
    """Raise ConfigError unless a model can be split over `size` ranks with whole KV heads on each."""
    config = model.config.get_text_config()
    plan = getattr(model, "tp_plan", None) or {}
    keys = [style for name, style in plan.items() if name.endswith(".k_proj")]
    if not keys or set(keys) != {"colwise"}:
        raise ConfigError(
            f"engine.tensor_parallel must be 1 for {config.model_type}: transformers has no plan that splits its KV heads, "
            f"got {size}"
        )
    heads = {
        "attention heads": config.num_attention_heads,
        "KV heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    for name, number in heads.items():
        if number % size:
            raise ConfigError(f"engine.tensor_parallel must divide the target's {number} {name}, got {size}")


def split_model(model: Any, size: int, device: torch.device) -> Any:
    """Split a model that is whole in this rank's RAM; every rank calls it. Returns the model, on `device`.

    The ranks must have joined (`join_ranks`).  Source: the model's own tp_plan, applied by transformers.
    """
    from torch.distributed.tensor import DTensor

    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh
    except ImportError as e:
        raise ConfigError(
            f"engine.tensor_parallel must be 1 with transformers {transformers.__version__}, got {size}; install 5.18 or later"
        ) from e

    check_split(model, size)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:  # the plan splits them differently
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    config = DistributedConfig(tp_size=size, tp_plan="auto")
    _, mesh = initialize_distributed_mesh(config)
    model.requires_grad_(False)  # integer and frozen weights take no gradient once they are split
    model = type(model).maybe_distribute_model(model, config, mesh)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                module._parameters[name] = torch.nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


# ---- processes ------------------------------------------------------------------------------------------------------


def join_ranks(rank: int, settings: RankSettings, others: Sequence[Any] = ()) -> tuple[torch.device, Orders]:
    """Join the process group as `rank`; returns the rank's device and its line. Blocks until all ranks have joined.

    others: processes of ranks 1 and up, where rank 0 is to look after them.
    Raises: ConfigError when the machine's accelerator is not the configured device, or there are fewer than ranks; RankError
    when another rank ends before all have joined. One that ends later is missed by the first collective.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if found is None else found.type
    if kind != settings.device:
        raise ConfigError(f"engine.tensor_parallel > 1 must run on this machine's {kind}, got device {settings.device}")
    if kind == "cuda":
        if torch.cuda.device_count() < settings.size:
            raise ConfigError(
                f"engine.tensor_parallel must be at most the {torch.cuda.device_count()} visible GPUs, got {settings.size}"
            )
        torch.cuda.set_device(rank)
    # What transformers looks its own rank up by.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.size))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    for library in ("GLOO", "NCCL"):  # all ranks are on this machine; by default they listen on an outer interface
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = _store(rank, settings, others)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=settings.size,
        timeout=_TIMEOUT,
        device_id=device if kind == "cuda" else None,
    )
    return device, Orders(store)


def _store(rank: int, settings: RankSettings, others: Sequence[Any]) -> dist.TCPStore:
    """The ranks' store; rank 0 hands it a socket on loopback, because of itself it listens on all interfaces.

    Rank 0 returns when all have come: torch's own waiting does not see a process that ended.
    """
    listener = socket.create_server(("127.0.0.1", settings.port)).detach() if rank == 0 else None
    store = dist.TCPStore(
        "127.0.0.1",
        settings.port,
        settings.size,
        is_master=rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    store.set(f"joined/{rank}", "")
    give_up = time.monotonic() + _TIMEOUT.total_seconds()
    while rank == 0 and not store.check([f"joined/{i}" for i in range(settings.size)]):
        for i, process in enumerate(others, 1):
            if process.exitcode is not None:
                raise RankError(f"rank {i} ended before all had joined, exit code {process.exitcode}")
        if time.monotonic() > give_up:
            raise RankError(f"not all of {settings.size} ranks joined within {_TIMEOUT}")
        time.sleep(_JOIN_POLL_S)
    return store


class Ranks:
    """The processes of ranks 1 and up, and the leader of rank 0."""

    def __init__(self, processes: list[Any], leader: Leader) -> None:
        self._processes, self._leader, self._is_closing = processes, leader, False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        """End this process when another rank has: a graph on its device would wait for that for ever, and nobody could
        tell; where it serves, another replica takes over."""
        ended = multiprocessing.connection.wait([p.sentinel for p in self._processes])
        if not self._is_closing:
            ranks = [i for i, p in enumerate(self._processes, 1) if p.sentinel in ended]
            logger.critical("rank %s has ended; this process ends, too: the target is split over both", ranks)
            for process in self._processes:  # they wait for the lost one, and hold their devices meanwhile
                process.kill()
            os._exit(LOST_RANK_EXIT)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the other ranks; no forward may run any more."""
        self._is_closing = True
        try:
            self._leader.stop()
            dist.destroy_process_group()
        except RuntimeError:  # a rank is gone already; the others are ended below
            logger.exception("the ranks did not part in order")
        for process in self._processes:
            process.join(timeout_s)
            if process.is_alive():
                process.terminate()


def load_parallel(
    path: str | Path,
    *,
    size: int,
    device: str = "auto",
    dtype: str = "auto",
    tap_layers: tuple[int, ...] | None = None,
) -> tuple[TargetModel, Ranks]:
    """Load a checkpoint over `size` ranks of this machine; the calling process becomes rank 0.

    Raises: ConfigError as read_target, and when the target or the machine cannot be split so; RankError as join_ranks.
    """
    device = pick_device(device)
    settings = RankSettings(
        path=str(path), size=size, port=free_port(), device=device, dtype=dtype, tap_layers=tap_layers
    )
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run_rank, args=(rank, settings), daemon=True) for rank in range(1, size)]
    for process in processes:
        process.start()
    try:
        target, orders = _load_rank(0, settings, processes)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    leader = Leader(orders, size)
    target.leader = leader
    logger.info("target split ranks=%d device=%s kv_heads=%d", size, device, target.num_kv_heads)
    return target, Ranks(processes, leader)


def _load_rank(rank: int, settings: RankSettings, others: Sequence[Any] = ()) -> tuple[TargetModel, Orders]:
    device, orders = join_ranks(rank, settings, others)
    target = read_target(
        settings.path,
        device=settings.device,
        dtype=settings.dtype,
        tap_layers=settings.tap_layers,
        split=lambda model: split_model(model, settings.size, device),
        num_ranks=settings.size,
    )
    return target, orders


def drop_tables(target: TargetModel) -> None:
    """Give up the whole embedding and output head of a rank that does not draft; its forward reads its share of them."""
    target.embed_weight = target.head_weight = target.embed_weight.new_empty(0, target.hidden_size)


def _run_rank(rank: int, settings: RankSettings) -> None:
    """Main of ranks 1 and up."""
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.size))
    target, orders = _load_rank(rank, settings)
    drop_tables(target)
    follow(target, orders, rank)
    dist.destroy_process_group()
