"""The lab's page in a real browser: what it shows is what numpy says, by hand, by keyboard, on any screen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import labs
import numpy as np
import pytest
import torch
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from llmcli import cli, server
from llmcli.generate import Sampling
from llmcli.lab import Lab
from llmcli.page import as_html
from llmcli.trace import Pass

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# Boxes of the map that stand on another, or out of the picture.
OVERLAPPING = """all => {
  const boxes = all.map(one => [one.dataset.stage, one.querySelector('rect.box').getBoundingClientRect()]);
  const svg = document.querySelector('#canvas svg').getBoundingClientRect();
  const out = p => p.left < svg.left || p.right > svg.right + 0.5 || p.bottom > svg.bottom;
  const meet = (p, q) => p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom;
  return boxes.flatMap(([a, p], n) => [
    ...(out(p) ? [a] : []),
    ...boxes.slice(n + 1).filter(([, q]) => meet(p, q)).map(([b]) => `${a} ${b}`)]);
}"""
# Lines of the map that run over a box which they neither leave nor reach.
CROSSING = """all => {
  const nodes = [...document.querySelectorAll('#canvas .node:not(.matrix)')];
  const boxes = nodes.map(one => [one.dataset.stage, one.querySelector('rect.box').getBBox()]);
  const inside = (p, q) => p.x > q.x + 1 && p.x < q.x + q.width - 1 && p.y > q.y + 1 && p.y < q.y + q.height - 1;
  return all.flatMap(edge => boxes.filter(([name, box]) => {
    if (name === edge.dataset.from || name === edge.dataset.to) return false;
    for (let at = 0; at <= edge.getTotalLength(); at += 3) if (inside(edge.getPointAtLength(at), box)) return true;
    return false;
  }).map(([name]) => `${edge.dataset.from} to ${edge.dataset.to} over ${name}`));
}"""
# Nodes of the map whose texts run into each other.
CROSSED = """all => all.flatMap(node => {
  const texts = [...node.querySelectorAll('text')].map(one => one.getBoundingClientRect());
  const meet = (p, q) => p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2;
  return texts.flatMap((a, n) => texts.slice(n + 1).filter(b => meet(a, b)).map(() => node.dataset.key));
})"""
# Texts whose contrast with what lies under them is below 4.5 (WCAG 2, level AA).
CONTRAST = """() => {
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const parse = (text) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = parse(getComputedStyle(e).backgroundColor);
      if (found[3] > 250) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    if (element.closest('svg') && element.tagName !== 'text') continue;
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!element.checkVisibility() || element.matches(':disabled, script, style, option, .in')) continue;
    const style = getComputedStyle(element), drawn = element.tagName === 'text';
    const box = drawn && element.parentElement.querySelector('rect.box');
    const under = box ? parse(getComputedStyle(box).fill) : ground(element);
    const found = ratio(parse(drawn ? style.fill : style.color), under);
    if (found < 4.5) faint.push(`${element.tagName} "${element.textContent.trim().slice(0, 30)}" ${found.toFixed(2)}`);
  }
  return faint;
}"""
# Counts the lights that run down the stream.
WATCH = """
window.moved = 0;
new MutationObserver(all => all.forEach(one => one.addedNodes.forEach(node => {
  if (node.classList && node.classList.contains('flow')) window.moved++;
}))).observe(document.body, { childList: true, subtree: true })
"""
# One of each question to the page's source of data, whichever it is.
QUESTIONS = """async () => {
  const free = { temperature: 0.8 };
  return JSON.parse(JSON.stringify([
    await source.stage(0, "blocks.1.keys"),
    await source.values(0, "blocks.1.weights", [[1, 3], [1, 4, 2], [0, 3]]),
    await source.values(0, "token_embeddings.weight", [[300, 306], [3, 30, 9]]),
    await source.values(0, "ids", [[2, 4]]),
    await source.values(0, "blocks.0.gate", [[0, 4, 3], [0, 32, 7]], true),
    await source.sketches(0, ["embed", "blocks.2.weights"]),
    await source.top(0, 3, free),
    await source.product(0, 2, (await source.top(0, 2, free))[1].token.id),
    await source.lens(0, 1, 3),
    await source.nearest(state.passes[0].tokens[3].id),
  ]));
}"""
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 800}
TIED = "stories" if labs.STORIES.is_dir() else "tied"

expect.set_options(timeout=15_000)
pytestmark = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="no chromium here")


@pytest.fixture(scope="module")
def labs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lab]:
    made: dict[str, Lab] = {}

    def one(kind: str) -> Lab:
        if kind not in made:
            folder = labs.STORIES if kind == "stories" else labs.make(kind, tmp_path_factory.mktemp("page") / kind)
            made[kind] = labs.open_lab(folder)
        return made[kind]

    return one


@pytest.fixture(scope="module")
def urls(labs_of: Callable[[str], Lab]) -> Iterator[Callable[[str], str]]:
    running: dict[str, Any] = {}

    def url(kind: str) -> str:
        if kind not in running:
            running[kind] = labs.serving(labs_of(kind))
            running[kind].url = running[kind].__enter__()
        return str(running[kind].url)

    yield url
    for one in running.values():
        one.__exit__(None, None, None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport=WIDE,
        )
        context.set_default_timeout(15_000)
        yield context
        context.close()


@pytest.fixture
def complaints() -> list[str]:
    """What went wrong in a test's page."""
    return []


@pytest.fixture
def tab(browser: BrowserContext, complaints: list[str]) -> Iterator[Page]:
    """A fresh page; when the test is over, nothing may have failed in it or gone beyond this machine."""
    one = browser.new_page()
    one.set_viewport_size(WIDE)
    one.emulate_media(color_scheme="light", reduced_motion="no-preference")
    one.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: complaints.append(str(error)))
    one.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    asked: list[str] = []
    one.on("request", lambda request: asked.append(request.url))
    yield one
    one.close()
    assert complaints == []
    for url in asked:
        parts = urlsplit(url)
        assert parts.scheme in ("data", "file") or server.is_loopback(parts.hostname or ""), url


def load(tab: Page, url: str, stage: str = "embed") -> None:
    tab.goto(f"{url}#{stage}")
    wait(tab, stage, 0)


def wait(tab: Page, stage: str, number: int) -> None:
    """Until the inspector shows a stage of a pass."""
    tab.locator(f'#inspector[data-stage="{stage}"][data-pass="{number}"]').wait_for(state="attached")


def choose(tab: Page, stage: str, number: int = 0) -> None:
    """Select a stage on the map."""
    tab.locator(f'#canvas [data-stage="{stage}"]').click()
    wait(tab, stage, number)


def drawn(tab: Page, number: int) -> None:
    """Until the map of a pass is drawn whole."""
    tab.locator(f'#canvas svg[data-pass="{number}"]').wait_for()


def fact(tab: Page, name: str) -> str:
    return str(tab.locator(f'#numbers [data-number="{name}"] dd').inner_text())


def window(tab: Page) -> np.ndarray:
    """The values that the table shows, as exactly as the page has them."""
    rows = tab.locator("#values tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => Number(cell.dataset.value)))"
    )
    return np.float32(rows)


def recorded(one: Lab, number: int) -> Pass:
    """A pass of the text that the page began last."""
    return one.recorded(next(reversed(one._texts)), number)


def reads_embed_and_logits(tab: Page, of: Callable[[int], Pass]) -> None:
    """The reading tests that page and recording share; the prompt's pass is shown."""
    for stage in ("embed", "logits"):
        choose(tab, stage)
        want = of(0).tensors[stage].numpy()
        assert fact(tab, "shape") == "×".join(map(str, want.shape))
        for name, value in (("mean", want.mean()), ("min", want.min()), ("max", want.max())):
            assert float(fact(tab, name)) == pytest.approx(float(value), rel=6e-4, abs=1e-4)
        assert float(fact(tab, "rms")) == pytest.approx(float(np.sqrt(np.square(want).mean())), rel=6e-4)
        first_row, first_column = (
            int(tab.locator(f'[data-focus="first {axis}"]').input_value())
            if tab.locator(f'[data-focus="first {axis}"]').count()
            else 0
            for axis in ("positions", "dimensions" if stage == "embed" else "tokens")
        )
        shown = window(tab)
        rows, columns = shown.shape
        assert rows >= min(5, len(want))
        assert columns >= 4
        np.testing.assert_array_equal(shown, want[first_row : first_row + rows, first_column : first_column + columns])
    assert int(tab.locator("#candidates tbody tr").first.get_attribute("data-token") or -1) == want[-1].argmax()


@pytest.mark.parametrize("kind", [TIED, "untied", "learned", "capped", "biased"])
def test_embed_and_logits_read_as_in_numpy(kind: str, tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls(kind))
    reads_embed_and_logits(tab, lambda number: recorded(labs_of(kind), number))


@pytest.mark.parametrize("kind", [TIED, "untied"])
def test_three_tokens_are_three_passes_of_one_position_whose_context_grows_in_k_and_v(
    kind: str, tab: Page, urls: Any, labs_of: Any
) -> None:
    load(tab, urls(kind))
    tab.fill("#prompt", "Once upon a time")
    tab.click("#run")
    expect(tab.locator("#steps button")).to_have_count(1)
    tab.locator("#canvas [data-block='0']").click()
    tab.fill("#temperature", "0")
    prompt = int(fact(tab, "shape").split("×")[0])
    text = ""
    for number in range(1, 4):
        tab.click("#next")
        wait(tab, "embed", number)
        want = recorded(labs_of(kind), number)
        assert fact(tab, "shape").split("×")[0] == "1"
        np.testing.assert_array_equal(window(tab)[0], want.tensors["embed"][0, : window(tab).shape[1]])
        drawn(tab, number)
        seen = prompt + number if kind == TIED else min(prompt + number, 6)
        for part in ("keys", "values"):
            box = tab.locator(f'#canvas [data-stage="blocks.0.{part}"]')
            expect(box).to_contain_text(f"×{seen}×")
            expect(box.locator("[data-cached]")).to_have_text(f"{seen - 1} cached + 1")
        text += labs_of(kind).token(want.ids[0]).text
    choose(tab, "blocks.0.keys", 3)
    assert fact(tab, "shape") == "×".join(map(str, want.tensors["blocks.0.keys"].shape))
    assert window(tab).shape[0] == seen
    assert "".join(tab.locator("#steps button").all_inner_texts()[1:]).replace("\n", "").endswith(text[-1])

    tab.locator("#steps button").first.click()  # back to the prompt's pass
    wait(tab, "blocks.0.keys", 0)
    assert fact(tab, "shape").split("×")[1] == str(prompt)
    drawn(tab, 0)
    assert tab.locator("#canvas [data-cached]").count() == 0
    tab.locator("#steps button").first.press("ArrowRight")
    wait(tab, "blocks.0.keys", 1)


def test_many_tokens_stop_when_told_to(tab: Page, urls: Any) -> None:
    load(tab, urls("tied"))
    tab.fill("#count", "3")
    tab.click("#many")
    expect(tab.locator("#steps button")).to_have_count(4)
    tab.fill("#count", "400")
    tab.click("#many")
    expect(tab.locator("#many")).to_have_text("Stop")
    expect(tab.locator("#steps button").nth(5)).to_be_visible()
    tab.click("#many")
    expect(tab.locator("#many")).to_have_text("tokens")
    count = tab.locator("#steps button").count()
    assert count < 400
    tab.wait_for_timeout(300)
    assert tab.locator("#steps button").count() == count


def test_a_tied_model_shows_one_matrix_with_two_uses_and_an_untied_one_two(tab: Page, urls: Any) -> None:
    load(tab, urls(TIED))
    assert tab.locator("#canvas .matrix").count() == 1
    assert sorted(use.get_attribute("data-use") or "" for use in tab.locator("#canvas .use.tied").all()) == [
        "embed",
        "logits",
    ]
    expect(tab.locator("#facts .tied")).to_be_visible()
    tab.locator("#canvas .matrix").click()
    wait(tab, "token_embeddings.weight", 0)
    expect(tab.locator("#two-uses")).to_contain_text("One matrix, two uses")
    load(tab, urls("untied"))
    tab.reload()
    wait(tab, "embed", 0)
    assert tab.locator("#canvas .matrix").count() == 2
    assert tab.locator("#canvas .use.tied").count() == tab.locator("#facts .tied").count() == 0
    choose(tab, "output_projection.weight")
    assert tab.locator("#two-uses").count() == 0


@pytest.mark.parametrize("kind", list(labs.KINDS))
def test_the_map_has_the_stages_of_the_model_and_no_others(kind: str, tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls(kind))
    names = {node.name for node in labs_of(kind).info().nodes}
    boxes = tab.locator("#canvas .node:not(.matrix)")
    outside = {name for name in names if not name.startswith("blocks.")}
    assert set(boxes.evaluate_all("all => all.map(one => one.dataset.stage)")) == outside
    tab.locator("#canvas [data-block='1']").click()
    expect(tab.locator("#canvas [data-block='1']")).to_have_attribute("aria-expanded", "true")
    found = set(boxes.evaluate_all("all => all.map(one => one.dataset.stage)"))
    assert found == outside | {name for name in names if name.startswith("blocks.1.")}
    tab.click("#unfold")
    expect(boxes).to_have_count(len(names))
    # Every box stands apart from every other, and inside the picture.
    assert boxes.evaluate_all(OVERLAPPING) == []
    assert tab.locator("#canvas .edge").evaluate_all(CROSSING) == []
    edges = tab.locator("#canvas .edge[data-to]").evaluate_all(
        "all => all.map(one => [one.dataset.from, one.dataset.to])"
    )
    inputs = {(source, node.name) for node in labs_of(kind).info().nodes for source in node.inputs}
    assert {(a, b) for a, b in edges} <= inputs
    for node in labs_of(kind).info().nodes:
        if node.name.endswith((".weights", ".mixed", ".hidden", ".q", ".attention")):
            assert {a for a, b in edges if b == node.name} == set(node.inputs), node
    tab.click("#foldall")
    expect(boxes).to_have_count(len(outside))


def test_the_window_of_values_moves_and_says_what_it_cuts(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls("tied"), "logits")
    want = recorded(labs_of("tied"), 0).tensors["logits"].numpy()
    columns = window(tab).shape[1]
    cut, total = tab.locator("#cut"), want.size
    assert cut.inner_text().startswith(f"{len(want) * columns} of {total:,} values")
    first = tab.locator('[data-focus="first tokens"]')
    first.fill("100")
    first.press("Enter")
    expect(first).to_have_value("100")
    expect(tab.locator("#values thead th").nth(1)).to_contain_text("100")
    np.testing.assert_array_equal(window(tab), want[:, 100 : 100 + columns])
    tab.locator('[data-focus="later tokens"]').click()
    expect(first).to_have_value(str(100 + columns))
    np.testing.assert_array_equal(window(tab), want[:, 100 + columns : 100 + 2 * columns])
    box = tab.locator("#overview")
    box.focus()
    box.press("Shift+ArrowRight")
    expect(first).to_have_value(str(100 + 2 * columns))
    area = box.bounding_box()
    assert area is not None
    tab.mouse.move(area["x"] + 5, area["y"] + 5)
    tab.mouse.down()
    tab.mouse.move(area["x"] + area["width"] - 2, area["y"] + 5)
    tab.mouse.up()
    expect(first).to_have_value(str(want.shape[1] - columns))
    np.testing.assert_array_equal(window(tab), want[:, -columns:])
    expect(tab.locator('[data-focus="later tokens"]')).to_be_disabled()


def test_attention_has_every_head_with_tokens_on_its_axes(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls("tied"), "blocks.1.weights")
    want = recorded(labs_of("tied"), 0).tensors["blocks.1.weights"].numpy()
    assert tab.locator("[data-head]").count() == len(want) == 4
    tab.locator("[data-head='2']").click()
    expect(tab.locator("[data-head='2']")).to_have_attribute("aria-pressed", "true")
    np.testing.assert_array_equal(window(tab), want[2])
    words = [labs_of("tied").token(id).text for id in recorded(labs_of("tied"), 0).ids]
    labels = tab.locator(".grid > text:not(.in)").all_text_contents()
    assert labels == words * 2
    grid, readout = tab.locator(".grid"), tab.locator(".readout")
    grid.focus()
    for _ in range(20):
        grid.press("ArrowLeft")
    grid.press("ArrowUp")
    row = len(want[2]) - 2
    expect(readout).to_contain_text(f"Position {row} {words[row]} takes {100 * want[2, row, 0]:.1f} % from position 0")
    area = grid.locator("image").bounding_box()
    assert area is not None
    tab.mouse.move(area["x"] + 1, area["y"] + 1)
    expect(readout).to_contain_text(f"Position 0 {words[0]} takes 100.0 % from position 0 {words[0]}")


def test_a_logit_is_taken_apart_and_when_tied_said_to_be_a_row_of_e(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls(TIED), "logits")
    made = recorded(labs_of(TIED), 0)
    third = tab.locator("#candidates tbody tr").nth(2)
    token = int(third.get_attribute("data-token") or -1)
    third.press("Enter")
    expect(tab.locator("#product .same-matrix")).to_contain_text(f"E[{token}]")
    logit = float(made.tensors["logits"][-1, token])
    cells = tab.locator("#candidates tbody tr").nth(2).locator("td").all_inner_texts()
    assert cells[5] == cells[6] == f"{logit:.3f}"
    expect(tab.locator("#product .sumline b")).to_have_text(f"{logit:.4g}")
    probability = float(made.tensors["probabilities"][-1, token])
    assert cells[4] in (f"{100 * probability:.1f} %", "<0.1 %")
    expect(tab.locator("#values thead")).to_contain_text(str(token))  # the window of values looks at it
    load(tab, urls("untied"), "logits")
    tab.reload()
    wait(tab, "logits", 0)
    assert tab.locator("#product .same-matrix").count() == 0
    expect(tab.locator("#product")).to_contain_text("W[")


def test_nearest_tokens_of_a_row_are_shown(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls("tied"))
    tab.locator("[data-position='1']").click()
    expect(tab.locator("[data-position='1']")).to_have_attribute("aria-pressed", "true")
    one = labs_of("tied")
    want = [hit.token.text for hit in one.nearest(recorded(one, 0).ids[1], 10)]
    expect(tab.locator("#nearest tbody td:first-child")).to_have_text(want)


def test_experts_show_which_token_went_where(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls("untied"), "blocks.1.experts")
    made = recorded(labs_of("untied"), 0)
    want = [sorted(row) for row in made.tensors["blocks.1.experts"].tolist()]
    rows = tab.locator("#experts tbody tr").all()
    found = [
        [int(cell.get_attribute("data-expert") or -1) for cell in row.locator("[data-went]").all()] for row in rows
    ]
    assert found == want
    share = float(made.tensors["blocks.1.expert_weights"][0, 0])
    expect(rows[0].locator("[data-went='0']")).to_have_text(f"{float(f'{share:.3g}'):g}")


def test_the_logit_lens_shows_every_block_and_ends_with_the_output(tab: Page, urls: Any, labs_of: Any) -> None:
    load(tab, urls("tied"))
    tab.click("#lens")
    tab.locator("#lens-table").wait_for()
    one = labs_of("tied")
    best = recorded(one, 0).tensors["logits"].argmax(-1).tolist()
    last = tab.locator("#lens-table tbody tr").last.locator("td").all_inner_texts()
    assert last == [one.token(id).text for id in best][-len(last) :]
    assert tab.locator("#lens-table tbody tr").count() == 4
    tab.locator("#lens-table tbody tr").nth(1).locator("td button").first.click()
    expect(tab.locator("#inspector h3")).to_have_text("Block 0, position 0")


def test_everything_can_be_reached_by_keyboard(tab: Page, urls: Any) -> None:
    load(tab, urls("tied"))
    tab.locator('#canvas [data-stage="embed"]').focus()
    tab.keyboard.press("ArrowDown")
    wait(tab, "residual", 0)
    tab.keyboard.press("ArrowDown")
    expect(tab.locator("#canvas [data-block='0']")).to_be_focused()
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("#canvas [data-block='0']")).to_have_attribute("aria-expanded", "true")
    expect(tab.locator("#canvas [data-block='0']")).to_be_focused()
    tab.keyboard.press("ArrowDown")
    wait(tab, "blocks.0.attention_norm", 0)
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("Enter")
    expect(tab.locator("#canvas [data-block='0']")).to_have_attribute("aria-expanded", "false")
    tab.keyboard.press("End")
    tab.keyboard.press("Home")
    wait(tab, "ids", 0)
    assert tab.locator("#canvas [tabindex='0']").count() == 1
    tab.locator("#prompt").focus()
    tab.keyboard.press("Control+A")
    tab.keyboard.type("a cat")
    tab.keyboard.press("Enter")
    expect(tab.locator("#steps button")).to_have_text(["prompta cat"])


def test_a_narrow_screen_has_one_column_and_nothing_sticks_out(tab: Page, urls: Any) -> None:
    tab.set_viewport_size(NARROW)
    load(tab, urls(TIED))
    expect(tab.locator("#inspector")).to_be_hidden()
    tab.click("#unfold")
    drawn(tab, 0)
    sticking_out = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert tab.evaluate(sticking_out) is False
    assert tab.locator("#canvas .node").evaluate_all(CROSSED) == []
    choose(tab, "blocks.0.weights")
    expect(tab.locator("#map")).to_be_hidden()
    expect(tab.locator(".grid")).to_be_visible()
    assert tab.evaluate(sticking_out) is False
    tab.click("#tab-map")
    expect(tab.locator("#map")).to_be_visible()
    choose(tab, "logits")
    assert tab.evaluate(sticking_out) is False
    assert window(tab).shape[1] >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(scheme: Any, tab: Page, urls: Any) -> None:
    tab.emulate_media(color_scheme=scheme)
    load(tab, urls("untied"))
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(16, 19, 23)") == (scheme == "dark")
    tab.fill("#temperature", "0")
    tab.click("#next")
    wait(tab, "embed", 1)
    tab.locator("#canvas [data-block='0']").click()
    for stage in ("blocks.0.keys", "blocks.0.weights", "blocks.0.experts", "logits"):
        choose(tab, stage, 1)
        assert tab.evaluate(CONTRAST) == [], stage
    tab.click("#lens")
    tab.locator("#lens-table").wait_for()
    assert tab.evaluate(CONTRAST) == []
    load(tab, urls("tied"), "logits")
    assert tab.evaluate(CONTRAST) == []
    tab.locator("#canvas .matrix").click()
    wait(tab, "token_embeddings.weight", 0)
    assert tab.evaluate(CONTRAST) == []


def test_the_theme_can_be_chosen_and_colours_follow(tab: Page, urls: Any) -> None:
    load(tab, urls("tied"))
    cell = "getComputedStyle(document.querySelector('#values td')).backgroundColor"
    before = tab.evaluate(cell)
    tab.click("#theme")
    expect(tab.locator("#theme")).to_have_text("Theme: dark")
    expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
    expect(tab.locator("#values td").first).not_to_have_css("background-color", before)
    tab.click("#theme")
    expect(tab.locator("#theme")).to_have_text("Theme: auto")
    tab.emulate_media(color_scheme="dark")
    expect(tab.locator("#values td").first).not_to_have_css("background-color", before)


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_motion_is_left_out_where_it_is_unwanted(motion: Any, tab: Page, urls: Any) -> None:
    tab.emulate_media(reduced_motion=motion)
    load(tab, urls("tied"))
    tab.evaluate(WATCH)
    tab.click("#next")
    wait(tab, "embed", 1)
    drawn(tab, 1)
    expect(tab.locator("#next")).to_be_enabled()
    assert (tab.evaluate("window.moved") > 0) == (motion == "no-preference")


def test_refusals_are_shown_and_the_page_goes_on(tab: Page, urls: Any, complaints: list[str]) -> None:
    load(tab, urls("tied"))
    tab.fill("#prompt", "a b c d " * 400)
    tab.click("#run")
    expect(tab.locator("#status")).to_contain_text("tokens, the most is 512")
    expect(tab.locator("#status")).to_have_class("status bad")
    tab.fill("#prompt", "a cat")
    tab.click("#run")
    expect(tab.locator("#steps button")).to_have_text(["prompta cat"])
    expect(tab.locator("#status")).to_have_class("status")
    assert len(complaints) == 1
    assert "status of 422" in complaints.pop()  # the browser's own note of the refusal


def test_a_server_that_is_gone_is_said_to_be(tab: Page, labs_of: Any, complaints: list[str]) -> None:
    with labs.serving(labs_of("tied")) as url:
        load(tab, url)
    tab.click("#next")
    expect(tab.locator("#status")).to_contain_text("Is llmcli lab still running?")
    assert len(complaints) == 2
    complaints.clear()  # the browser's own notes that nobody answered


def test_a_damaged_model_shows_where_its_values_end_to_be_numbers(
    tab: Page, tmp_path: Path, complaints: list[str]
) -> None:
    one = labs.open_lab(labs.make("tied", tmp_path / "damaged"))
    with torch.no_grad():
        one.model.get_parameter("blocks.1.feed_forward.down.weight")[0, 0] = torch.nan
    with labs.serving(one) as url:
        load(tab, url, "blocks.0.residual")
        assert not np.isnan(window(tab)).any()
        tab.click("#unfold")
        for stage in ("blocks.1.feed_forward", "blocks.1.residual", "blocks.2.weights", "logits", "probabilities"):
            choose(tab, stage)
            assert fact(tab, "max") == "NaN"
            assert "NaN" in tab.locator("#values td").all_inner_texts()
        tab.click("#lens")
        tab.locator("#lens-table").wait_for()
        assert complaints == []
        tab.click("#next")
        expect(tab.locator("#status")).to_contain_text("model.layers.1.mlp.down_proj.weight of ")
        assert "status of 422" in complaints.pop()
        file = tmp_path / "damaged.html"
        file.write_text(as_html(one, next(reversed(one._texts)))[0], "utf-8")
    load(tab, file.as_uri(), "logits")
    assert set(tab.locator("#values td").all_inner_texts()) == {"NaN"}


def test_a_long_prompt_is_fetched_by_slices(tab: Page, urls: Any) -> None:
    load(tab, urls("tied"))
    sizes: list[int] = []
    tab.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))
    tab.fill("#prompt", "the cat saw the dog and " * 80)
    tab.click("#run")
    expect(tab.locator("#status")).to_contain_text("positions 0-481")
    tab.locator("#canvas [data-block='0']").click()
    choose(tab, "blocks.0.weights")
    assert fact(tab, "shape") == "4×482×482"
    expect(tab.locator("[data-pager='visible positions']").first).to_contain_text("to 481 of 482")
    tab.locator('[data-focus="earlier positions"]').first.click()
    expect(tab.locator("[data-focus='first positions']").first).to_have_value("386")
    choose(tab, "logits")
    assert max(sizes) < 400_000


# One file


@pytest.mark.parametrize("kind", [TIED, "untied"])
def test_the_file_reads_the_same_with_the_network_off(kind: str, tab: Page, labs_of: Any, tmp_path: Path) -> None:
    folder = labs_of(kind)._path
    file = tmp_path / "a recording.html"
    prompt = "Once upon a time"
    assert cli.run(["trace", str(folder), prompt, "-n", "3", "--html", str(file)]) == 0
    one = labs_of(kind)
    text = one.start(prompt)
    for _ in range(3):
        one.step(text.id, Sampling(temperature=0))
    tab.context.set_offline(True)
    try:
        load(tab, file.as_uri())
        expect(tab.locator("#controls")).to_be_hidden()
        expect(tab.locator("#recorded")).to_contain_text("4 passes")
        reads_embed_and_logits(tab, lambda number: one.recorded(text.id, number))
        assert tab.locator("#canvas .use.tied").count() == (2 if kind == TIED else 0)
        for number in range(4):
            tab.locator(f"#steps [data-pass='{number}']").click()
            for stage in ("logits", "probabilities", "embed"):
                choose(tab, stage, number)
                shown, want = window(tab), one.recorded(text.id, number).tensors[stage].numpy()
                axis = "dimensions" if stage == "embed" else "tokens"
                first = int(tab.locator(f'[data-focus="first {axis}"]').input_value())
                np.testing.assert_allclose(
                    shown, want[: len(shown), first : first + shown.shape[1]], rtol=1e-5, atol=1e-7
                )
        tab.locator("#canvas [data-block='0']").click()
        drawn(tab, 3)
        for stage in ("blocks.0.keys", "blocks.0.weights"):
            choose(tab, stage, 3)
            want = one.recorded(text.id, 3).tensors[stage].numpy()
            assert fact(tab, "shape") == "×".join(map(str, want.shape))
            np.testing.assert_array_equal(window(tab), want[0][:12])
            words = [one.token(id).text for id in one.text(text.id).ids]
            axis = "row" if stage == "blocks.0.keys" else "col"
            labels = tab.locator(f"#values th[scope={axis}]").all_inner_texts()
            seen = range(len(words) - want.shape[1 if axis == "row" else 2], len(words))
            assert labels == [f"{words[place]} {place}" for place in seen]
        tab.locator("#steps [data-pass='0']").click()
        choose(tab, "embed")
        token = one.recorded(text.id, 0).ids[-1]
        expect(tab.locator("#nearest tbody td:first-child")).to_have_text(
            [hit.token.text for hit in one.nearest(token, 8)]
        )
        tab.click("#lens")
        best = one.recorded(text.id, 0).tensors["logits"].argmax(-1).tolist()
        expect(tab.locator("#lens-table tbody tr").last.locator("td")).to_have_text([one.token(id).text for id in best])
    finally:
        tab.context.set_offline(False)


def test_file_and_server_give_the_same_answers(tab: Page, urls: Any, labs_of: Any, tmp_path: Path) -> None:
    """Both sources of data answer every question with the same objects."""
    one = labs_of("capped")
    load(tab, urls("capped"))
    by_server = tab.evaluate(QUESTIONS)
    file = tmp_path / "page.html"
    file.write_text(as_html(one, next(reversed(one._texts)))[0], "utf-8")
    load(tab, file.as_uri())
    by_file = tab.evaluate(QUESTIONS)
    by_server[6], by_server[9] = by_server[6][:10], by_server[9][:8]
    for candidate in [*by_server[6], *by_file[6]]:
        candidate.pop("drawn")
    for asked, answer in zip(by_server, by_file, strict=True):
        assert alike(asked, answer), (asked, answer)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return bool(a == pytest.approx(b, rel=1e-6))
    if isinstance(a, list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return bool(a == b)
