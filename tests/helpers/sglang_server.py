"""SGLang's HTTP side as its source has it (release 0.5.23): routes, fields and their types, answers, and when it refuses what.

Requests with a field that SGLang does not have are refused here, so that a misspelt one is found; SGLang passes over them.
Weights are loaded as its EAGLE-3 network loads them: names that it does not know are passed over without a word, a wrong shape is
an error, values are not looked at.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import io
import json
import pickle
import threading
import time
import typing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import load_file

VERSION = "0.5.23"
Selector = Literal["target", "draft", "all"]
VOCABULARY = ("d2t", "t2d")


class Begin(msgspec.Struct, forbid_unknown_fields=True):
    """srt/managers/io_struct.py, BeginWeightUpdateReqInput."""

    selector: Selector = "all"


class End(msgspec.Struct, forbid_unknown_fields=True):
    """EndWeightUpdateReqInput."""


class Update(msgspec.Struct, forbid_unknown_fields=True):
    """UpdateWeightsFromTensorReqInput."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False


class Label(msgspec.Struct, forbid_unknown_fields=True):
    """UpdateWeightVersionReqInput."""

    new_version: str
    abort_all_requests: bool = True


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """PauseGenerationReqInput."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(msgspec.Struct, forbid_unknown_fields=True):
    """ContinueGenerationReqInput."""

    torch_empty_cache: bool = True


class Check(msgspec.Struct, forbid_unknown_fields=True):
    """CheckWeightsReqInput."""

    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: Selector = "all"


ROUTES: dict[str, type] = {
    "/begin_weight_update": Begin, "/end_weight_update": End, "/update_weights_from_tensor": Update,
    "/update_weight_version": Label, "/pause_generation": Pause, "/continue_generation": Continue, "/weights_checker": Check,
}  # fmt: skip


class SafeUnpickler(pickle.Unpickler):
    """srt/utils/common.py: the globals of its list that whole tensors need."""

    ALLOWED: typing.ClassVar = {
        ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch", "bfloat16"), ("torch", "int64"),
        ("torch", "BFloat16Storage"), ("torch", "LongStorage"), ("torch", "BoolStorage"), ("torch", "FloatStorage"),
        ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in self.ALLOWED:
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")


class SglangDouble:
    """One server; use it as a context manager. `finish` lets a request end."""

    def __init__(
        self, drafter: Path, target: Path, records: Path, *, key: str | None = None, port: int = 0, **info: Any
    ) -> None:
        records.mkdir(parents=True, exist_ok=True)
        self.drafter, self.records, self.key = drafter, records, key
        self.info = {
            "version": VERSION, "model_path": str(target), "speculative_algorithm": "EAGLE3", "tp_size": 1, "dp_size": 1,
            "speculative_draft_model_path": str(drafter), "speculative_eagle_topk": 1, "speculative_num_steps": 5,
            "speculative_num_draft_tokens": 6, "speculative_adaptive": False, "enable_metrics": True,
            "export_metrics_to_file": True, "export_metrics_to_file_dir": str(records), **info,
        }  # fmt: skip
        self.num_running = 1
        self.calls: list[str] = []
        """Of POST, in order."""
        self.refuses: dict[str, str] = {}
        """Route -> reason why the next call is refused."""
        self.is_deaf = False
        """Passes over every tensor."""
        self.is_paused = False
        self._begin()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _begin(self) -> None:
        self.weights = {n: t for n, t in load_file(self.drafter / "model.safetensors").items() if n not in VOCABULARY}
        self.weight_version, self.session = "default", None

    def restart(self) -> None:
        """What it holds is what it was started with."""
        self._begin()

    def __enter__(self) -> SglangDouble:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ---- routes
    def get(self, path: str, query: str) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {**self.info, "internal_states": [{}]}
        if path == "/model_info":
            return 200, {
                "model_path": self.info["model_path"],
                "weight_version": self.weight_version,
                "is_generation": True,
            }
        if path == "/v1/loads" and query in ("", "include=core"):
            loads = [{"dp_rank": 0, "num_running_reqs": self.num_running, "num_waiting_reqs": 0, "timestamp": 0.0}]
            return 200, {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "loads": loads}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, data: bytes) -> tuple[int, Any]:
        if path not in ROUTES:
            return 404, {"detail": "Not Found"}
        try:
            body = msgspec.json.decode(data, type=ROUTES[path])
        except msgspec.ValidationError as e:
            return 422, {"detail": str(e)}
        self.calls.append(path)
        if reason := self.refuses.pop(path, ""):
            return 400, {"success": False, "message": reason}
        return getattr(self, "_" + path[1:])(body)

    def _pause_generation(self, body: Pause) -> tuple[int, Any]:
        assert body.mode == "in_place", "abort and retract end or redo what runs"
        self.is_paused = True
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, body: Continue) -> tuple[int, Any]:
        self.is_paused = False
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _begin_weight_update(self, body: Begin) -> tuple[int, Any]:
        assert self.is_paused, "it would wait for the end of every request"
        if self.session is not None:
            return 400, {
                "success": False,
                "message": "a weight-update session is already open; call end_weight_update() first",
            }
        self.session = body.selector
        return 200, {"success": True, "message": "Success"}

    def _end_weight_update(self, body: End) -> tuple[int, Any]:
        if self.session is None:
            return 400, {
                "success": False,
                "message": "no weight-update session is open; call begin_weight_update() first",
            }
        self.session = None
        return 200, {"success": True, "message": "Success"}

    def _update_weights_from_tensor(self, body: Update) -> tuple[int, Any]:
        if self.session is None:
            return 400, {
                "success": False,
                "message": "update_weights_from_tensor must run between begin_weight_update() and ...",
            }
        assert body.selector == "draft", "the target's weights stay"
        assert not body.flush_cache, "refused while requests run"
        assert len(body.serialized_named_tensors) == self.info["tp_size"], "each rank reads its own entry"
        tensors = SafeUnpickler(io.BytesIO(base64.b64decode(body.serialized_named_tensors[-1], validate=True))).load()
        for name, tensor in () if self.is_deaf else tensors:
            if name in self.weights:
                assert tensor.shape == self.weights[name].shape
                self.weights[name] = tensor
        message = "Success"
        if body.weight_version is not None:
            self.weight_version = body.weight_version
            message += f" Weight version updated to {body.weight_version}."
        return 200, {"success": True, "message": message}

    def _update_weight_version(self, body: Label) -> tuple[int, Any]:
        assert not body.abort_all_requests
        self.weight_version = body.new_version
        return 200, {
            "success": True,
            "message": f"Weight version updated to {body.new_version}",
            "new_version": body.new_version,
        }

    def _weights_checker(self, body: Check) -> tuple[int, Any]:
        assert (body.action, body.selector) == ("checksum", "draft")
        sums = {
            n: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for n, t in self.weights.items()
        }
        whole = hashlib.sha256("".join(f"{n}{s}" for n, s in sorted(sums.items())).encode()).hexdigest()
        rank = {
            "checksums": {f"draft.{n}": s for n, s in sums.items()},
            "per_gpu_checksum": whole,
            "parallelism_info": [],
        }
        return 200, {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}

    # ---- requests
    def finish(
        self, rid: str, accepted: list[int], *, bucket: str = "", versions: tuple[str, ...] = (), at: float | None = None,
        decode_s: float = 1.0, temperature: float | None = 0.0, **meta: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Write the record of a request as FileRequestMetricsExporter does (srt/observability/request_metrics_exporter.py).

        accepted: draft tokens that each of its rounds kept. versions: weight versions of its output's parts; default: today's.
        """
        counts = collections.Counter(accepted)
        num_tokens, end = sum(accepted) + len(accepted) + 1, time.time() if at is None else at
        versions = versions or (self.weight_version,)
        edges = [round(i * num_tokens / len(versions)) for i in range(len(versions) + 1)]
        proposed = len(accepted) * (self.info["speculative_num_draft_tokens"] - 1)
        sampling = {"max_new_tokens": 64} | ({} if temperature is None else {"temperature": temperature})
        asked = {"rid": rid, "sampling_params": sampling, "stream": False}
        record = {
            "request_parameters": json.dumps(asked | ({"custom_labels": {"bucket": bucket}} if bucket else {})),
            "id": rid, "finish_reason": {"type": "length", "length": num_tokens}, "prompt_tokens": 10,
            "weight_version": versions[-1], "num_retractions": 0, "completion_tokens": num_tokens, "cached_tokens": 0,
            "weight_versions": [
                {"version": v, "start": a, "end": b} for v, a, b in zip(versions, edges, edges[1:], strict=False)
            ],
            "e2e_latency": decode_s + 0.25, "first_token_latency": 0.25, "request_received_ts": end - decode_s - 0.25,
            "request_finished_ts": end,
        }  # fmt: skip
        if accepted:
            record |= {
                "spec_accept_rate": sum(accepted) / proposed, "spec_accept_length": num_tokens / len(accepted),
                "spec_num_correct_drafts": sum(accepted), "spec_num_proposed_drafts": proposed,
                "spec_verify_ct": len(accepted),
                "spec_correct_drafts_histogram": [counts[i] for i in range(max(accepted) + 1)],
            }  # fmt: skip
        record |= meta
        file = self.records / f"sglang-request-metrics-{datetime.now():%Y%m%d_%H}.log"
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        return record


def _handler(double: SglangDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            self.answer(lambda: double.get(path, query))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/json"
            self.answer(lambda: double.post(self.path, data))

        def answer(self, ask: Any) -> None:
            wanted = None if double.key is None else f"Bearer {double.key}"
            try:
                status, body = (
                    (401, {"error": "Unauthorized"}) if self.headers.get("authorization") != wanted else ask()
                )
            except Exception as e:
                status, body = 500, {"error": repr(e)}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
