"""A stand-in for an engine: a real process with a real port, in the standard library alone.

Takes the words that a runtime fills in, and the quirks that the tests ask for.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys

EXIT_PORT_TAKEN = 91


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key-file")
    parser.add_argument("--quirk", default="good")
    options = parser.parse_args()
    print(f"quirk {options.quirk}", file=sys.stderr, flush=True)
    key = read_key(options.api_key_file)
    if options.quirk == "fails":
        sys.exit("the model is not to my taste")
    if options.quirk == "ignores_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.quirk == "has_child":
        child = subprocess.Popen(["sleep", "1000"])
        print(f"child {child.pid}", flush=True)
    serve(options, key)


def read_key(path: str | None) -> str:
    if path is None:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def serve(options: argparse.Namespace, key: str) -> None:
    try:
        listener = socket.create_server((options.host, options.port))
    except OSError:
        sys.exit(EXIT_PORT_TAKEN)
    print(f"listening in {os.getcwd()}", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(65536).decode()
            if options.quirk == "silent":
                signal.pause()
            connection.sendall(answer(request, key, loading=options.quirk == "loads_forever"))


def answer(request: str, key: str, *, loading: bool) -> bytes:
    if request.startswith("GET /health "):
        status = "503 Loading" if loading else "200 OK"
    elif f"authorization: bearer {key}".lower() in request.lower():
        status = "200 OK"
    else:
        status = "401 Unauthorized"
    return f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()


if __name__ == "__main__":
    main()
