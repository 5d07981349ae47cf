"""Run: faults that happen one after the other to a service under load, each followed by a look at whether all is well."""

from __future__ import annotations

import contextlib
import random
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Any

import httpx
import msgspec
from rich.console import Console

from paceline.bench.chaos.checks import LEDGER, Questions, answer_problems, plain_questions
from paceline.bench.chaos.clock import SteppedClock, why_no_clock
from paceline.bench.chaos.faults import FAULTS, Blow, CannotStrike, Fault, Surroundings
from paceline.bench.chaos.load import Answer, Load, send, wait_for
from paceline.bench.chaos.place import Place
from paceline.bench.chaos.report import print_report, summary, write_html
from paceline.bench.chaos.schedule import Journal, Outcome, Turn, fault_rng, schedule
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.config import (
    EngineConfig,
    IngressConfig,
    PolicyConfig,
    RolloutConfig,
    ServiceConfig,
    TraceConfig,
    TrainerResources,
)
from paceline.errors import ConfigError, PacelineError
from paceline.infra.service.stop_signals import StopSignals
from paceline.infra.state.log import configure_logging, quiet_libraries
from paceline.infra.state.redis_clients import OUTAGE_ERRORS
from paceline.paths import resolve_drafter, resolve_model
from paceline.records import HtmlFile, JsonFile, Setting, changed, count, record

PROMPTS_PER_BUCKET, MAX_PROMPT_TOKENS = 6, 96
KV_BYTES = 32 * 2**20
SERVICE, FAULTS_PANEL = "Service", "Faults"
GRACE_S = 5.0
"""Answers of a killed process may break off that were begun up to so long after: until the proxy knows of its death."""
APART_S = 2.0
"""Faults of one moment begin within so long."""
AWAY: tuple[type[Exception], ...] = (ConnectionError, FileNotFoundError, httpx.TransportError, *OUTAGE_ERRORS)
"""What is seen of a part that another fault took away."""
MODEL_NAME = "chaos"


@record()
class ChaosOptions:
    """Starts a service on this computer, keeps greedy requests in flight, and lets faults happen to it one after the other: kill -9
    and SIGSTOP of every kind of process, steps of the clock, Redis away, wiped, full or slow, a full disk, damaged weights, traces
    and state, drafters that are poisoned or worthless, clients that vanish, never read, flood or send rubbish (docs/api/chaos.md has the table).

    After each fault all must be as before, by itself: every process is back, replicas run the desired version, engines hold
    nothing, the ledger adds up. Every answer must be what the target alone decodes in fp32; those of a killed replica or proxy
    may break off, by an explicit error. With --resume-answers those of a replica may not either. The schedule follows from --seed. Exit code 1
    when something did not hold; the report says after which fault, and the command that repeats it alone.

    With --at-once N faults overlap. Examples: paceline bench chaos. paceline bench chaos --faults 1000 --seed 7 --resume ~/chaos --json chaos.json --html chaos.html.
    """

    num_faults: A[
        int, Setting("Faults in all; 1e3 for a night.", flag="faults", ge=1, parser=count, panel=FAULTS_PANEL)
    ] = 100
    seed: A[int, Setting("Seed of the schedule and of what each fault draws.", ge=0, panel=FAULTS_PANEL)] = 0
    kinds: A[
        tuple[str, ...],
        Setting("Comma list of faults to draw from, as replica-kill,redis-full; default: all.", panel=FAULTS_PANEL),
    ] = ()
    skip: A[
        int, Setting("Begin behind so many faults of the schedule: to repeat one of them.", ge=0, panel=FAULTS_PANEL)
    ] = 0
    num_at_once: A[
        int,
        Setting(
            "Faults that happen at the same moment, of those that ask nothing of the service, as kill -9; the others stay alone.",
            flag="at-once",
            ge=1,
            le=4,
            panel=FAULTS_PANEL,
        ),
    ] = 1
    patience_s: A[
        float,
        Setting("Seconds after a fault by which the service must be whole.", flag="patience", gt=0, panel=FAULTS_PANEL),
    ] = 120.0
    resume: A[
        Path | None,
        Setting(
            "Folder of the run: its journal and the service's data. A run that was cut off goes on there.",
            panel=FAULTS_PANEL,
        ),
    ] = None
    disk: A[
        Path | None,
        Setting(
            "Empty folder on a small file system of its own (a tmpfs of 512 MB) for the service's data, which is then really "
            "filled; default: processes are forbidden to write files.",
            is_folder=True,
            panel=FAULTS_PANEL,
        ),
    ] = None
    is_resuming_answers: A[
        bool,
        Setting("Answers must outlive their replica: the service's --resume.", flag="resume-answers", panel=SERVICE),
    ] = False
    model: A[str, Setting("'bundled' or DIR of a transformers checkpoint; it is served in fp32.", panel=SERVICE)] = (
        "bundled"
    )
    drafter: A[str, Setting("Drafter with weights: a bundled one or DIR.", panel=SERVICE)] = "bundled"
    num_replicas: A[int, Setting("Serving replicas.", flag="replicas", ge=1, le=16, panel=SERVICE)] = 2
    width: A[int, Setting("Requests in flight.", flag="concurrency", ge=1, le=64, panel=SERVICE)] = 6
    pause_s: A[
        float,
        Setting(
            "Seconds between an answer and the next request, to leave a computer room.",
            flag="pause",
            ge=0,
            panel=SERVICE,
        ),
    ] = 0.0
    max_tokens: A[int, Setting("Tokens of an answer.", ge=4, le=256, panel=SERVICE)] = 32
    json: JsonFile = None
    html: HtmlFile = None

    def __post_init__(self) -> None:
        for name in self.kinds:
            if name not in FAULTS:
                raise ConfigError(f"kinds must be among {', '.join(FAULTS)}, got {name!r}")
        if resolve_drafter(self.drafter, self.model) is None:
            raise ConfigError(
                f"drafter must have weights, which faults can damage, got {self.drafter!r}; try 'bundled'"
            )
        if self.drawn() == ():
            raise ConfigError(f"kinds must name a fault that can happen here: {'; '.join(self.left_out())}")

    def drawn(self) -> tuple[str, ...]:
        """Names of the faults that may happen."""
        lacks = self._lacks()
        return tuple(f.name for f in FAULTS.values() if f.needs not in lacks and self._is_wanted(f))

    def left_out(self) -> list[str]:
        """Faults that were asked for and cannot happen here, with what they need; what --resume-answers adds is no news."""
        lacks = self._lacks()
        return [
            f"{f.name} {lacks[f.needs]}" for f in FAULTS.values()
            if f.needs in lacks and self._is_wanted(f) and (self.kinds or f.needs != "ingress")
        ]  # fmt: skip

    def _lacks(self) -> dict[str, str]:
        """What faults may need and this run has not -> what it takes."""
        found = {} if self.is_resuming_answers else {"ingress": "needs --resume-answers"}
        why = why_no_clock()
        return found if why is None else {**found, "clock": f"needs a clock that can be stepped: {why}"}

    def _is_wanted(self, fault: Fault) -> bool:
        return not self.kinds or fault.name in self.kinds

    def turns(self) -> list[Turn]:
        """What happens, one after the other."""
        blind = {f.name for f in FAULTS.values() if f.is_blind}
        found = schedule(self.seed, self.drawn(), self.skip + self.num_faults, at_once=self.num_at_once, together=blind)
        return [turn for turn in found if turn.number >= self.skip]

    def again(self, number: int) -> str:
        """The command that has one fault of the schedule by itself."""
        words = ["--faults", "1", "--skip", f"{number}", "--seed", f"{self.seed}"]
        if self.kinds:
            words += ["--kinds", ",".join(self.kinds)]
        if self.is_resuming_answers:
            words.append("--resume-answers")
        given = changed(self)
        for flag, name in (
            ("model", "model"), ("drafter", "drafter"), ("replicas", "num_replicas"), ("concurrency", "width"),
            ("pause", "pause_s"), ("max-tokens", "max_tokens"), ("at-once", "num_at_once"),
        ):  # fmt: skip
            if name in given:
                words += [f"--{flag}", f"{getattr(self, name)}"]
        if self.disk is not None:
            words += ["--disk", str(self.disk)]
        return f"paceline bench chaos {shlex.join(words)}"

    def service(self, data_dir: Path) -> ServiceConfig:
        """The service that faults happen to: small queues, short epochs, everything traced."""
        return ServiceConfig(
            model=self.model, drafter=self.drafter, model_name=MODEL_NAME, dtype="float32", device="cpu", port=0,
            data_dir=str(data_dir), num_replicas=self.num_replicas, resume=self.is_resuming_answers,
            # a polite trainer would get a tenth of a core beside the load, and no fault would find it at work
            trainer_resources=TrainerResources(niceness=0),
            engine=EngineConfig(max_running=8, max_waiting=16, kv_bytes=KV_BYTES, num_threads=1),
            policy=PolicyConfig(epoch_s=2.0, min_rows=128, holdback_percent=20, job_time_limit_s=4.0),
            rollout=RolloutConfig(canary_percent=0),
            trace=TraceConfig(flush_interval_s=0.5, shard_rows=256, max_bytes=64 * 2**20),
            ingress=IngressConfig(num_replicas=2, max_wait_s=self.patience_s, max_resumes=10),
        )  # fmt: skip


def run_chaos(options: ChaosOptions, console: Console) -> dict[str, Any]:
    """Let the faults happen, print what came of them, return (and keep on disk) the document.

    Raises: PacelineError when the service cannot be started; KeyboardInterrupt, after which --resume goes on.
    """
    configure_logging("CRITICAL")  # what processes say of their deaths is no news here
    quiet_libraries("CRITICAL")
    result = ResultFile(options.json, command="bench chaos", options=options)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        if options.resume is not None:
            options.resume.mkdir(parents=True, exist_ok=True)
        folder = options.resume or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-chaos-")))
        journal = Journal(options.resume, _settings(options))
        for text in options.left_out():
            console.print(f"left out: {text}", markup=False, soft_wrap=True)
        done = {outcome.number for outcome in journal.done}
        if left := [turn for turn in options.turns() if turn.number not in done]:
            try:
                _strike_all(options, left, folder, journal, result, console, signals)
            except KeyboardInterrupt:
                how = "the same command goes on" if options.resume else "give --resume FOLDER to be able to go on"
                result.update(**(found := summary(journal.done)))
                console.print(f"stopped after {found['num_faults']} of {options.num_faults} faults; {how}")
                raise
    document = result.close(**summary(journal.done), outcomes=_plain(journal.done))
    print_report(document, console)
    if options.html is not None:
        write_html(options.html, document, journal.done)
    for kind, path in (("JSON", options.json), ("HTML", options.html)):
        say_file(console, kind, path)
    return document


def has_failed(document: dict[str, Any]) -> bool:
    """Whether something did not hold after a fault."""
    return bool(document["num_failed"])


def _settings(options: ChaosOptions) -> dict[str, Any]:
    """What a run must share with the one that it goes on with; --faults may grow."""
    return {
        "seed": options.seed, "skip": options.skip, "kinds": list(options.drawn()), "resume_answers": options.is_resuming_answers,
        "model": options.model, "drafter": options.drafter, "max_tokens": options.max_tokens, "at_once": options.num_at_once,
    }  # fmt: skip


def _round_ms(answers: list[Answer]) -> float | None:
    last = [a.stats[-1] for a in answers if a.stats and a.stats[-1]["num_rounds"]]
    return sum(s["round_ms"] / s["num_rounds"] for s in last) / len(last) if last else None


def _plain(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(o) for o in outcomes]


def _strike_all(
    options: ChaosOptions, turns: list[Turn], folder: Path, journal: Journal, result: ResultFile,
    console: Console, signals: StopSignals,
) -> None:  # fmt: skip
    with console.status("decoding the prompts plainly, then starting a service (about a minute)"):
        questions = bundled_questions(options)
        data = options.disk or folder / "data"
        has_clock = any(FAULTS[name].needs == "clock" for turn in turns for name in turn.names)
        clock = SteppedClock(folder / "clock") if has_clock else None
        place = Place(options.service(data), check=signals.check, clock=clock)
        place.start()
    try:
        num_done = summary(journal.done)["num_faults"]
        with progress(console, "faults", num_done + sum(len(turn.names) for turn in turns)) as bar:
            bar.at(num_done, "")
            for turn in turns:
                signals.check()
                number, name = turn.number, " + ".join(turn.names)
                bar.say(f"{number} {name}")
                outcome = FaultRun(options, place, questions, number, [FAULTS[name] for name in turn.names]).outcome()
                journal.add(outcome)
                result.update(**summary(journal.done))
                failed = sum(o.status == "failed" for o in journal.done)
                bar.step(len(turn.names), f"{number} {name}: {outcome.status}; {failed} failed")
                if outcome.status == "failed":
                    console.print(f"[red]failed[/red] {number} {name}: {'; '.join(outcome.problems[:3])}", markup=True, soft_wrap=True)  # fmt: skip
                    are_books_wrong = any(p.startswith(LEDGER) for p in outcome.problems)
                    # the next faults are to find a service that is whole
                    if outcome.recovery_s is None or are_books_wrong:
                        place.stop()
                        if are_books_wrong:
                            set_aside(data, folder / f"data-after-{number}")
                        place.start()
    finally:
        with console.status("stopping the service"):
            place.stop()


def set_aside(data: Path, aside: Path) -> None:
    """Move what stands in a folder, which may be a file system's root, to another: a ledger that is wrong stays wrong."""
    aside.mkdir(parents=True, exist_ok=True)
    for child in data.iterdir():
        if child.name != "lost+found":
            shutil.move(child, aside / child.name)


def bundled_questions(options: ChaosOptions) -> Questions:
    """Prompts of the bundled traffic classes, cut to a length, and what the target decodes behind each."""
    from paceline.serving.loading.checkpoint import open_checkpoint

    model = resolve_model(options.model)
    tokenizer = open_checkpoint(model).tokenizer()
    texts = [p.text for b in BUNDLED_BUCKETS for p in load_prompts(b, None, PROMPTS_PER_BUCKET, options.seed)]
    prompts = [tokenizer.encode(text)[:MAX_PROMPT_TOKENS] for text in texts]
    return plain_questions(model, prompts, options.max_tokens + 16)


@dataclass(slots=True)
class FaultRun:
    """One fault under load, or several at once: strike, wait until the service is whole, check."""

    options: ChaosOptions
    place: Place
    questions: Questions
    number: int
    faults: list[Fault]

    def outcome(self) -> Outcome:
        """Let it happen, and say what came of it."""
        options, place = self.options, self.place
        blows, notes, problems = list[Blow](), list[str](), list[str]()
        recovery_s: float | None = None
        with Load(
            place.url, self._ask, width=options.width, timeout_s=options.patience_s, pause_s=options.pause_s
        ) as load:
            rngs = [fault_rng(options.seed, self.number, f.name if i else "") for i, f in enumerate(self.faults)]
            self._warm_up(load, rngs[0])
            began = time.monotonic()
            happened = list[Fault]()
            with ThreadPoolExecutor(len(self.faults)) as pool:
                struck = [pool.submit(self._strike, fault, rng) for fault, rng in zip(self.faults, rngs, strict=True)]
            for fault, future in zip(self.faults, struck, strict=True):
                try:
                    blows.append(future.result())
                    happened.append(fault)
                    notes.append(blows[-1].note)
                except CannotStrike as e:
                    notes.append(str(e))
                except Exception as e:  # of whatever kind: the faults that follow are to happen all the same
                    happened.append(fault)
                    problems.append(f"{fault.name} could not be carried out: {type(e).__name__}: {e}")
            ended, status = time.monotonic(), "ok" if happened else "skipped"
            try:
                self._wait_whole(lambda: _are_back(blows))
                recovery_s = time.monotonic() - ended if happened and not problems else None
            except PacelineError as e:
                problems.append(f"not whole again: {e}; {'; '.join(place.ills()) or 'what was struck is not back'}")
        answers = [*load.answers, *(answer for blow in blows for answer in blow.answers)]
        problems += [text for blow in blows for text in blow.problems]
        for answer in answers:
            problems += answer_problems(answer, self.questions, may_break=self._may_break(answer, ended, happened))
        if recovery_s is not None or status == "skipped":
            problems += place.leftovers()
        if problems:
            status = "failed"
        first, *beside = [f.name for f in happened] or [self.faults[0].name]
        return Outcome(
            number=self.number, name=first, beside=beside, status=status, held_s=round(ended - began, 3),
            recovery_s=None if recovery_s is None else round(recovery_s, 3), num_answers=len(answers),
            num_broken=sum(not a.looks_complete for a in answers), num_refusals=sum(a.num_refusals for a in answers),
            num_tokens=sum(len(a.token_ids) for a in answers), problems=problems, note="; ".join(filter(None, notes)),
            pauses_ms=[pause for blow in blows for pause in blow.pauses_ms], round_ms=_round_ms(answers),
            command=options.again(self.number),
        )  # fmt: skip

    def _strike(self, fault: Fault, rng: random.Random) -> Blow:
        """One of the faults, the first at once and the others within a few seconds. Raises: CannotStrike."""
        around = Surroundings(place=self.place, rng=rng, questions=self.questions, disk=self.options.disk)
        if fault is not self.faults[0]:
            time.sleep(rng.uniform(0.0, APART_S))
        try:
            return fault.strike(around)
        except AWAY as e:
            if len(self.faults) == 1:
                raise
            raise CannotStrike(f"{fault.name} found nothing to strike: {e!r}") from e

    def _warm_up(self, load: Load, rng: random.Random) -> None:
        """Return at some moment when requests are under way."""
        with contextlib.suppress(PacelineError):  # what keeps them from being answered is found afterwards
            enough, patience_s = self.options.width, self.options.patience_s
            wait_for(lambda: len(load.answers) >= enough, "answers", patience_s, check=self.place.check)
        time.sleep(rng.uniform(0.0, 0.5))
        with contextlib.suppress(PacelineError):  # clients that pause may all do so at this moment
            wait_for(lambda: load.num_in_flight > 0, "requests under way", every_s=0.001, check=self.place.check)

    async def _ask(self, http: httpx.AsyncClient, i: int) -> Answer:
        questions = self.questions
        at = (self.number * 7 + i) % len(questions.prompts)
        answer = Answer(question=at, num_wanted=self.options.max_tokens, is_stream=i % 2 == 0)
        bucket = BUNDLED_BUCKETS[at * len(BUNDLED_BUCKETS) // len(questions.prompts)]
        await send(http, answer, questions.prompts[at], bucket=bucket)
        return answer

    def _wait_whole(self, is_back: Callable[[], bool]) -> None:
        place, patience_s = self.place, self.options.patience_s
        wait_for(lambda: is_back() and not place.ills(), "a whole service", patience_s, check=place.check)

    def _may_break(self, answer: Answer, struck: float, faults: list[Fault]) -> bool:
        """Whether a process that died may have held the answer. faults: that happened."""
        dies = {f.breaks for f in faults} - {"", "replica" if self.options.is_resuming_answers else ""}
        # without its only proxy a service has nobody who would take a connection
        return bool(dies) and (answer.began_s <= struck + GRACE_S or ("proxy" in dies and answer.status == 0))


def _are_back(blows: list[Blow]) -> bool:
    """Whether all that was struck is back; a part that is away is not."""
    try:
        return all(blow.is_back() for blow in blows)
    except AWAY:
        return False
