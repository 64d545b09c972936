"""The tie table, row by row, and as every way of opening a checkpoint follows it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcli import checkpoint
from llmcli.errors import CheckpointError, UsageError
from llmcli.model import Decoder
from llmcli.tying import Evidence, Tie, decide

SHAPE = (64, 16)


def evidence(**changes: Any) -> Evidence:
    """Both matrices there and different, the config silent, in a family untied by default; then the changes."""
    facts: dict[str, Any] = {"embedding": SHAPE, "head": SHAPE, "flag": None, "tied_in_family": False}
    facts |= changes
    both = facts["embedding"] is not None and facts["head"] is not None
    facts = {"equal": False if both else None, "max_difference": 0.5 if both else None} | facts
    return Evidence(**facts)


TIED = [{"flag": True, "tied_in_family": False}, {"flag": None, "tied_in_family": True}]
UNTIED = [{"flag": False, "tied_in_family": True}, {"flag": None, "tied_in_family": False}]


@pytest.mark.parametrize("said", TIED)
def test_without_a_head_a_tied_config_ties(said: dict[str, Any]) -> None:
    tie = decide(evidence(head=None, **said))
    assert (tie.decision, tie.embedding_from, tie.head_from, tie.warning) == ("tie", "input", None, None)


@pytest.mark.parametrize("said", UNTIED)
def test_without_a_head_an_untied_config_is_refused_naming_both_readings(said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        decide(evidence(head=None, **said))
    assert "no output matrix" in refusal.value.message
    assert "--tie tie" in refusal.value.hint and "lost" in refusal.value.hint and "--tie untie" in refusal.value.hint
    assert decide(evidence(head=None, **said), "tie").decision == "tie"


@pytest.mark.parametrize("said", TIED)
def test_equal_matrices_are_tied_where_that_is_meant(said: dict[str, Any]) -> None:
    tie = decide(evidence(equal=True, **said))
    assert (tie.decision, tie.head_from, tie.warning) == ("tie", None, None)
    assert "equal" in tie.reason


@pytest.mark.parametrize("said", UNTIED)
def test_equal_matrices_stay_two_where_that_is_meant(said: dict[str, Any]) -> None:
    tie = decide(evidence(equal=True, **said))
    assert (tie.decision, tie.embedding_from, tie.head_from) == ("untie", "input", "output")
    assert ("could be tied (--tie tie)" in tie.reason) == (said["flag"] is False)


@pytest.mark.parametrize("default", [True, False])
def test_different_matrices_are_both_kept_against_the_flag_with_a_warning(default: bool) -> None:
    tie = decide(evidence(flag=True, tied_in_family=default, max_difference=0.125))
    assert (tie.decision, tie.embedding_from, tie.head_from) == ("untie", "input", "output")
    assert tie.warning and "0.125" in tie.warning and "untied" in tie.warning


@pytest.mark.parametrize(("flag", "default"), [(False, True), (False, False), (None, True), (None, False)])
def test_different_matrices_are_untied_without_a_word_where_the_flag_does_not_object(
    flag: bool | None, default: bool
) -> None:
    tie = decide(evidence(flag=flag, tied_in_family=default))
    assert (tie.decision, tie.head_from, tie.warning) == ("untie", "output", None)


@pytest.mark.parametrize("said", TIED)
def test_a_head_alone_becomes_both_where_a_tie_is_meant_with_a_warning(said: dict[str, Any]) -> None:
    tie = decide(evidence(embedding=None, **said))
    assert (tie.decision, tie.embedding_from, tie.head_from) == ("tie", "output", None)
    assert tie.warning and "serves as both" in tie.warning


@pytest.mark.parametrize("said", UNTIED)
def test_a_head_alone_is_refused_where_no_tie_is_meant(said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no embedding matrix"):
        decide(evidence(embedding=None, **said))
    tie = decide(evidence(embedding=None, **said), "tie")
    assert (tie.decision, tie.embedding_from) == ("tie", "output")


@pytest.mark.parametrize("request_", ["auto", "tie", "untie"])
@pytest.mark.parametrize("flag", [True, False, None])
def test_different_row_counts_are_refused_naming_both_shapes(request_: Any, flag: bool | None) -> None:
    with pytest.raises(CheckpointError, match=r"64 x 16.*65 x 16"):
        decide(evidence(head=(65, 16), equal=None, flag=flag), request_)


@pytest.mark.parametrize("request_", ["auto", "tie", "untie"])
def test_a_file_with_neither_matrix_is_refused(request_: Any) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        decide(evidence(embedding=None, head=None, flag=True), request_)


def test_tying_different_matrices_by_hand_needs_to_be_told_which_one_stays() -> None:
    with pytest.raises(UsageError, match=r"0\.5") as refusal:
        decide(evidence(flag=False), "tie")
    assert "--keep input" in refusal.value.hint and "--keep output" in refusal.value.hint
    assert decide(evidence(flag=False), "tie", "input").embedding_from == "input"
    kept = decide(evidence(flag=False), "tie", "output")
    assert kept.embedding_from == "output" and "--tie tie --keep output" in kept.reason


def test_keeping_a_matrix_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="only the input"):
        decide(evidence(head=None, flag=True), "tie", "output")


@pytest.mark.parametrize("request_", ["auto", "untie"])
def test_keep_without_tie_is_refused(request_: Any) -> None:
    with pytest.raises(UsageError, match="without --tie tie"):
        decide(evidence(flag=True), request_, "input")


@pytest.mark.parametrize("bad", [{"request": "Tie"}, {"request": "tie", "keep": "both"}])
def test_words_that_are_no_requests_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="keep"):
        decide(evidence(), **bad)


@pytest.mark.parametrize("flag", [True, False, None])
def test_untying_by_hand_gives_each_side_a_source(flag: bool | None) -> None:
    def sides(**changes: Any) -> tuple[str, str, str | None]:
        tie = decide(evidence(flag=flag, **changes), "untie")
        return tie.decision, tie.embedding_from, tie.head_from

    assert sides() == ("untie", "input", "output")
    assert sides(equal=True) == ("untie", "input", "output")
    assert sides(head=None) == ("untie", "input", "input")
    assert sides(embedding=None) == ("untie", "output", "output")


def test_values_out_of_reach_matter_only_where_they_decide() -> None:
    assert decide(evidence(equal=None, flag=False)).decision == "untie"
    assert decide(evidence(equal=None, flag=None)).decision == "untie"
    for said in TIED:
        with pytest.raises(CheckpointError, match="out of reach"):
            decide(evidence(equal=None, **said))


# The matrix: what is in the file, times what the config says, times every family, loaded from disk.

FLAGS = ("true", "false", "absent", "nested true", "nested false")
HEADS = ("absent", "equal", "different")
EMBEDDINGS = ("present", "absent")


def expected(flag: bool | None, default: bool, head: str, embedding: str) -> tuple[str, str]:
    """The table of the documentation, written once more: (decision, the file's matrices for input and output)."""
    meant_tied = default if flag is None else flag
    if embedding == "absent" and head == "absent":
        return "refuse", ""
    if embedding == "absent":
        return ("tie", "HH") if meant_tied else ("refuse", "")
    if head == "absent":
        return ("tie", "EE") if meant_tied else ("refuse", "")
    if head == "equal":
        return ("tie", "EE") if meant_tied else ("untie", "EE")
    return "untie", "EH"


class Base:
    """One family's tensors and config as transformers wrote them, and transformers' own model in float64."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = hf.make(family, folder, tie_word_embeddings=False).double()
        self.model.config._experts_implementation = "eager"  # the grouped kernel has no float64
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        names = ("embed_tokens.weight", "wte.weight", "tokens_embed.weight")
        self.embedding = next(name for name in self.tensors if name.endswith(names))
        self.head = next(name for name in self.tensors if name.endswith("lm_head.weight"))
        self.default = bool(type(self.model.config)().tie_word_embeddings)
        self.ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def logits(self, embedding: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        self.model.get_input_embeddings().weight.copy_(embedding)
        self.model.get_output_embeddings().weight.copy_(head)
        logits: torch.Tensor = self.model(self.ids).logits
        return logits


@pytest.fixture(scope="module", params=hf.FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(request.param, tmp_path_factory.mktemp(request.param))


def write(base: Base, folder: Path, flag: str, head: str, embedding: str) -> dict[str, torch.Tensor]:
    tensors = dict(base.tensors)
    if head == "absent":
        del tensors[base.head]
    elif head == "equal":
        tensors[base.head] = tensors[base.embedding].clone()
    if embedding == "absent":
        del tensors[base.embedding]
    config = {key: value for key, value in base.config.items() if key != "tie_word_embeddings"}
    if flag.startswith("nested"):
        nested = flag == "nested true"
        config = {"model_type": "wrapper", "tie_word_embeddings": not nested, "text_config": config}
        config["text_config"]["tie_word_embeddings"] = nested
    elif flag != "absent":
        config["tie_word_embeddings"] = flag == "true"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@torch.no_grad()
def check(base: Base, loaded: tuple[Decoder, Any], tensors: dict[str, torch.Tensor], decision: str, from_: str) -> None:
    model, plan = loaded
    assert plan.tie.decision == decision
    assert model.config.tie_word_embeddings is (decision == "tie")
    assert (model.output_projection is None) == (decision == "tie")
    matrices = {"E": tensors.get(base.embedding), "H": tensors.get(base.head)}
    wanted = base.logits(matrices[from_[0]].double(), matrices[from_[1]].double())  # type: ignore[union-attr]
    torch.testing.assert_close(model(base.ids), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("flag", "head", "embedding"), list(itertools.product(FLAGS, HEADS, EMBEDDINGS)))
def test_every_file_and_config_is_decided_as_the_table_says(
    base: Base, tmp_path: Path, flag: str, head: str, embedding: str
) -> None:
    tensors = write(base, tmp_path, flag, head, embedding)
    said = {"true": True, "false": False, "absent": None}.get(flag.removeprefix("nested "))
    decision, from_ = expected(said, base.default, head, embedding)
    if decision == "refuse":
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load(tmp_path)
        assert str(tmp_path) in refusal.value.message and refusal.value.hint
        return
    loaded = checkpoint.load(tmp_path, dtype="float64")
    check(base, loaded, tensors, decision, from_)
    warnings = loaded[1].warnings
    assert any("different matrices" in warning for warning in warnings) == (from_ == "EH" and said is True)
    assert any("serves as both" in warning for warning in warnings) == (from_ == "HH")
    assert any("text_config" in warning for warning in warnings) == flag.startswith("nested")


@pytest.mark.parametrize(
    ("flag", "head", "embedding", "tie", "keep", "decision", "from_"),
    [
        ("false", "absent", "present", "tie", None, "tie", "EE"),
        ("false", "absent", "present", "untie", None, "untie", "EE"),
        ("true", "absent", "present", "untie", None, "untie", "EE"),
        ("false", "different", "absent", "tie", None, "tie", "HH"),
        ("true", "different", "absent", "untie", None, "untie", "HH"),
        ("false", "equal", "present", "tie", None, "tie", "EE"),
        ("true", "equal", "present", "untie", None, "untie", "EE"),
        ("false", "different", "present", "tie", "input", "tie", "EE"),
        ("true", "different", "present", "tie", "output", "tie", "HH"),
    ],
)
def test_a_tie_by_hand_gives_the_logits_of_the_matrices_it_names(
    base: Base, tmp_path: Path, flag: str, head: str, embedding: str, tie: Any, keep: Any, decision: str, from_: str
) -> None:
    tensors = write(base, tmp_path, flag, head, embedding)
    loaded = checkpoint.load(tmp_path, dtype="float64", tie=tie, keep=keep)
    check(base, loaded, tensors, decision, from_)
    if decision == "untie":
        assert loaded[0].output_projection is not None
        assert loaded[0].output_projection.weight.data_ptr() != loaded[0].token_embeddings.weight.data_ptr()


def test_the_decision_says_what_the_file_and_the_config_say() -> None:
    tie: Tie = decide(evidence(head=None, flag=None, tied_in_family=True))
    assert tie.reason == "no output matrix in the file; config does not say, the family's default is tied"
