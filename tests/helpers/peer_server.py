"""A small server process with one fault, for benchmarks that start servers: `python tests/helpers/peer_server.py PORT FAULT`.

Faults: `dies` at once; `hangs` without listening; `errors` answers every completion with 500; `silent` answers the first with
one token and no other; `short_lived` ends in the midst of its second completion.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("dies", "hangs", "errors", "silent", "short_lived")


def event(text, finish=None, **more):
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


class Handler(BaseHTTPRequestHandler):
    fault = ""
    num_asked = 0

    def do_GET(self):
        self.answer(200, b'{"data": [{"id": "faulty"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Handler.num_asked += 1
        if self.fault == "errors":
            self.answer(500, b'{"error": "out of order"}')
            return
        if Handler.num_asked > 1 and self.fault == "silent":
            time.sleep(60)
        if Handler.num_asked > 1 and self.fault == "short_lived":
            print("out of memory", flush=True)
            os._exit(7)
        usage = {"completion_tokens": 1, "prompt_tokens": 1}
        self.answer(200, event("a") + event("", "length", usage=usage) + b"data: [DONE]\n\n")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main(port, fault):
    if fault == "dies":
        print("no such device", flush=True)
        sys.exit(3)
    if fault == "hangs":
        time.sleep(60)
    Handler.fault = fault
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
