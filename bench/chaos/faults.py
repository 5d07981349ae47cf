"""Faults: one table of what may happen to a service: what it does, and how its end is seen.

A fault strikes, holds for as long as it lasts, and gives a function that says whether what it struck is back; that the
service as a whole is well is asked for all of them alike (place.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from paceline.bench.chaos.checks import Questions
from paceline.bench.chaos.drafters import flip_bit, nudged, shuffled
from paceline.bench.chaos.load import Answer, leave_streams, long_body, new_client, send, wait_for
from paceline.bench.chaos.place import Place, kill
from paceline.bench.serve.fuzz import FuzzRequests, FuzzTotals, judge_raw, run_one
from paceline.bench.serve.fuzz_sockets import ask_raw
from paceline.errors import PacelineError
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, cannot_store

FILL_BYTES = 2**20
FLOOD, FLOOD_TOKENS = 64, 8
NUM_FUZZ = 40
NUM_LEAVING, NUM_MUTE = 6, 4
STEP_S = 61 * 60.0
"""Largest step of the clock: an hour, as where somebody sets the wrong zone, and behind what is kept for an hour."""
ORDER_S = 60.0
"""Longest time until a training job can be ordered and its process is there; a service without fresh traces has none."""


class CannotStrike(PacelineError):
    """The fault has nothing to happen to at this moment; it counts as skipped."""


@dataclass(kw_only=True)
class Blow:
    """What one fault did."""

    is_back: Callable[[], bool] = lambda: True
    """Whether what was struck is as it should be again."""
    problems: list[str] = field(default_factory=list)
    """What the service should not have done meanwhile."""
    answers: list[Answer] = field(default_factory=list)
    """Of requests that belong to the fault; they are checked as the load's."""
    note: str = ""
    """How it was done, where that depends on the computer."""
    pauses_ms: list[float] = field(default_factory=list)
    """How long each swap kept an engine from its rounds."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fault may use."""

    place: Place
    rng: random.Random
    """Of this fault alone: it decides who is struck, where, and for how long."""
    questions: Questions
    disk: Path | None
    """A small file system of its own that holds the data folder; None = it lies on one that must not be filled."""


Strike = Callable[[Surroundings], Blow]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    what: str
    """What it does."""
    seen: str
    """How its end is seen."""
    strike: Strike
    breaks: str = ""
    """Kind of process whose answers end with it."""
    needs: str = ""
    """What not every service has: a kind of process, or a clock."""
    is_blind: bool = False
    """It asks nothing of the service, so that others may happen at the same time."""


# ---- processes --------------------------------------------------------------------------------------------------------
def killing(kind: str) -> Strike:
    """kill -9 of one process of a kind."""

    def strike(around: Surroundings) -> Blow:
        place = around.place
        before = place.processes(kind)
        if not before:
            raise CannotStrike(f"no process of kind {kind} runs")
        kill(around.rng.choice(before))
        old = {p.pid for p in before}

        def is_back() -> bool:
            now = {p.pid for p in place.processes(kind)}
            return bool(now - old) and len(now) == len(old)

        return Blow(is_back=is_back)

    return strike


def stopping(kind: str, most_s: float = 4.0) -> Strike:
    """SIGSTOP of one process of a kind, and SIGCONT some seconds later."""

    def strike(around: Surroundings) -> Blow:
        found = around.place.processes(kind)
        if not found:
            raise CannotStrike(f"no process of kind {kind} runs")
        with around.place.stopped([around.rng.choice(found)]):
            _hold(around, 1.0, most_s)
        return Blow()

    return strike


def in_training(strike: Strike) -> Strike:
    """A fault in the midst of a training job, which is ordered for it."""

    def ordered(around: Surroundings) -> Blow:
        place, job_id = around.place, order_training(around)
        wait_for(lambda: place.processes("trainer"), "a training process", ORDER_S, check=place.check)
        blow = strike(around)

        def has_ended() -> bool:
            job = place.snapshot().job
            return job is None or job.job_id != job_id

        return Blow(is_back=has_ended, note=blow.note)

    return ordered


def order_training(around: Surroundings) -> str:
    """Order a training job on what the service has traces of; returns its id. Raises: CannotStrike."""
    place, said = around.place, "no bucket has traces yet"
    deadline = time.monotonic() + ORDER_S
    while time.monotonic() < deadline:
        state = place.snapshot()
        if state.job is not None:
            return state.job.job_id
        for bucket in sorted(state.rows, key=lambda name: -state.rows[name]):
            response = place.order("train", bucket=bucket)
            if response.status_code == 200 and (job := place.snapshot().job) is not None:
                return job.job_id
            said = response.text[:200]
        if place.check is not None:
            place.check()
        time.sleep(1.0)
    raise CannotStrike(f"no training job could be ordered: {said}")


def clock_step(around: Surroundings) -> Blow:
    """Let the wall clock of all processes jump by up to 61 minutes, either way, and back some seconds later."""
    place, clock = around.place, around.place.clock
    if clock is None:
        raise CannotStrike("the service runs by the computer's clock")
    processes = [*place.processes(*place.expected()), *place.processes("redis")]
    if strays := [p for p in processes if not clock.is_of(p)]:
        return Blow(problems=[f"processes {', '.join(p.name() for p in strays)} run by the computer's clock"])
    before = place.kept_files()
    shift_s = around.rng.choice((-1.0, 1.0)) * around.rng.uniform(1.0, STEP_S)
    try:
        clock.step(shift_s)
        _hold(around, 2.0, 8.0)
    finally:
        clock.step(0.0)
    lost = sorted(path.name for path in before if not path.exists())
    return Blow(note=f"{shift_s:+.0f} s", problems=[f"files were deleted: {', '.join(lost)}"] if lost else [])


# ---- Redis ------------------------------------------------------------------------------------------------------------
def redis_away(around: Surroundings) -> Blow:
    """Kill Redis as often as it comes back, for some seconds."""
    deadline = time.monotonic() + around.rng.uniform(2.0, 8.0)
    while time.monotonic() < deadline:
        for process in around.place.processes("redis"):
            kill(process)
        time.sleep(0.05)
    return Blow()


def redis_wiped(around: Surroundings) -> Blow:
    """Delete all that Redis holds."""
    before = around.place.snapshot().gen
    around.place.client.flushall()
    return Blow(is_back=lambda: around.place.snapshot().gen >= before)


def redis_wiped_and_controller_killed(around: Surroundings) -> Blow:
    """Delete all that Redis holds while the controller dies: what is left is its snapshot file."""
    _needs_snapshot_file(around)
    place, sound = around.place, list(around.place.sound)
    for version in around.rng.sample(sound, around.rng.randrange(len(sound) + 1)):  # generations that the file lacks
        place.make_live(version)
    with place.stopped(place.processes("controller")):
        place.client.flushall()
        return killing("controller")(around)


def redis_full(around: Surroundings) -> Blow:
    """Fill Redis' memory, and empty it some seconds later."""
    client, names = around.place.client, list[str]()

    def emptied() -> bool:
        try:
            client.unlink(*names)
        except Exception as e:
            if not (isinstance(e, OUTAGE_ERRORS) or cannot_store(e)):
                raise
            return False
        return True

    try:
        try:
            for i in range(4096):
                names.append(f"chaos:{i}")
                client.set(names[-1], b"x" * FILL_BYTES)
        except Exception as e:  # another fault may have taken it away meanwhile
            if not (isinstance(e, OUTAGE_ERRORS) or cannot_store(e)):
                raise
        _hold(around, 2.0, 5.0)
    finally:
        wait_for(emptied, "room in Redis", check=around.place.check)  # it may be away for another reason
    return Blow(note=f"{len(names) - 1} MB")


def redis_slow(around: Surroundings) -> Blow:
    """Let Redis stand still for nine tenths of some seconds."""
    deadline = time.monotonic() + around.rng.uniform(2.0, 6.0)
    while time.monotonic() < deadline:
        with around.place.stopped(around.place.processes("redis")):
            time.sleep(0.18)
        time.sleep(0.02)
    return Blow()


# ---- the disk ---------------------------------------------------------------------------------------------------------
def disk_full(around: Surroundings) -> Blow:
    """Let writes to files fail for some seconds: the disk is filled, or processes may not write files any more."""
    place = around.place
    with ExitStack() as stack:
        if around.disk is not None:
            stack.callback(fill(around.disk).unlink)
            note = "the file system was filled"
        else:
            stack.enter_context(no_files(place.processes("replica", "controller", "ingress")))
            note = "no file of replicas, ingress and controller could grow (RLIMIT_FSIZE)"
        _hold(around, 2.0, 6.0)
    return Blow(note=note)


def fill(disk: Path) -> Path:
    """Take all that is left of a file system, to the last byte; returns the file that has it."""
    file = disk / "filler"
    with file.open("ab", buffering=0) as out:
        for size in (65536, 1):
            try:
                while out.write(b"x" * size) == size:
                    pass
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
    return file


@contextmanager
def no_files(processes: list[psutil.Process]) -> Iterator[None]:
    """Let every write of these processes to a file fail; a process' own user may do that. Python takes no signal for it."""
    before = {}
    for process in processes:
        with contextlib.suppress(OSError):
            before[process.pid] = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[process.pid][1]))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


# ---- what is stored ---------------------------------------------------------------------------------------------------
def blob_damaged(around: Surroundings) -> Blow:
    """Publish a version, let a bit of its weights fall over, and make it live."""
    return _refused(around, around.place.publisher.damaged(_new_seed(around)))


def manifest_damaged(around: Surroundings) -> Blow:
    """Tear a version's manifest, and ask for it."""
    publisher = around.place.publisher
    version = publisher.put(nudged(publisher.state, _new_seed(around)))
    path = publisher.manifest_path(version)
    path.write_bytes(path.read_bytes()[: around.rng.randrange(1, 200)])
    response = around.place.order("pin", version=version)
    path.unlink()
    is_refused = response.status_code == 400 and "is damaged" in response.text
    return Blow(problems=[] if is_refused else [f"a torn manifest was answered by {response.status_code}: {response.text[:200]}"])  # fmt: skip


def traces_damaged(around: Surroundings) -> Blow:
    """Let bits of some trace shards fall over, cut one in half, put rubbish beside them, and train on what there is."""
    files = around.place.trace_files()
    if not files:
        raise CannotStrike("no trace shard is stored yet")
    for path in around.rng.sample(files, min(3, len(files))):
        with contextlib.suppress(OSError):  # the writer deletes old ones
            flip_bit(path, around.rng.randrange(path.stat().st_size))
    with contextlib.suppress(OSError):
        os.truncate(files[-1], files[-1].stat().st_size // 2)
    rubbish = files[0].with_name(f"rubbish-{_new_seed(around)}.safetensors")
    rubbish.write_bytes(around.rng.randbytes(300))
    job_id = order_training(around)

    def has_ended() -> bool:
        job = around.place.snapshot().job
        return job is None or job.job_id != job_id

    return Blow(is_back=has_ended)


def state_damaged(around: Surroundings) -> Blow:
    """Put rubbish into the controller's state in Redis, and kill the controller: it goes on from its snapshot file."""
    _needs_snapshot_file(around)
    place = around.place
    with place.stopped(place.processes("controller")):
        name = around.rng.choice(sorted(place.client.hkeys(place.keys.state)))
        place.client.hset(place.keys.state, name, around.rng.randbytes(40))
        blow = killing("controller")(around)
    return Blow(is_back=blow.is_back, note=f"part {name.decode()}")


def record_damaged(around: Surroundings) -> Blow:
    """Put rubbish in place of a record in Redis (what is desired, the controller's claim, the trainer's lease, a report), and swap."""
    place = around.place
    records = {
        "desired": place.keys.desired, "epoch": place.keys.epoch, "lease": place.keys.train,
        "report": place.keys.replica(sorted(place.replicas())[0]),
    }  # fmt: skip
    name = around.rng.choice(sorted(records))
    place.client.set(records[name], around.rng.randbytes(around.rng.randrange(1, 40)))
    before = place.snapshot().version
    version = next(v for v in place.sound if v != before)
    response = place.order("pin", version=version)
    if response.status_code != 200:
        return Blow(problems=[f"pin was answered by {response.status_code}: {response.text[:200]}"], note=name)
    return Blow(is_back=lambda: place.runs(version), note=name)


def snapshot_torn(around: Surroundings) -> Blow:
    """Cut the snapshot file in half, and kill the controller: it goes on from Redis and writes the file anew."""
    _needs_snapshot_file(around)
    path = around.place.snapshot_file
    os.truncate(path, path.stat().st_size // 2)
    size = path.stat().st_size
    blow = killing("controller")(around)
    return Blow(is_back=lambda: blow.is_back() and path.stat().st_size > size)


def log_torn(around: Surroundings) -> Blow:
    """Tear the last line of the decision log, and kill the controller."""
    with around.place.stopped(around.place.processes("controller")):
        data = around.place.log_file.read_bytes()
        os.truncate(around.place.log_file, len(data) - around.rng.randrange(2, 40))
        return killing("controller")(around)


def _needs_snapshot_file(around: Surroundings) -> None:
    if not around.place.snapshot_file.is_file():
        raise CannotStrike("the controller has written no snapshot file yet")


# ---- drafters ---------------------------------------------------------------------------------------------------------
def drafter_poisoned(around: Surroundings) -> Blow:
    """Publish weights with one NaN, and make them live."""
    return _refused(around, around.place.publisher.poisoned(_new_seed(around)))


def drafter_of_another_shape(around: Surroundings) -> Blow:
    """Publish weights that do not fit the drafter, and make them live."""
    return _refused(around, around.place.publisher.of_another_shape(_new_seed(around)))


def drafter_worthless(around: Surroundings) -> Blow:
    """Serve a drafter for some seconds whose tokens nobody accepts: it costs time and nothing else."""
    place = around.place
    version = place.publisher.put(shuffled(place.publisher.state, _new_seed(around)))
    place.make_live(version)
    _hold(around, 2.0, 4.0)
    sound = around.rng.choice(place.sound)
    place.order("pin", version=sound).raise_for_status()
    return Blow(is_back=lambda: place.runs(sound))


def drafter_swapped(around: Surroundings) -> Blow:
    """Swap the live version back and forth."""
    place = around.place
    before = {name: replica.num_swaps for name, replica in place.replicas().items()}
    for version in (*reversed(place.sound), place.publisher.first, around.rng.choice(place.sound)):
        place.make_live(version)
    pauses = [
        pause for name, r in place.replicas().items() if name in before
        for pause in r.pause_ms[len(r.pause_ms) - (r.num_swaps - before[name]) :]
    ]  # fmt: skip
    return Blow(pauses_ms=pauses)


def _refused(around: Surroundings, version: str) -> Blow:
    """Make a version live that replicas refuse; over when the one before it is live again in a later generation."""
    place = around.place
    before = place.snapshot()
    response = place.order("pin", version=version)
    if response.status_code != 200:
        return Blow(problems=[f"pin of {version} was answered by {response.status_code}: {response.text[:200]}"])

    def is_back() -> bool:
        state = place.snapshot()
        return state.gen >= before.gen + 2 and state.version == before.version

    return Blow(is_back=is_back)


# ---- clients ----------------------------------------------------------------------------------------------------------
def clients_vanish(around: Surroundings) -> Blow:
    """Hang up on streams that have just begun."""
    leave_streams(around.place.url, NUM_LEAVING)
    return Blow()


def clients_mute(around: Surroundings) -> Blow:
    """Ask for streams and never read them; then drop the connections."""
    host = urlsplit(around.place.url)
    body = json.dumps({**long_body(), "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"  # fmt: skip
    with ExitStack() as stack:
        for _ in range(NUM_MUTE):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
            stack.enter_context(sock)
            sock.connect((host.hostname, host.port))
            sock.sendall(head.encode() + body)
        _hold(around, 1.0, 4.0)
    return Blow()


def clients_flood(around: Surroundings) -> Blow:
    """Send more requests at once than all queues hold; each is answered in the end, after as many 429 as it takes."""
    place, questions = around.place, around.questions
    answers = [
        Answer(question=around.rng.randrange(len(questions.prompts)), num_wanted=FLOOD_TOKENS, is_stream=i % 2 == 0)
        for i in range(FLOOD)
    ]

    async def main() -> None:
        async with new_client(place.url) as http:
            await asyncio.gather(*(send(http, a, questions.prompts[a.question]) for a in answers))

    asyncio.run(main())
    return Blow(answers=answers)


def clients_fuzz(around: Surroundings) -> Blow:
    """Send what nobody should send; `paceline bench fuzz` sends more of it."""
    place, totals = around.place, FuzzTotals()

    async def main() -> None:
        async with httpx.AsyncClient(base_url=place.url, timeout=60) as http:
            requests = FuzzRequests((await http.get("/openapi.json")).json(), None)
            for i in range(NUM_FUZZ):
                if i % 8 == 7:
                    judge_raw(await ask_raw(place.url, around.rng, 60.0), i, totals)
                else:
                    await run_one(http, i, requests.draw(around.rng), totals)

    asyncio.run(main())
    return Blow(problems=[f"fuzz: {e['kind']}: {e['what'][:300]}" for e in totals.examples])


# ---- the table --------------------------------------------------------------------------------------------------------
def _faults() -> Iterator[Fault]:
    for kind in ("replica", "controller", "redis", "proxy", "serve-controller", "ingress"):
        yield Fault(
            name=f"{kind}-kill", what=f"kill -9 of a process of kind {kind}", seen="another process has its place",
            strike=killing(kind), breaks=kind if kind in ("replica", "proxy", "ingress") else "",
            needs=kind if kind == "ingress" else "", is_blind=True,
        )  # fmt: skip
        yield Fault(
            name=f"{kind}-stop", what=f"SIGSTOP of a process of kind {kind} for seconds, then SIGCONT",
            seen="the service is whole", strike=stopping(kind), needs=kind if kind == "ingress" else "",
            is_blind=True,
        )  # fmt: skip
    yield Fault(name="trainer-kill", what="kill -9 of the trainer", seen="its job has ended", strike=in_training(killing("trainer")))  # fmt: skip
    yield Fault(name="trainer-stop", what="SIGSTOP of the trainer for seconds, then SIGCONT", seen="its job has ended", strike=in_training(stopping("trainer")))  # fmt: skip
    rows: tuple[tuple[str, str, Strike], ...] = (
        ("clock-step", "the service is whole", clock_step),
        ("redis-away", "the service is whole", redis_away),
        ("redis-wiped", "the desired state is back", redis_wiped),
        ("redis-wiped-controller-kill", "another controller has its place", redis_wiped_and_controller_killed),
        ("redis-full", "the service is whole", redis_full),
        ("redis-slow", "the service is whole", redis_slow),
        ("disk-full", "the service is whole", disk_full),
        ("blob-damaged", "the version before is live again", blob_damaged),
        ("manifest-damaged", "the order is refused", manifest_damaged),
        ("traces-damaged", "a training job on them has ended", traces_damaged),
        ("state-damaged", "another controller has its place", state_damaged),
        ("record-damaged", "a swap that was ordered behind it is on all replicas", record_damaged),
        ("snapshot-torn", "another controller has its place, the file is whole", snapshot_torn),
        ("log-torn", "another controller has its place", log_torn),
        ("drafter-poisoned", "the version before is live again", drafter_poisoned),
        ("drafter-shape", "the version before is live again", drafter_of_another_shape),
        ("drafter-worthless", "a sound version is on all replicas", drafter_worthless),
        ("drafter-swapped", "the service is whole", drafter_swapped),
        ("clients-vanish", "the service is whole", clients_vanish),
        ("clients-mute", "the service is whole", clients_mute),
        ("clients-flood", "every request is answered", clients_flood),
        ("clients-fuzz", "the service is whole", clients_fuzz),
    )
    blind = (
        redis_away, redis_full, redis_slow, disk_full, snapshot_torn, log_torn, clients_vanish, clients_mute, clients_flood,
    )  # fmt: skip
    for name, seen, strike in rows:
        what = (strike.__doc__ or "").split("\n")[0].rstrip(".")
        needs = "clock" if strike is clock_step else ""
        yield Fault(
            name=name, what=what[0].lower() + what[1:], seen=seen, strike=strike, needs=needs, is_blind=strike in blind
        )  # fmt: skip


FAULTS: dict[str, Fault] = {fault.name: fault for fault in _faults()}
"""Name -> fault, in the order of the reports."""


def _hold(around: Surroundings, least_s: float, most_s: float) -> None:
    """Let a fault last."""
    deadline = time.monotonic() + around.rng.uniform(least_s, most_s)
    while time.monotonic() < deadline:
        if around.place.check is not None:
            around.place.check()
        time.sleep(0.1)


def _new_seed(around: Surroundings) -> int:
    return around.rng.randrange(10, 10**6)
