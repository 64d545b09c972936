"""`llmcli count-params` as a shell meets it: the table, JSON, breakdowns, costs, pictures, and what it costs itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from terminals import on_a_terminal
from test_params import LLAMA_405B

from llmcli import cli, config, output
from llmcli.commands import count_params
from llmcli.params import Line

KEYS = [
    "family",
    "tie_word_embeddings",
    "total",
    "total_tied",
    "total_untied",
    "saved_by_tying",
    "embedding",
    "parts",
    "active",
]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `llmcli count-params` with these arguments: its stdout, or with --json what it says."""

    def run(*arguments: str | Path) -> Any:
        assert cli.run(["count-params", *map(str, arguments)]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in arguments else out

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `llmcli count-params` with these arguments: (exit code, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        code = cli.run(["count-params", *map(str, arguments)])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "hint: " in captured.err
        return code, captured.err

    return run


def lines_on_a_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that a terminal of so many columns shows of a real run."""
    code, out = on_a_terminal("count-params", *arguments, columns=columns)
    assert code == 0
    return re.sub(r"\x1b\[[\d;]*m|\r", "", out).split("\n")


# JSON.


def test_json_has_exactly_these_keys(shown: Any) -> None:
    one = shown("gpt2", "--json")
    assert list(one) == KEYS
    assert one["total"] == 124_439_808 == sum(one["parts"].values())
    both = shown("gpt2", "mixtral-8x7b", "--json")
    assert [list(each) for each in both] == [KEYS, KEYS]
    assert both[0] == one
    assert both[1]["active"] == 12_879_925_248


def test_more_is_told_under_further_keys_when_asked(shown: Any) -> None:
    assert list(shown("gpt2", "--json", "--by", "layer")) == [*KEYS, "by", "lines"]
    assert list(shown("gpt2", "--json", "--cost")) == [*KEYS, "cost"]
    assert list(shown("gpt2", "--json", "--table", "embeddings")) == [*KEYS, "embeddings"]
    assert shown("gpt2", "--json", "--files")["files"] is None
    everything = shown("gemma-2b", "--json", "--by", "tensor", "--cost", "--context", "100", "--batch", "3")
    assert everything["lines"][0] == {
        "name": "token_embeddings.weight",
        "parameters": 524_288_000,
        "share": 524_288_000 / 2_506_172_416,
        "shape": [256_000, 2048],
    }
    assert (everything["cost"]["context"], everything["cost"]["batch"]) == (100, 3)
    assert everything["cost"]["flops"]["head"] == 1_048_576_000
    assert everything["cost"]["kv_cache"] == {"bytes_per_token": 18_432, "bytes": 3 * 100 * 18_432}


def test_a_checkpoints_disagreements_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import save_file

    sizes = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": "llmcli-llama", "num_attention_heads": 1}))
    tensors = {"model.embed_tokens.weight": torch.zeros(8, 4), "lm_head.weight": torch.ones(8, 4), "x": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert cli.run(["count-params", str(tmp_path), "--json", "--files"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["total"] == 67
    assert told["files"]["config_total"] == 64
    assert told["files"]["dtypes"] == {"F32": 67}
    assert captured.err.count("warning: ") == len(told["files"]["disagreements"]) == 2
    assert "config.json makes 64 parameters, the files hold 67" in captured.err
    assert cli.run(["count-params", str(tmp_path)]) == 0
    assert "buffers, apart" in capsys.readouterr().out


# Tables.


def test_the_table_of_embeddings(shown: Any) -> None:
    lines = shown("gpt1", "gpt2", "gemma-2b", "llama-7b", "--table", "embeddings").splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["gpt1", "40,478", "768", "31,087,104", "116,534,784", "27%", "27%", "tied", "31,127,582"],
        ["gpt2", "50,257", "768", "38,597,376", "124,439,808", "31%", "31%", "tied", "38,647,633"],
        ["gemma-2b", "256,000", "2,048", "524,288,000", "2,506,172,416", "21%", "21%", "tied", "524,288,000"],
        ["llama-7b", "32,000", "4,096", "131,072,000", "6,738,415,616", "2%", "4%", "untied", "131,072,000"],
    ]
    assert lines[0].split() == ["V", "d", "V·d", "total", "share", "with", "head", "output", "saved", "by", "tying"]


def test_targets_stand_side_by_side_with_shares_and_bars(shown: Any) -> None:
    lines = {line[:16].strip(): line[16:].split() for line in shown("gpt2", "mixtral-8x7b").splitlines()}
    assert lines["feed forward"] == ["56,669,184", "46%", "███▋", "–"]
    assert lines["experts"] == ["–", "45,097,156,608", "97%", "███████▊"]
    assert lines["total"] == ["124,439,808", "46,702,792,704"]
    assert lines["active per token"] == ["124,439,808", "12,879,925,248", "28%", "██▎"]
    assert lines["counted as"] == ["tied", "untied"]


def test_tensors_and_layers_that_are_alike_share_a_line(shown: Any) -> None:
    lines = [line.split() for line in shown("mixtral-8x7b", "--by", "tensor").splitlines()]
    gates = next(line for line in lines if line and line[0].endswith("experts.{0-7}.gate.weight"))
    assert gates[0].startswith("blocks.{0-31}.")
    assert gates[1:] == ["256", "×", "14336", "x", "4096", "15,032,385,536", "32%", "███▉"]
    lines = [line.split() for line in shown("mixtral-8x7b", "--by", "layer").splitlines()]
    assert ["layer", "{0-31}", "32", "×", "1,451,270,144", "46,440,644,608", "99%", "███████████▉"] in lines
    narrow = lines_on_a_terminal(40, "mixtral-8x7b", "--by", "tensor")
    assert narrow[narrow.index("blocks.{0-31}.attention.q.weight") + 1] == "  536,870,912  1%"


def test_costs_are_told_in_units(shown: Any) -> None:
    text = shown("gemma-2b", "--cost", "--context", "1024")
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert rows["head"][:3] == ["1.049", "B", "20%"]
    assert rows["in 16 bits"] == ["5.01", "GB"]
    assert rows["a token"] == ["18.4", "kB"]


@pytest.mark.parametrize(
    "options",
    [
        ["gpt2", "gemma-2b"],
        ["gpt2", "mixtral-8x7b", "--cost"],
        ["gpt1", "gpt2", "llama-7b", "--table", "embeddings"],
        ["mixtral-8x7b", "--by", "layer"],
        ["mixtral-8x7b", "--by", "tensor"],
    ],
)
def test_forty_columns_are_enough(options: list[str]) -> None:
    lines = lines_on_a_terminal(40, *options)
    assert max(map(len, lines)) <= 40
    text = "\n".join(lines)
    whole = {"gpt2": "124,439,808", "mixtral-8x7b": "46,702,792,704", "gpt1": "116,534,784"}
    for target, total in whole.items():
        if target in options:
            assert total in text
    assert "…" not in text


def test_wide_terminals_put_targets_side_by_side_and_narrow_ones_below_each_other() -> None:
    def heads(columns: int) -> list[list[str]]:
        lines = lines_on_a_terminal(columns, "gpt2", "gemma-2b")
        return [line.split() for line in lines if "gpt2" in line or "gemma-2b" in line]

    assert heads(100) == [["gpt2", "gemma-2b"]]
    assert heads(40) == [["gpt2"], ["gemma-2b"]]


def test_lines_that_differ_in_their_numbers_stand_together() -> None:
    def line(name: str, parameters: int = 10, shape: tuple[int, ...] | None = None) -> Line:
        return Line(name=name, parameters=parameters, share=0.1, shape=shape)

    lines = [line("layer 0"), line("layer 1", 20), line("layer 2"), line("layer 3"), line("head")]
    assert [(name, one.parameters, times) for name, one, times in count_params.merged(lines)] == [
        ("layer {0,2-3}", 10, 3),
        ("layer 1", 20, 1),
        ("head", 10, 1),
    ]
    lines = [line(f"h.{i}.e.{e}.w", 6, (2, 3)) for i in range(3) for e in range(2)] + [line("h.0.e.0.v", 6, (3, 2))]
    assert [(name, times) for name, _, times in count_params.merged(lines)] == [
        ("h.{0-2}.e.{0-1}.w", 6),
        ("h.0.e.0.v", 1),
    ]


@pytest.mark.parametrize(("share", "text"), [(0, "0%"), (1e-9, "<1%"), (0.0049, "<1%"), (0.006, "1%"), (1, "100%")])
def test_a_share_that_is_there_is_never_nothing(share: float, text: str) -> None:
    assert count_params.percent(share) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, ""), (0.5, "██████"), (0.495, "██████"), (0.51, "██████▏"), (1, "█" * 12)]
)
def test_a_bar_is_as_long_as_its_share(share: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.bar(share) == text

    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert output.bar(share) == "#" * text.count("█")


def test_of_several_ways_to_say_it_the_widest_that_fits_is_shown() -> None:
    ways = output.Fitting(lambda: "0123456789", lambda: "01234", lambda: "0123456")
    for columns, told in ((10, "0123456789"), (9, "01234"), (5, "01234"), (4, "0123\n456")):
        console = Console(width=columns)
        with console.capture() as captured:
            console.print(ways)
        assert captured.get().strip() == told


# Refusals.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--table", "embeddings", "--cost"], "Leave out --cost"),
        (["--table", "embeddings", "--by", "part"], "Leave out --by"),
        (["--context", "5"], "Add --cost"),
        (["--dtype", "float16"], "Add --cost"),
        (["--batch", "2"], "Add --cost"),
        (["--cost", "--context", "1025"], "1024 learned positions"),
        (["--cost", "--batch", "0"], "--batch"),
        (["--by", "head"], "--by"),
        (["--plot", "parts.jpg"], ".svg, .png or .pdf"),
        (["--plot", "/nowhere/parts.svg"], "no folder /nowhere"),
        (["--revision", "main"], "not a repository"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], said: str, refusal: Any) -> None:
    code, text = refusal("gpt2", *options)
    assert code == 2
    assert said in text


def test_costs_of_files_without_a_config_are_refused(tmp_path: Path, refusal: Any) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    code, text = refusal(tmp_path / "model.safetensors", "--cost")
    assert code == 1
    assert "costs follow from a config" in text


# Pictures.


@pytest.mark.parametrize("targets", [["gpt2"], ["gpt1", "mixtral-8x7b", "glasslm"]])
@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_picture_is_drawn_beside_the_table(
    targets: list[str], suffix: str, begins: bytes, tmp_path: Path, shown: Any
) -> None:
    path = tmp_path / f"parts{suffix}"
    table = shown(*targets)
    assert shown(*targets, "--plot", path) == table
    first = path.read_bytes()
    assert first.startswith(begins)
    shown(*targets, "--plot", path)
    assert path.read_bytes() == first, "the same picture is the same file"
    assert os.listdir(tmp_path) == [path.name]


def test_a_picture_says_what_the_table_says(tmp_path: Path, shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    shown("gpt2", "--plot", tmp_path / "one.svg")
    shown("gpt2", "llama-7b", "--plot", tmp_path / "two.svg")
    one, two = ([text.get_text() for text in figure.findobj(Text)] for figure in figures)
    assert {"gpt2: 124,439,808 parameters, tied", "38,597,376  (31%)", "feed forward"} <= set(one)
    assert {"gpt2  124.4 M", "llama-7b  6.738 B", "31%", "64%", "output", "positions"} <= set(two)
    assert "norms" not in two, "what is too thin to be seen is not in the legend"
    for figure in figures:  # nothing reaches out of the picture, no label over another
        figure.draw_without_rendering()
        boxes = [t.get_window_extent() for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
        whole = figure.bbox
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 for box in boxes)
        overlaps = [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]
        assert overlaps == []


@pytest.mark.parametrize("alike", [False, True])
def test_long_names_are_drawn_by_their_ends_where_these_tell_them_apart(
    tmp_path: Path, shown: Any, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    targets = [f"{folder}/{'y' * 40}{1 if alike else n}.toml" for n, folder in enumerate(("one", "two"))]
    for target in targets:
        Path(target).parent.mkdir()
        Path(target).write_text(config.presets()["gpt2"].read_text())
    figures: list[Any] = []
    monkeypatch.setattr("llmcli.plot._save", lambda figure, path: figures.append(figure))
    shown(*targets, "--plot", tmp_path / "two.svg")
    labels = [label.get_text().partition("  ")[0] for label in figures[0].axes[0].get_yticklabels()]
    assert labels == (targets if alike else [f"…{'y' * 25}{n}.toml" for n in (0, 1)])


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = refusal("gpt2", "--plot", tmp_path / "parts.svg")
    assert code == 1
    assert "llmcli[plot]" in text
    assert list(tmp_path.iterdir()) == []


# What it costs itself.


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_405B))
    return path


LOADED = """
import socket, sys

def blocked(*args, **kwargs):
    raise AssertionError("a socket")

socket.socket.connect = socket.getaddrinfo = blocked
from llmcli import cli
code = cli.run(sys.argv[1:])
heavy = ("torch", "numpy", "rich.table", "huggingface_hub", "matplotlib")
print(" ".join(name for name in heavy if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(("options", "loaded"), [(["--json", "--cost"], ""), ([], "rich.table")])
def test_a_config_is_counted_without_torch_numpy_or_network(large: Path, options: list[str], loaded: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADED, "count-params", str(large), *options], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0
    assert run.stderr.strip() == loaded
    assert "405853388800" in run.stdout.replace(",", "")


def test_a_checkpoint_is_counted_without_torch_numpy_or_network(tmp_path: Path) -> None:
    import hf

    hf.make("llama", tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", LOADED, "count-params", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr.strip()) == (0, "")


USAGE = """
import os, sys

quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
process = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ, file_actions=quiet)
_, status, usage = os.wait4(process, 0)
print(status, usage.ru_maxrss, usage.ru_utime + usage.ru_stime)
"""


def test_counting_llama_405b_takes_less_than_45_megabytes(large: Path) -> None:
    # From a small process in between: a child's peak begins with what its parent held.
    command = [sys.executable, "-c", USAGE, "-m", "llmcli", "count-params", str(large)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    status, kilobytes, seconds = run.stdout.split()
    assert status == "0"
    assert int(kilobytes) < 45_000
    # Of the processor and not of the clock, which other work delays; alone it is about 0.2 s.
    assert float(seconds) < 1.0


def test_a_repository_is_counted_from_the_beginnings_of_its_files(tmp_path: Path) -> None:
    import hf
    from hub_server import serve
    from safetensors.torch import load_file, save_file

    model = hf.make("llama", tmp_path / "model", tie_word_embeddings=True, hidden_size=64, vocab_size=4000)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    config = (tmp_path / "model" / "config.json").read_bytes()
    total = sum(parameter.numel() for parameter in model.parameters())
    with serve() as hub:
        hub.add("org/twice", {"config.json": config, "model.safetensors": path.read_bytes()})
        hub.add("org/pickled", {"config.json": config, "pytorch_model.bin": bytes(1 << 20)})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        run = subprocess.run(
            [sys.executable, "-m", "llmcli", "count-params", "org/twice", "org/pickled", "--json"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )
        sent = hub.sent
    assert run.returncode == 0
    assert [counted["total"] for counted in json.loads(run.stdout)] == [total, total]
    assert "'lm_head.weight', not compared: config.json says tied: counted once" in run.stderr
    assert "counted from config.json" in run.stderr
    assert sent < path.stat().st_size / 4, "no weights were transferred"
