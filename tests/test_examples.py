"""Every example of the README and the docs is real, and the checker that says so notices when one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmcli import families

ROOT = Path(__file__).parents[1]
FENCE = "```"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="examples are run by forks and bash")


def examples(*arguments: str | Path) -> tuple[int, str]:
    """The exit status of scripts/examples and what it said."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/examples", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    return done.returncode, done.stdout + done.stderr


def console(*lines: str, how: str = "") -> str:
    comment = f"<!-- {how} -->\n" if how else ""
    return comment + "\n".join([f"{FENCE}console", *lines, FENCE, ""])


def python(*lines: str, how: str = "") -> str:
    return console(*lines, how=how).replace("console", "python", 1)


def verdict(tmp_path: Path, text: str) -> tuple[int, str]:
    document = tmp_path / "document.md"
    document.write_text(text, encoding="utf-8")
    found = examples("--check", document)
    assert document.read_text(encoding="utf-8") == text, "a check writes nothing"
    return found


COUNT = "$ llmcli count-params gpt1 --table embeddings"
HEADS = "          V   d        V·d       total share with head output saved by tying"
SIZES = "gpt1 40,478 768 31,087,104 116,534,784   27%       27%   tied     31,127,582"
LOOP = "$ for n in 1 2; do echo row $n; done"
STRICT = "<!-- every number is checked -->\n"

GOOD = {
    "an output": console(COUNT, HEADS, SIZES),
    "a command on two lines": console("$ llmcli count-params \\", "    gpt1 --table embeddings", HEADS, SIZES),
    "a shell's output": console(LOOP, "row 1", "row 2"),
    "no output at all is not run": console("$ llmcli inspect no-such-folder/  # a comment"),
    "not run": console("$ torchrun --nproc-per-node 2 -m llmcli train x.toml", "much", how="shown only"),
    "an output left out": console("$ echo much", how="runs"),
    "files last": console("$ printf 'abc' > f", how="runs") + console("$ cat f", "abc"),
    "a refusal": console("$ llmcli presets nonsuch", how="exits 2, runs"),
    "the last one fails": console("$ echo a", "a", "$ echo b; exit 3", "b", how="exits 3"),
    "other numbers, units, bars and tokens": console(
        "$ printf 'took 1.5 s, 3 MB ███\\ntoken  id  cosine\\nking  12  0.5\\n'",
        "took 250 ms, 4.25 kB █▍", "token  id  cosine", "queen   7  0.25", how="varies",
    ),
    "any text": console("$ echo once", "upon a time", how="any text"),
    "near": console("$ echo loss 2.00", "loss 2.08", how="within 5%"),
    "python": python(">>> x = 2", ">>> for n in range(x):", "...     print(n)", "0", "1", ">>> x / 3 > 0.6", "True"),
    "python as varied": python(">>> 0.25", "0.5", how="varies"),
    "python that only shows": python("no prompt: not run"),
    "numbers": "<!-- run\nx = 1.054e9\n-->\nSome 1.05·10⁹<!-- = x -->, 27 %<!-- = 26.6 -->, −0.5<!-- = -0.5 -->,"
    " 12,345<!-- = 12345.2 -->, half<!-- = 0.4 < 0.5 < 0.6 -->, 3 to 4<!-- = f'{3} to {4}' -->.\n",
    "what llmcli answers": "GPT-1: 116,534,784<!-- = ask('count-params gpt1')['total'] -->.\n",
    "numbers of no weight": STRICT + "## 2. Heads\n\n1. GPT-2, Gemma 2B (Land, 2024, arXiv:2405.05417), `k=5`.\n",
    "a number from above": STRICT + console(LOOP, "row 1", "row 2") + "\nThere are 2 rows.\n",
    "a claim covers its own numbers": STRICT + "Between 3 and 4<!-- = 3 < 3.5 < 4 -->.\n",
}  # fmt: skip

BAD = {
    "a rotten number": (console(COUNT, HEADS, SIZES.replace("116,534,784", "116,534,785")), "+gpt1 40,478"),
    "a missing line": (console(LOOP, "row 1"), "+row 2"),
    "a line too many": (console(LOOP, "row 1", "row 2", "row 3"), "-row 3"),
    "a command that fails": (console("$ llmcli count-params nonsuch", "some output"), "exits 2, not 0"),
    "a command that fails, its output as shown": (console("$ echo a; exit 1", "a"), "exits 1, not 0"),
    "a command that works now": (console("$ echo a", "a", how="exits 1"), "exits 0, not 1"),
    "an earlier one fails": (console("$ false", "$ echo b; exit 1", "b", how="exits 1"), "$ false: exits 1, not 0"),
    "an option that is gone, not run": (console("$ llmcli inspect some/ --gone"), "--gone"),
    "a command that is gone, not run": (console("$ torchrun -m llmcli trains", how="shown only"), "trains"),
    "one that fails, output left out": (console("$ exit 1", how="runs"), "exits 1, not 0"),
    "a missing line where numbers vary": (console(LOOP, "row 1", how="varies"), "+row 2"),
    "other words where numbers vary": (console("$ echo loss 2", "cost 2", how="varies"), "+loss 2"),
    "another header where numbers vary": (console("$ echo token id", "word id", how="varies"), "+token id"),
    "a failure where numbers vary": (console("$ echo 1; exit 1", "1", how="varies"), "exits 1, not 0"),
    "nothing where some text was": (console("$ true", "upon a time", how="any text"), "-upon a time"),
    "not near": (console("$ echo loss 2.00", "loss 2.20", how="within 5%"), "+loss 2.00"),
    "near, with other words": (console("$ echo loss 2.00", "cost 2.00", how="within 5%"), "+loss 2.00"),
    "an unknown comparison": (console("$ echo a", "a", how="vary"), "'vary' is not a way"),
    "the network": (console("$ llmcli inspect some/thing --revision main", "tensors"), "not 0"),
    "python that answers otherwise": (python(">>> 1 + 1", "3"), "+2"),
    "python that fails": (python(">>> 1 / 0", "3"), "ZeroDivisionError"),
    "python that says nothing": (python(">>> x = 1", "1"), "-1"),
    "a computed number": ("Some 1.06·10⁹<!-- = 1.054e9 -->.\n", "+Some 1.05·10⁹"),
    "a sign": ("Some 0.5<!-- = -0.5 -->.\n", "+Some -0.5"),
    "a claim": ("Half<!-- = 0.7 < 0.6 -->.\n", "not true"),
    "a text": ("3 to 5<!-- = f'{3} to {4}' -->.\n", "should end with '3 to 4'"),
    "a number that cannot be computed": ("Some 5<!-- = nonsuch -->.\n", "NameError"),
    "no number to compute": ("Some<!-- = 5 -->.\n", "no number before"),
    "a number from nowhere": (STRICT + "There are 7 rows.\n", "7 is neither computed nor in an output"),
    "a number from another section": (
        STRICT + console(LOOP, "row 1", "row 2") + "\n## More\n\nThere are 2 rows.\n", "2 is neither",
    ),
    "a number from below": (STRICT + "There are 2 rows.\n\n" + console(LOOP, "row 1", "row 2"), "2 is neither"),
    "a second number beside a computed one": (STRICT + "Of 9 rows 5<!-- = 5 -->.\n", "9 is neither"),
    "a claim about other numbers": (STRICT + "Of 9 rows some<!-- = 3 < 4 -->.\n", "9 is neither"),
    "a block without an end": (f"{FENCE}console\n$ echo a\na\n", "has no end"),
}  # fmt: skip


def test_what_is_as_shown_passes(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        status, said = verdict(tmp_path, text)
        assert (status, said) == (0, ""), name


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_as_shown_is_caught(name: str, tmp_path: Path) -> None:
    text, complaint = BAD[name]
    status, said = verdict(tmp_path, text)
    assert status == 1 and complaint in said


def test_rewriting_mends_what_it_can_and_leaves_what_still_compares_equal(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    kept = console("$ echo took 1.5 s", "took 2.5 s", how="varies")
    document.write_text(kept + console(LOOP, "...") + "Some 3.1<!-- = 3.14 -->, 2.0<!-- = 3.14 -->.\n")
    assert examples(document) == (0, f"{document}: rewritten\n")
    mended = kept + console(LOOP, "row 1", "row 2") + "Some 3.1<!-- = 3.14 -->, 3.1<!-- = 3.14 -->.\n"
    assert document.read_text() == mended
    assert examples(document) == (0, "")
    assert examples("--fresh", document)[0] == 0
    assert document.read_text() == mended.replace("2.5 s", "1.5 s")


def test_a_document_sees_a_home_of_its_own_and_no_other_document(tmp_path: Path) -> None:
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text(console("$ pwd; echo $NO_COLOR > f; cat f", "~/work", "1"))
    second.write_text(console("$ ls; echo nothing", "nothing"))
    assert examples("--check", first, second) == (0, "")


def test_the_examples_of_the_readme_and_the_docs_are_real() -> None:
    status, said = examples("--check", "README.md", "docs/embeddings.md")
    assert status == 0, said


def test_the_readme_counts_the_families_that_there_are() -> None:
    assert f"| architectures | {len(families.names())} families |" in (ROOT / "README.md").read_text("utf-8")


def test_the_pictures_of_the_docs_are_as_computed() -> None:
    drawn = [sys.executable, ROOT / "scripts/diagrams.py", "--check"]
    done = subprocess.run(drawn, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
