"""A model hub on this machine: as much of its protocol as creating a repository and uploading a folder take.

with LocalHub() as hub:
    run(..., HF_ENDPOINT=hub.address)
hub.files       path -> content, of all commits
hub.tokens      what callers authorised themselves with
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class LocalHub:
    """Listens to this machine alone, on any free port."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.unknown: list[str] = []
        """What somebody asked to change, and it has no answer to; of questions it answers none."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                hub._answer(self, hub._found(self.path, _body(self)))

            def do_GET(self) -> None:
                hub._answer(self, None)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, answer: Any) -> None:
        self.tokens.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        content = json.dumps(answer or {"error": "not here"}).encode()
        request.send_response(200 if answer else 404)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _found(self, path: str, body: bytes) -> Any:
        if path.startswith("/api/repos/create"):
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            return {"url": f"{self.address}/{name}", "name": name, "id": name}
        if path.startswith("/api/validate-yaml"):
            metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            assert isinstance(metadata, dict)
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        if "/commit/" in path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return {"commitUrl": f"{self.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}
        self.unknown.append(path)
        return None


def _body(request: BaseHTTPRequestHandler) -> bytes:
    """Return what was sent, whole or in chunks."""
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    parts = []
    while size := int(request.rfile.readline(), 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)
