"""A hub on this machine: as much of the hub's HTTP interface as its client needs to read data."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class Hub:
    """Serve `files[repository][path] = bytes` until the `with` block ends."""

    def __init__(self, files):
        self.files = files
        self.requests = []

    def __enter__(self):
        hub = self
        handler = type("Handler", (_Handler,), {"hub": hub})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.path.split("?")[0].strip("/").replace("%2F", "/")
        self.hub.requests.append(f"{self.command} {path}")
        for repository, files in self.hub.files.items():
            api = f"api/datasets/{repository}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in files]
                return self._json({"id": repository, "sha": COMMIT, "siblings": siblings,
                                   "private": False, "tags": [], "downloads": 0})  # fmt: skip
            for revision in ("main", COMMIT):
                if path.startswith(f"{api}/tree/{revision}"):
                    folder = path.removeprefix(f"{api}/tree/{revision}").strip("/")
                    return self._json(_tree(files, folder))
                if path == f"{api}/paths-info/{revision}":
                    return self._json(self._paths_info(files))
                prefix = f"datasets/{repository}/resolve/{revision}/"
                if path.startswith(prefix) and path.removeprefix(prefix) in files:
                    return self._file(files[path.removeprefix(prefix)])
        return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def _paths_info(self, files):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if body.startswith("{"):
            asked = json.loads(body)["paths"]
        else:
            from urllib.parse import parse_qs

            asked = parse_qs(body).get("paths", [])
        return [_entry(name, files[name]) for name in files if name in asked] + [
            {"type": "directory", "path": name, "oid": "0" * 40}
            for name in asked
            if name not in files and any(file.startswith(f"{name}/") for file in files)
        ]

    def _json(self, value, status=200, headers=()):
        self._answer(status, json.dumps(value).encode(), dict(headers))

    def _file(self, data):
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT,
                   "Accept-Ranges": "bytes"}  # fmt: skip
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._answer(200, data, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        last = min(int(last) if last else len(data) - 1, len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206, data[int(first) : last + 1], headers)

    def _answer(self, status, data, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(name, data):
    digest = hashlib.sha256(data).hexdigest()
    entry = {"type": "file", "path": name, "size": len(data), "oid": digest[:40]}
    if name.endswith((".bin", ".parquet")):
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return entry


def _tree(files, folder):
    inside = {n: d for n, d in files.items() if not folder or n.startswith(f"{folder}/")}
    entries = [_entry(name, data) for name, data in inside.items()]
    parents = {"/".join(n.split("/")[:i]) for n in inside for i in range(1, n.count("/") + 1)}
    return entries + [{"type": "directory", "path": p, "oid": "0" * 40} for p in sorted(parents)]
