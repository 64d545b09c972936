"""Small checkpoints with a tokenizer for the lab, made here and nowhere trained, and a server for them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llmcli import checkpoint, server, tokenizer
from llmcli.config import ModelConfig
from llmcli.lab import Lab, Limits
from llmcli.model import build

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
PROMPT = "Once upon a time there was a cat"
CORPUS = [f"{PROMPT} and a dog.\nOne day the cat saw the dog and they were happy. Who was it, then?\n" * 20]
TOKENS, ROWS = 304, 320
"""Tokens of the vocabulary, and rows of each model's embedding: more than there are tokens."""

KINDS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama", "tie_word_embeddings": True, "num_kv_heads": 2},
    "untied": {
        "family": "mixtral",
        "num_kv_heads": 2,
        "window_size": 6,
        "num_experts": 4,
        "top_k_experts": 2,
        "hidden_dim": 24,
    },
    "learned": {"family": "gpt2", "tie_word_embeddings": True, "max_position_embeddings": 64},
    "biased": {"family": "gpt", "tie_word_embeddings": False, "max_position_embeddings": 64},
    "capped": {
        "family": "gemma2",
        "tie_word_embeddings": True,
        "scale_embeddings": True,
        "num_kv_heads": 2,
        "window_size": 6,
        "query_scale": 8,
        "attention_softcap": 5.0,
        "logit_softcap": 4.0,
    },
}


def make(kind: str, folder: Path) -> Path:
    """A checkpoint of that kind with every parameter drawn at random, so that nothing in it is zero or one."""
    config = ModelConfig(**{"vocab_size": ROWS, "embed_dim": 32, "num_layers": 3, "num_heads": 4, **KINDS[kind]})
    model = build(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    checkpoint.save(model, folder, extra_files=tokenizer.train_bpe(CORPUS, TOKENS).save)
    return folder


def open_lab(folder: Path, limits: Limits | None = None) -> Lab:
    """A lab of a checkpoint, as the command makes it."""
    model, plan = checkpoint.load(folder)
    coder = tokenizer.load(folder)
    return Lab(model, coder, name=folder.name, tie=plan.tie.reason, path=folder, limits=limits or Limits())


@contextmanager
def serving(lab: Lab) -> Iterator[str]:
    """The lab's address while the block runs."""
    listening = server.listen("127.0.0.1", 0)
    running = server.make(lab)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield server.address(listening, "127.0.0.1")
    finally:
        running.should_exit = True
        thread.join()
        listening.close()


def ask(
    url: str, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """One request: the status, the answer (JSON where it is), and the headers in lower case."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if data is not None else {}
        connection.request(method or ("GET" if data is None else "POST"), path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        raw = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return response.status, json.loads(raw) if is_json else raw.decode(), found
    finally:
        connection.close()
