"""The decoder's contracts, and the worked numbers of embedding and output projection."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F

import llmcli
from llmcli import checkpoint, families, load_model
from llmcli.cache import new_cache
from llmcli.config import ModelConfig
from llmcli.errors import ConfigError, LlmcliError, UsageError
from llmcli.layers import TokenEmbeddings
from llmcli.model import Decoder, build

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
LLAMA = ModelConfig(family="llama", vocab_size=32, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2)


def embeddings(rows: list[list[float]]) -> TokenEmbeddings:
    made = TokenEmbeddings(len(rows), len(rows[0]))
    with torch.no_grad():
        made.weight.copy_(torch.tensor(rows))
    return made


def test_lookup_gradient_and_scores_of_a_matrix_of_three_rows() -> None:
    e = embeddings([[1, 0], [0, 1], [1, 1]])
    ids = torch.tensor([0, 2, 0])
    rows = e(ids)
    assert rows.tolist() == [[1, 0], [1, 1], [1, 0]]
    assert torch.equal(F.one_hot(ids, 3).float() @ e.weight, rows)
    rows.sum().backward()
    assert e.weight.grad is not None
    assert e.weight.grad.tolist() == [[2, 2], [0, 0], [1, 1]]
    assert e.scores(torch.tensor([2.0, 1.0])).tolist() == [2, 1, 3]


def test_softmax_gradient_and_one_step_on_the_output_matrix() -> None:
    e = embeddings([[0.1, 0.2], [0.3, -0.1], [0.0, 0.5]])
    h, target = torch.tensor([1.0, 2.0]), torch.tensor(2)
    logits = e.scores(h)
    torch.testing.assert_close(logits, torch.tensor([0.5, 0.1, 1.0]))
    torch.testing.assert_close(logits.softmax(-1), torch.tensor([0.301, 0.202, 0.497]), atol=6e-4, rtol=0)
    F.cross_entropy(logits, target).backward()
    want = torch.tensor([[0.301, 0.603], [0.202, 0.404], [-0.503, -1.007]])
    assert e.weight.grad is not None
    torch.testing.assert_close(e.weight.grad, want, atol=6e-4, rtol=0)
    with torch.no_grad():
        e.weight -= 0.1 * e.weight.grad
    assert e.scores(h)[2].item() == pytest.approx(1.252, abs=6e-4)


def test_dot_products_and_cosines_of_three_vectors() -> None:
    a, b, c = torch.tensor([1.0, 2, 0]), torch.tensor([1, 1.5, 0.5]), torch.tensor([-1.0, 0, 2])
    assert [float(x @ y) for x, y in ((a, b), (a, c), (b, c))] == [4, -1, 0]
    cosines = [F.cosine_similarity(x, y, 0).item() for x, y in ((a, b), (a, c), (b, c))]
    assert cosines == pytest.approx([0.956, -0.2, 0], abs=5e-4)


def gradient(ids: list[list[int]], tied: bool, path: str) -> torch.Tensor:
    """The gradient that E gets in a model without layers, by the input path, the output path or both."""
    config = msgspec.structs.replace(LLAMA, num_layers=0, tie_word_embeddings=tied)
    model = build(config, seed=1)
    tokens = torch.tensor(ids)
    hidden = model.hidden(tokens)
    e = model.token_embeddings.weight
    matrix = e if model.output_projection is None else model.output_projection.weight
    if path == "input":
        matrix = matrix.detach()
    if path == "output":
        hidden = hidden.detach()
    F.linear(hidden, matrix).sin().sum().backward()
    assert e.grad is not None
    return e.grad


def test_input_and_output_gradients_of_a_tied_matrix_add_up() -> None:
    ids = [[5, 2, 5], [2, 7, 5]]
    both, by_input, by_output = (gradient(ids, True, path) for path in ("both", "input", "output"))
    assert by_input.abs().sum() > 0 < by_output.abs().sum()
    torch.testing.assert_close(both, by_input + by_output)


def test_the_input_path_reaches_the_rows_of_the_text_alone_as_often_as_they_stand_there() -> None:
    e = TokenEmbeddings(32, 16)
    torch.nn.init.normal_(e.weight)
    e(torch.tensor([[5, 2, 5], [2, 7, 5]])).sum().backward()
    assert e.weight.grad is not None
    touched = e.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [2, 5, 7]
    assert e.weight.grad[5].tolist() == [3.0] * 16
    assert e.weight.grad[7].tolist() == [1.0] * 16


def test_adamw_moves_a_row_without_gradient() -> None:
    e = TokenEmbeddings(4, 2)
    torch.nn.init.ones_(e.weight)
    optimizer = torch.optim.AdamW([e.weight], lr=0.1, weight_decay=0.1)
    e(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert e.weight[3].tolist() == pytest.approx([0.99, 0.99])


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama", "gemma"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_without_layers_scores_its_embeddings_and_predicts_its_input(family: str, scaled: bool) -> None:
    config = ModelConfig(
        family=family,
        vocab_size=50,
        embed_dim=64,
        num_layers=0,
        num_heads=4,
        tie_word_embeddings=True,
        scale_embeddings=scaled,
    )
    model = build(config).eval()
    ids = torch.arange(50)[None]
    e = model.token_embeddings.weight
    torch.testing.assert_close(model(ids)[0], (8 if scaled else 1) * e @ e.T)
    assert torch.equal(model(ids).argmax(-1), ids)
    assert [name for name, _ in model.named_parameters()] == ["token_embeddings.weight"]
    assert torch.equal(model(ids, new_cache(config)), model(ids))


@pytest.mark.parametrize("family", families.names())
def test_fresh_weights_are_normal_biases_zero_and_norms_one(family: str) -> None:
    model = build(ModelConfig(family=family, vocab_size=300, embed_dim=64, num_layers=2, num_heads=4))
    plus_one = families.get(family).norm == "rms_plus_one"
    for name, value in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert torch.all(value == (0 if plus_one else 1)), name
        elif name.endswith("bias"):
            assert torch.all(value == 0), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(value.mean().item()) < 0.004, name


def test_one_seed_gives_one_model_and_another_another() -> None:
    first, again, other = (build(LLAMA, seed).token_embeddings.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dropout_acts_on_embeddings_attention_and_residual_in_training_and_never_in_eval() -> None:
    config = msgspec.structs.replace(LLAMA, dropout=0.5)
    model, ids = build(config), torch.arange(20)[None]
    kept = build(LLAMA)
    assert torch.equal(model.eval()(ids), kept.eval()(ids))
    model.train()
    torch.manual_seed(0)
    zeros = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: zeros.append((out == 0).float().mean().item()))
        for module in model.modules()
        if isinstance(module, torch.nn.Dropout)
    ]
    first, second = model(ids), model(ids)
    assert not torch.equal(first, second)
    assert len(hooks) == 1 + config.num_layers  # embeddings, and one a block for both of its sums
    assert len(zeros) == 2 * (1 + 2 * config.num_layers)
    assert all(0.35 < share < 0.65 for share in zeros)
    for block in model.blocks:  # with every other dropout off, attention's alone still makes two passes differ
        block.dropout.p = 0.0
    model.dropout.p = 0.0
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_is_no_tensor_and_stays_so_when_moved_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    model = build(msgspec.structs.replace(LLAMA, tie_word_embeddings=tied)).to(torch.float64)
    for number in range(2):
        checkpoint.save(model, tmp_path / f"saved{number}")
        model = load_model(tmp_path / f"saved{number}")
        names = [name for name, _ in model.named_parameters()]
        assert ("output_projection.weight" in names) is not tied
        assert (model.output_projection is None) is tied
        e = model.token_embeddings.weight
        before = model(torch.tensor([[1, 2]])).detach()
        with torch.no_grad():
            e += 0.1
        assert e.dtype == torch.float64
        assert not torch.equal(model(torch.tensor([[1, 2]])), before)


def test_one_sgd_step_on_a_loaded_tied_model_moves_both_uses(tmp_path: Path) -> None:
    checkpoint.save(build(msgspec.structs.replace(LLAMA, tie_word_embeddings=True)), tmp_path / "saved")
    model = load_model(tmp_path / "saved")
    ids = torch.tensor([[1, 2, 3]])
    row, hidden = model.token_embeddings(ids).detach(), model.hidden(ids).detach()
    scores = model.scores(hidden).detach()
    model(ids).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.token_embeddings(ids), row)
    assert not torch.equal(model.scores(hidden), scores)


@pytest.mark.parametrize("wrong", [32, 99, -1])
def test_an_id_outside_the_vocabulary_is_refused_with_its_value(wrong: int) -> None:
    with pytest.raises(UsageError, match=rf"token id {wrong} .* vocab_size is 32"):
        build(LLAMA)(torch.tensor([[1, wrong]]))


@pytest.mark.parametrize(
    "ids", [[1, 2], torch.tensor([1, 2]), torch.tensor([[0.5]]), torch.zeros(1, 2, dtype=torch.uint8)]
)
def test_what_is_no_batch_of_ids_is_refused(ids: object) -> None:
    with pytest.raises(UsageError, match=r"not whole numbers \(B, T\)"):
        build(LLAMA)(ids)


def test_a_name_that_is_no_name_is_refused_by_the_api() -> None:
    for call in (load_model, llmcli.load_tokenizer, llmcli.read_config, llmcli.count):
        for target in (None, 3, ""):
            with pytest.raises(LlmcliError, match="not a name"):
                call(target)  # type: ignore[arg-type]


def test_learned_positions_end_with_a_message_cached_or_not() -> None:
    config = ModelConfig(family="gpt2", vocab_size=8, embed_dim=8, num_layers=1, num_heads=2, max_position_embeddings=4)
    model = build(config).eval()
    cache = new_cache(config)
    model(torch.zeros(1, 4, dtype=torch.long), cache)
    with pytest.raises(UsageError, match="position 5 is past the last one: the model has 4"):
        model(torch.zeros(1, 1, dtype=torch.long), cache)
    with pytest.raises(UsageError, match="4 learned positions"):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 does not divide by num_kv_heads 3"),
        ({"embed_dim": 18}, "embed_dim 18 does not divide by num_heads 4"),
        ({"head_size": 5}, "head_size 5 is odd"),
        ({"window_size": 8}, "window_size = 8: the family llama has no such thing"),
        ({"num_experts": 4}, "num_experts = 4: the family llama has no such thing"),
        ({"tie_word_embeddings": True, "head_bias": True}, "head_bias = true with tie_word_embeddings = true"),
        ({"family": "gpt2", "rope_theta": 1e4, "num_kv_heads": None}, "rope_theta = 10000.0: the family gpt2"),
        ({"family": "lama"}, "unknown family 'lama'\nDid you mean 'llama'?"),
        ({"family": "mixtral", "num_experts": 2, "top_k_experts": 3}, "top_k_experts 3 is more than num_experts 2"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        families.complete(msgspec.structs.replace(LLAMA, **changes))
    assert message.split("\n")[0] in str(caught.value)
    assert message.split("\n")[-1] in str(caught.value)


@pytest.mark.parametrize("family", families.names())
def test_completing_a_config_twice_changes_nothing(family: str) -> None:
    for tied in (True, False):
        once = families.complete(
            ModelConfig(family=family, vocab_size=9, embed_dim=24, num_layers=1, num_heads=4, tie_word_embeddings=tied)
        )
        assert families.complete(once) == once


@pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not beside this checkout")
def test_a_really_trained_model_gives_its_published_numbers() -> None:
    expected = json.loads((STORIES / "expected.json").read_text())
    model = load_model(STORIES)
    assert sum(value.numel() for value in model.parameters()) == expected["parameters"] == 260_032
    assert model.output_projection is None
    ids = torch.tensor([expected["ids"]])
    with torch.no_grad():
        logits = model(ids)
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert loss == pytest.approx(expected["loss"], abs=1e-5)
    assert logits[0, -1, :8].tolist() == pytest.approx(expected["last_logits_first8"], abs=1e-4)


def test_the_spread_of_a_fresh_gemma_row_before_and_after_its_scale() -> None:
    embeddings = TokenEmbeddings(2000, 2048, scaled=True)
    torch.nn.init.normal_(embeddings.weight, 0, 0.02, generator=torch.Generator().manual_seed(0))
    rows = embeddings.weight
    scaled = embeddings(torch.arange(2000))
    assert rows.norm(dim=-1).mean().item() == pytest.approx(0.905, abs=2e-3)
    assert rows.pow(2).mean().sqrt().item() == pytest.approx(0.02, abs=1e-4)
    assert scaled.pow(2).mean().sqrt().item() == pytest.approx(0.905, abs=2e-3)
    assert scaled.norm(dim=-1).mean().item() == pytest.approx(0.905 * math.sqrt(2048), abs=0.1)


def test_decoder_has_no_buffers_to_lose() -> None:
    with torch.device("meta"):
        model = Decoder(LLAMA)
    assert not list(model.buffers())
    assert model.rotary["global"].frequencies.device.type == "cpu"
