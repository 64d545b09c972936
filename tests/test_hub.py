"""Repositories of the Hub, against a stand-in on loopback: what is asked for, what is kept, what is refused and how.

HF_ENDPOINT and HF_HOME are read when huggingface_hub is imported, so every look is a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serve

from llmcli import tensors, weight_files

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as running:
        yield running


def weights(shapes: dict[str, tuple[int, ...]], fill: int = 1, value: float = 0.0) -> bytes:
    """A safetensors file of float32 zeros (or another value) and, at its end, bytes that are not."""
    header = tensors.write_header((name, "F32", shape) for name, shape in shapes.items())
    size = sum(4 * int.__mul__(*(*shape, 1)[:2]) for shape in shapes.values())
    return header + struct.pack("<f", value) * (size // 4 - 1) + fill.to_bytes(4, "little")


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of CONFIG's model."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 8)}
    for n in range(2):
        layer = f"model.layers.{n}"
        found |= {f"{layer}.self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}
        found |= {f"{layer}.mlp.{p}_proj.weight": (16, 8) for p in ("gate", "up")}
        found |= {f"{layer}.mlp.down_proj.weight": (8, 16)}
        found |= {f"{layer}.{p}_layernorm.weight": (8,) for p in ("input", "post_attention")}
    return found | {"model.norm.weight": (8,)}


PARAMETERS = 32 * 8 + 2 * (4 * 64 + 3 * 128 + 2 * 8) + 8
SINGLE = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": weights(shapes()),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "README.md": b"# model",
    "pytorch_model.bin": b"pickle",
    "tf_model.h5": b"tf",
    "onnx/model.safetensors": b"onnx",
    "consolidated.safetensors": b"meta",
    "training_args.bin": b"args",
}


def sharded() -> dict[str, bytes]:
    """SINGLE in two shards."""
    every = list(shapes().items())
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    halves = [dict(every[:9]), dict(every[9:])]
    index = {"weight_map": {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}}
    files = {name: weights(half) for name, half in zip(names, halves, strict=True)}
    return {
        "config.json": SINGLE["config.json"],
        "model.safetensors.index.json": json.dumps(index).encode(),
        **files,
    }


class Client:
    """Processes that see the stand-in as the Hub, with a cache of their own."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.home = home
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        self.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}

    def start(self, code: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
            cwd=self.home,
        )

    def run(self, code: str, **environment: str) -> Any:
        """What the code says with `say(...)`; nothing may go to stderr."""
        process = self.start(code, **environment)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), err
        return [json.loads(line) for line in out.splitlines()]

    def llmcli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llmcli", *arguments],
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            cwd=self.home,
            timeout=120,
        )


PRELUDE = """
import json, sys
from pathlib import Path
from llmcli import targets
from llmcli.errors import LlmcliError
def say(value):
    print(json.dumps(value), flush=True)
def attempt(*args, how=targets.find_checkpoint, **options):
    try:
        say(str(how(*args, **options)))
    except LlmcliError as error:
        say([type(error).__name__, error.exit_code, error.message, error.hint])
"""


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path)


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_is_downloaded_once_and_only_what_belongs_to_it(hub: Hub, client: Client) -> None:
    commit = hub.add("org/tiny", SINGLE | UNWANTED)
    first, again = client.run('attempt("org/tiny"); attempt("org/tiny")')
    folder = Path(first)
    assert listing(folder) == SINGLE
    assert folder == client.home / "hub" / "models--org--tiny" / "snapshots" / commit, "the usual cache"
    assert again == first
    contents = [path for path in hub.paths() if "/cdn/" in path or "tokenizer" in path]
    assert len(contents) == 3, "each file once"
    assert not list((client.home / "hub").rglob("*.incomplete"))


def test_the_token_goes_to_the_hub_and_not_to_the_host_of_large_files(hub: Hub, client: Client) -> None:
    hub.add("org/private", SINGLE, token="secret")
    (folder,) = client.run('attempt("org/private")', HF_TOKEN="secret")
    assert listing(Path(folder)) == SINGLE
    at_cdn = [request for request in hub.requests if "/cdn/" in request.path]
    assert at_cdn and all(request.token is None for request in at_cdn)
    assert all(request.token == "secret" for request in hub.requests if "/cdn/" not in request.path)


def test_every_request_is_for_the_checkpoint(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", SINGLE)
    client.run('attempt("org/tiny")')
    assert [path for path in hub.paths() + hub.paths("HEAD") if "org/tiny" not in path and "/cdn/" not in path] == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, client: Client) -> None:
    old = hub.add("org/tiny", SINGLE | {"model.safetensors": weights(shapes(), fill=7)})
    new = hub.add("org/tiny", SINGLE)
    hub.repos["org/tiny"].refs |= {"v1": old, "refs/pr/3": old}
    found = client.run(
        f'attempt("org/tiny"); attempt("org/tiny@v1"); attempt("org/tiny", revision="v1"); attempt("org/tiny@{old}")\n'
        'attempt("org/tiny@refs/pr/3")'
    )
    assert [Path(folder).name for folder in found] == [new, old, old, old, old]
    assert listing(Path(found[0])) != listing(Path(found[1]))


def test_a_moved_branch_is_followed(hub: Hub, client: Client) -> None:
    old = hub.add("org/tiny", SINGLE)
    client.run('attempt("org/tiny")')
    new = hub.add("org/tiny", SINGLE | {"tokenizer.json": b"[]"})
    sent = hub.sent
    online, offline, pinned = client.run(
        f'attempt("org/tiny"); attempt("org/tiny", offline=True); attempt("org/tiny@{old}", offline=True)'
    )
    assert [Path(folder).name for folder in (online, offline, pinned)] == [new, new, old]
    assert hub.sent - sent < len(SINGLE["model.safetensors"]), "the unchanged weights are not fetched again"


def test_shards_are_those_of_the_index(hub: Hub, client: Client) -> None:
    files = sharded()
    hub.add("org/two", files | UNWANTED | {"model-00003-of-00003.safetensors": b"stray"})
    (folder,) = client.run('attempt("org/two")')
    assert listing(Path(folder)) == files
    assert weight_files.read_checkpoint(Path(folder)).infos.keys() == shapes().keys()


def test_a_pickle_is_fetched_where_there_is_nothing_better(hub: Hub, client: Client) -> None:
    hub.add("org/old", {"config.json": SINGLE["config.json"], "pytorch_model.bin": b"pickle", "README.md": b"x"})
    folder, headers = client.run('attempt("org/old"); attempt("org/old", how=targets.read_headers)')
    assert listing(Path(folder)).keys() == {"config.json", "pytorch_model.bin"}
    assert headers[0] == "CheckpointError" and "torch" in headers[2]


def test_a_shard_that_the_repository_lacks_is_named_before_anything_is_downloaded(hub: Hub, client: Client) -> None:
    files = sharded()
    del files["model-00002-of-00002.safetensors"]
    hub.add("org/torn", files)
    ((kind, code, message, _),) = client.run('attempt("org/torn")')
    assert (kind, code) == ("CheckpointError", 1)
    assert "1 of 2 files" in message and "model-00002-of-00002.safetensors" in message
    assert not any("/cdn/" in path for path in hub.paths())


def test_offline_uses_the_cache_and_asks_nothing(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", SINGLE)
    (online,) = client.run('attempt("org/tiny")')
    asked = len(hub.requests)
    look = 'attempt("org/tiny"{0}); attempt("org/tiny"{0}, how=targets.read_config); attempt("org/other"{0})'
    for code, environment in ((look.format(", offline=True"), {}), (look.format(""), {"HF_HUB_OFFLINE": "1"})):
        folder, config, other = client.run(code, **environment)
        assert folder == online and "family='llama'" in config
        assert other[:2] == ["CheckpointError", 1] and "not in the cache" in other[2] and "offline" in other[3]
    assert len(hub.requests) == asked


def test_offline_says_what_the_cache_lacks(hub: Hub, client: Client) -> None:
    hub.add("org/two", sharded())
    client.run('attempt("org/two", how=targets.read_config)')
    for how in ("find_checkpoint", "read_headers"):
        ((kind, _, message, hint),) = client.run(f'attempt("org/two", offline=True, how=targets.{how})')
        assert kind == "CheckpointError" and message.startswith("org/two: not all of it is in the cache")
        assert "without --offline" in hint
    (config,) = client.run('attempt("org/two", offline=True, how=targets.read_config)')
    assert "family='llama'" in config


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}', b"\xff"])
def test_an_index_that_is_none_is_refused(hub: Hub, client: Client, index: bytes) -> None:
    hub.add("org/two", sharded() | {"model.safetensors.index.json": index})
    ((kind, _, message, _),) = client.run('attempt("org/two", how=targets.read_headers)')
    assert kind == "CheckpointError" and "not an index of shards" in message


def test_shards_that_do_not_belong_to_the_index_are_refused_from_their_headers(hub: Hub, client: Client) -> None:
    files = sharded()
    table = json.loads(files["model.safetensors.index.json"])
    table["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    hub.add("org/ghost", files | {"model.safetensors.index.json": json.dumps(table).encode()})
    hub.add("org/twice", files | {"model-00002-of-00002.safetensors": files["model-00001-of-00002.safetensors"]})
    ghost, twice = client.run("for name in ('org/ghost', 'org/twice'): attempt(name, how=targets.read_headers)")
    assert ghost[0] == "CheckpointError" and "ghost.weight" in ghost[2]
    assert twice[0] == "CheckpointError" and "in two shards: model.embed_tokens.weight" in twice[2]


def test_refusals_say_what_is_wrong_and_what_to_do(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", SINGLE)
    hub.add("org/secret", SINGLE, token="secret")
    hub.add("org/gated", SINGLE, token="secret", gated=True)
    hub.add("org/gguf", {"model.gguf": b"x", "README.md": b"x"})
    hub.add("org/empty", {})
    hub.add("org/bare", {"model.safetensors": b"x"})
    expected = {
        "org/none": ("UsageError", "no such repository", "spelling"),
        "org/secret": ("UsageError", "no such repository", "HF_TOKEN"),
        "org/gated": ("CheckpointError", "gated", f"{hub.url}/org/gated"),
        "org/tiny@v9": ("UsageError", "no revision 'v9'", "branch, a tag"),
        "org/gguf": ("CheckpointError", "no model.safetensors", "model.gguf, README.md"),
        "org/empty": ("CheckpointError", "no model.safetensors", "empty"),
        "org/bare": ("CheckpointError", "no config.json", "model.safetensors"),
        "org/a--b": ("UsageError", "not the name of a repository", ""),
    }
    found = client.run(f"for name in {list(expected)}: attempt(name)")
    for (kind, code, message, hint), (name, wanted) in zip(found, expected.items(), strict=True):
        assert (kind, code) == (wanted[0], 2 if wanted[0] == "UsageError" else 1), message
        assert message.startswith(f"{name}: ") and wanted[1] in message
        assert wanted[2] in hint
    with_token = 'attempt("org/gated"); attempt("org/none")'
    gated, none = client.run(with_token, HF_TOKEN="other")
    assert "gated" in gated[2] and "HF_TOKEN belongs to that account" in gated[3]
    assert "no such repository" in none[2]
    ((_, _, message, hint),) = client.run('attempt("org/tiny")', HF_TOKEN="invalid")
    assert "status 401" in message and "token is not valid" in hint
    (folder,) = client.run('attempt("org/gated")', HF_TOKEN="secret")
    assert listing(Path(folder)) == SINGLE


def test_a_hub_out_of_order_or_out_of_reach_is_said_in_a_message(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", SINGLE)
    for status, advice in ((403, "no right"), (429, "wait"), (500, "Try again later")):
        hub.status = status
        ((kind, code, message, hint),) = client.run('attempt("org/tiny")')
        assert (kind, code) == ("CheckpointError", 1) and f"status {status}" in message and advice in hint
    ((kind, code, message, hint),) = client.run('attempt("org/tiny")', HF_ENDPOINT="http://127.0.0.1:9")
    assert (kind, code) == ("CheckpointError", 1)
    assert message.startswith("org/tiny: no such file or folder here") and "cannot be reached" in message
    assert "--offline" in hint


# huggingface_hub writes ten megabytes at a time; what a break leaves on the disk is a multiple of that.
BIG = {**SINGLE, "model.safetensors": weights({"a": (65536, 128)}, fill=5)}
CUT = 25_000_000
KEPT = 2 * 10 * 1024 * 1024


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Hub, client: Client) -> None:
    hub.add("org/big", BIG)
    hub.cut_after, hub.cuts = CUT, 1
    (folder,) = client.run('attempt("org/big")')
    assert listing(Path(folder))["model.safetensors"] == BIG["model.safetensors"]
    ranges = [request.range for request in hub.requests if "/cdn/" in request.path]
    assert ranges == [None, f"bytes={KEPT}-"]


def part_of(client: Client) -> Path:
    return next((client.home / "hub").rglob("*.llmcli.incomplete"))


def start_and_kill(hub: Hub, client: Client) -> int:
    """A download that is killed once a part of the file is on the disk; returns the size of that part."""
    hub.cut_after, hub.cuts = CUT, 1
    process = client.start('attempt("org/big")')
    while not any(request.sent >= CUT for request in hub.requests):
        assert process.poll() is None
        threading.Event().wait(0.01)
    # After a break it waits a second before it goes on: time enough.
    while part_of(client).stat().st_size < KEPT:
        assert process.poll() is None
        threading.Event().wait(0.01)
    process.kill()
    process.communicate()
    hub.cut_after = None
    return part_of(client).stat().st_size


def test_a_killed_download_goes_on_in_the_next_run(hub: Hub, client: Client) -> None:
    hub.add("org/big", BIG)
    have = start_and_kill(hub, client)
    assert have == KEPT
    before = hub.sent
    (folder,) = client.run('attempt("org/big")')
    assert listing(Path(folder))["model.safetensors"] == BIG["model.safetensors"]
    last = [request for request in hub.requests if "/cdn/" in request.path][-1]
    assert last.range == f"bytes={have}-"
    assert hub.sent - before < len(BIG["model.safetensors"]) - have + 10_000
    assert not list((client.home / "hub").rglob("*incomplete"))


def test_a_part_that_does_not_belong_to_the_file_is_found_out(hub: Hub, client: Client) -> None:
    hub.add("org/big", BIG)
    start_and_kill(hub, client)
    part = part_of(client)
    part.write_bytes(b"\xff" + part.read_bytes()[1:])
    damaged, again = client.run('attempt("org/big"); attempt("org/big")')
    assert damaged[0] == "CheckpointError" and "damaged" in damaged[2] and "again" in damaged[3]
    assert listing(Path(again))["model.safetensors"] == BIG["model.safetensors"]
    # One longer than the file is not a part of it either.
    digest = hashlib.sha256(BIG["model.safetensors"]).hexdigest()
    blob = client.home / "hub" / "models--org--big" / "blobs" / digest
    (Path(again) / "model.safetensors").unlink()
    blob.rename(blob.with_name(f"{digest}.llmcli.incomplete"))
    with blob.with_name(f"{digest}.llmcli.incomplete").open("ab") as file:
        file.write(b"more")
    (folder,) = client.run('attempt("org/big")')
    assert listing(Path(folder))["model.safetensors"] == BIG["model.safetensors"]


HEADERS = """
headers = targets.read_headers({!r})
say([headers.here, sorted(headers.checkpoint.infos), str(headers.path)])
"""


@pytest.mark.parametrize("files", [SINGLE, sharded()], ids=["single", "sharded"])
def test_headers_come_without_the_weights(hub: Hub, client: Client, files: dict[str, bytes]) -> None:
    large = {name: content + bytes(2_000_000) for name, content in files.items() if name.endswith(".safetensors")}
    # The bytes behind the tensors are their own tensor, so that the files stay sound.
    for name in large:
        padded = dict(shapes()) if files is SINGLE else {
            info.name: info.shape for info in tensors.parse_header(*_header(files[name])).values()
        }  # fmt: skip
        large[name] = weights({**padded, f"padding.{name}": (500_000,)})
    if "model.safetensors.index.json" in files:
        index = json.loads(files["model.safetensors.index.json"])
        index["weight_map"] |= {f"padding.{name}": name for name in large}
        files = files | {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("org/large", {**files, **large})
    (here, names, path), *_ = client.run(HEADERS.format("org/large"))
    assert not here and names == sorted([*shapes(), *(f"padding.{name}" for name in large)])
    assert hub.sent < len(large) * 140_000 + 20_000 < sum(map(len, large.values()))
    assert [path.name for path in Path(path).iterdir() if path.suffix == ".safetensors"] == []
    # Once the weights are in the cache, their headers are read there.
    client.run('attempt("org/large")')
    sent = hub.sent
    (here, again, _), *_ = client.run(HEADERS.format("org/large"))
    assert here and again == names and hub.sent - sent < 3000


def _header(content: bytes) -> tuple[bytes, Path, int]:
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], Path("x"), len(content)


def test_a_long_header_takes_a_second_request_and_no_third(hub: Hub, client: Client) -> None:
    many = {f"tensor.{n:05d}.with.a.rather.long.name": (2,) for n in range(2500)}
    hub.add("org/many", SINGLE | {"model.safetensors": weights(many)})
    (_, names, _), *_ = client.run(HEADERS.format("org/many"))
    assert names == sorted(many)
    asked = [request.range for request in hub.requests if "/cdn/" in request.path]
    assert len(asked) == 2 and asked[1] and asked[1].startswith("bytes=131072-")


def test_a_server_without_ranges_is_hung_up_on(hub: Hub, client: Client) -> None:
    hub.ranges = False
    hub.add("org/large", SINGLE | {"model.safetensors": weights({"a": (1 << 22, 8)})})
    (_, names, _), *_ = client.run(HEADERS.format("org/large"))
    assert names == ["a"]
    assert hub.sent < 20_000_000, "not the 134 MB of the file"


@pytest.mark.parametrize(
    "content", [b"", b"\x07", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_a_damaged_header_on_the_hub_is_refused(hub: Hub, client: Client, content: bytes) -> None:
    hub.add("org/damaged", SINGLE | {"model.safetensors": content})
    ((kind, code, message, _),) = client.run('attempt("org/damaged", how=targets.read_headers)')
    assert (kind, code) == ("CheckpointError", 1) and "model.safetensors" in message


def test_commands_take_a_repository_and_say_nothing_but_their_result(hub: Hub, client: Client) -> None:
    commit = hub.add("org/tiny", SINGLE)
    shown = client.llmcli("inspect", "org/tiny", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    found = json.loads(shown.stdout)
    assert found["parameters"] == PARAMETERS and found["problems"] == []
    assert found["files"] == [{"name": "model.safetensors", "bytes": len(SINGLE["model.safetensors"]), "tensors": 20}]
    counted = json.loads(client.llmcli("count-params", "org/tiny", "--json").stdout)
    assert counted["total"] == PARAMETERS
    assert not any(path.suffix == ".safetensors" for path in client.home.rglob("*")), "headers were enough"
    refused = client.llmcli("inspect", "org/tiny", "--revision", "nope")
    assert refused.returncode == 2 and refused.stdout == ""
    assert [line.split(":")[0].strip() for line in refused.stderr.splitlines()] == ["error", "hint"]
    full = json.loads(client.llmcli("inspect", "org/tiny", "--full", "--revision", commit, "--json").stdout)
    assert full["tensors"][-1]["values"]["zeros"] == 7, "--full needs the values and fetches them"
    assert client.llmcli("inspect", "org/tiny", "--offline").returncode == 0


def test_load_hf_takes_a_repository_at_a_revision_and_offline(hub: Hub, client: Client) -> None:
    sound = {name: raw for name, raw in SINGLE.items() if name != "tokenizer.json"}
    commit = hub.add("org/tiny", sound | {"model.safetensors": weights(shapes(), value=0.5)})
    offline = client.llmcli("load-hf", "org/tiny", "--offline")
    assert offline.returncode == 1 and offline.stdout == "" and "--offline" in offline.stderr
    checked = json.loads(client.llmcli("load-hf", "org/tiny", "--check", "--json").stdout)
    assert checked["parameters"] == PARAMETERS
    assert not any(path.suffix == ".safetensors" for path in client.home.rglob("*")), "headers were enough"
    loaded = client.llmcli("load-hf", "org/tiny", "--revision", commit, "--out", client.home / "clean", "--json")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert json.loads(loaded.stdout) == checked | {"out": str(client.home / "clean")}
    asked = len(hub.paths())
    again = client.llmcli("load-hf", "org/tiny", "--revision", commit, "--offline", "--json")
    assert json.loads(again.stdout) == checked and len(hub.paths()) == asked, "the cache serves without the network"


def test_progress_is_shown_on_a_terminal(hub: Hub, client: Client) -> None:
    hub.add("org/big", BIG)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + 'attempt("org/big")'],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=client.environment,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux says that nobody writes any more
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert b"model.safetensors" in shown and b"%" in shown
