"""A stand-in of the Hugging Face Hub: all that its client asks for to write and read a dataset.

Creating a repository, modes and hashes of files before an upload, the LFS batch call, uploads,
commits, and reading: as the Hub answers, so that the real client is tested, and not a mock of it.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

LFS_SUFFIXES = ".arrow", ".parquet", ".tar"
TOKEN = "hf_stand_in"


class Hub:
    """Repositories and stored objects, and what was asked of them."""

    def __init__(self):
        self.repos, self.objects, self.commits, self.uploads = {}, {}, [], []
        self.before_upload = lambda: None
        """Called before an object is stored: it may end the client."""


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name):
    return name.endswith(LFS_SUFFIXES)


def entry(name, content):
    """A file as the Hub lists it."""
    large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 127}
    listed = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    return listed | ({"lfs": large} if is_large(name) else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, values, status=200, headers=()):
        content = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
            return
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            self.answer({"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/datasets/(.+)/(preupload|commit|paths-info)/main", path):
            getattr(self, f"_{match[2].replace('-', '_')}")(self.hub.repos[match[1]], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            self.answer({"error": f"no {path}"}, 404)

    def _create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        assert asked["type"] == "dataset"
        url = f"http://{self.headers['Host']}/datasets/{name}"
        status = 409 if name in self.hub.repos else 200
        self.hub.repos.setdefault(name, {})
        self.answer({"url": url, "error": "exists"} if status == 409 else {"url": url}, status)

    def _preupload(self, files, body):
        answers = []
        for asked in json.loads(body)["files"]:
            name = asked["path"]
            mode = "lfs" if is_large(name) else "regular"
            there = {"path": name, "uploadMode": mode, "shouldIgnore": False}
            if name in files:
                listed = entry(name, files[name])
                there["oid"] = listed["lfs"]["oid"] if is_large(name) else listed["oid"]
            answers.append(there)
        self.answer({"files": answers})

    def _batch(self, asked):
        assert asked["hash_algo"] == "sha256"
        objects = []
        for one in asked["objects"]:
            href = f"http://{self.headers['Host']}/objects/{one['oid']}"
            is_new = one["oid"] not in self.hub.objects
            objects.append(one | ({"actions": {"upload": {"href": href}}} if is_new else {}))
        self.answer({"transfer": "basic", "objects": objects})

    def _commit(self, files, body):
        header, *operations = map(json.loads, body.splitlines())
        added = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                added[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert operation["key"] == "file"
                added[value["path"]] = base64.b64decode(value["content"])
        files.update(added)
        self.hub.commits.append((header["value"]["summary"], sorted(added)))
        sha = f"{len(self.hub.commits):040x}"
        url = f"http://{self.headers['Host']}/datasets/me/packed/commit/{sha}"
        self.answer({"success": True, "commitUrl": url, "commitOid": sha})

    def _paths_info(self, files, body):
        paths = parse_qs(body.decode())["paths"]
        self.answer([entry(name, files[name]) for name in paths if name in files])

    def do_PUT(self):
        content, oid = self.body(), self.path.rpartition("/")[2]
        self.hub.before_upload()
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.uploads.append(oid)
        self.hub.objects[oid] = content
        self.answer(b"")

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api").split("/")[2:4])
        if name not in self.hub.repos:
            self.answer({"error": "Repository not found"}, 404)
            return
        sha = f"{len(self.hub.commits):040x}"
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/[^/]+|)", path):
            files = self.hub.repos[match[1]]
            siblings = [{"rfilename": name} for name in files]
            self.answer({"_id": "1", "id": match[1], "sha": sha, "siblings": siblings})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+", path):
            self.answer([entry(*file) for file in self.hub.repos[match[1]].items()])
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.hub.repos[match[1]][match[2]]
            self.answer(content, headers={"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": sha})
        else:
            self.answer({"error": f"no {path}"}, 404)

    do_HEAD = do_GET  # noqa: N815


@contextmanager
def hub_server():
    """A Hub at an address of this machine: (Hub, environment of its clients)."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        # the stand-in has LFS alone, which the Hub takes from clients without Xet
        yield hub, {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    finally:
        server.shutdown()
        server.server_close()
