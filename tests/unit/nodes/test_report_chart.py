"""The report's picture: nothing overlaps, nothing leaves it, and what matters is in it."""

from __future__ import annotations

import random

import pytest
from attn_support.comfy.runs import FIND, blocks, findings, kind, part, run
from PIL import ImageColor

CHART, DRAW, PARTS = part("nodes.reporting.board"), part("nodes.reporting.chart"), part("nodes.reporting.chart_parts")
LONG = "A model whose name goes on " * 8


ROUTES = ["torch", "tiled", "fused", "math"]


def many(count: int, family: str = "call"):
    routes = random.Random(0)
    return [(kind(f"{family} {i}", route=routes.choice(ROUTES)), {"elapsed_ms": 9.0 * i + 1}) for i in range(count)]


def unet():
    names = [f"input {4 + i // 2}.{i % 2}" for i in range(4)] + ["middle 1.0"] + [f"output {i}.0" for i in range(6)]
    passed = [(kind(name, "passed to ComfyUI", why="fewer than 1024 keys", key=(1, 24, 77, 128)), {}) for name in names]
    return [(kind(name), {"elapsed_ms": 12.0, "extra_bytes": 20 << 20}) for name in names] + passed


PICTURES = {
    "nothing": findings(remarks=["There is no Pascal node in this prompt."]),
    "one block": findings(run([(kind("decoder.mid.attn_1", route="tiled"), {"elapsed_ms": 800.0})])),
    "millions of calls by every route": findings(
        run(
            [
                (kind(f"double {i}", route=route), {"count": 1234567, "elapsed_ms": 500.0})
                for i, route in enumerate(ROUTES * 2)
            ]
            + [(kind("double 0", "passed to ComfyUI", why="few keys"), {"count": 7654321})]
        )
    ),
    "a card of the size of the smallest bar": findings(
        run([(kind("double 0", query=(1, 24, 90000, 128), key=(1, 24, 90000, 128)), {"extra_bytes": 11 << 30})])
    ),
    "six blocks": findings(run(many(6, "clip_l.transformer.text_model.encoder.layers"))),
    "57 blocks": findings(run([*blocks(19), *blocks(38, "single")])),
    "200 blocks": findings(run(many(200), subject=LONG)),
    "1000 blocks": findings(run(many(1000))),
    "200 families": findings(run([(kind(f"stage{i} 0"), {"elapsed_ms": 5.0}) for i in range(200)])),
    "unet": findings(run(unet())),
    "nothing taken": findings(run([(kind("layer 0", "passed to ComfyUI", why="fewer than 1024 keys"), {"count": 12})])),
    "not timed": findings(run(blocks(9, elapsed_ms=0.0), device="mps")),
    "hours": findings(run(blocks(30, elapsed_ms=4e5, extra_bytes=61 << 20), elapsed_s=14523.0)),
    "no calls": findings(run(), alarms=["no attention call reached the patch: " + LONG] * 12),
    "notes": findings(run(part="feed-forward", notes=[LONG] * 3)),
    "earlier": findings(FIND.Shown(run(blocks(7)), "of an earlier prompt, at 20:41:03")),
    "nine runs": findings(*[run(blocks(4)) for _ in range(9)]),
    "a word wider than the picture": findings(run(blocks(2), settings="x" * 400), alarms=["y" * 400]),
    "other letters": findings(run(blocks(2), subject="Ünïcode × 模型")),
    "tiny memory": findings(run(blocks(8, extra_bytes=0), peak_bytes=None)),
    "math far beyond the card": findings(
        run([(kind("block 0", query=(1, 40, 75600, 128), key=(1, 40, 75600, 128)), {"extra_bytes": 60 << 20})])
    ),
}


@pytest.fixture
def written(monkeypatch):
    """Where each text was drawn: (text, left, top, right, bottom) of its ink."""
    found = []
    original = CHART.Board.text

    def text(board, x, y, text, size, colour=CHART.INK, *, align="left", bold=False):
        original(board, x, y, text, size, colour, align=align, bold=bold)
        spelt = CHART.spelt(text)
        start = x - {"left": 0.0, "right": 1.0, "middle": 0.5}[align] * CHART.text_width(text, size)
        left, top, right, bottom = CHART.font_of(size).getbbox(spelt)
        found.append((spelt, start + left, y + top, start + right, y + bottom))

    monkeypatch.setattr(CHART.Board, "text", text)
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_overlaps_another_or_leaves_the_picture(written, name):
    picture = DRAW.draw_report(PICTURES[name])
    assert written
    for index, (text, left, top, right, bottom) in enumerate(written):
        assert left >= 0, text
        assert right <= picture.width - 20, text
        assert bottom <= picture.height, text
        for other, x, y, to_x, to_y in written[:index]:
            assert right <= x + 1 or to_x <= left + 1 or bottom <= y + 1 or to_y <= top + 1, (text, other)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_as_wide_as_their_columns_and_of_a_bearable_height(name):
    picture = DRAW.draw_report(PICTURES[name])
    assert picture.width == (1600 if len(PICTURES[name].shown) < 3 else 2400)
    assert 200 < picture.height < 6000
    below = picture.crop((0, picture.height - DRAW.MARGIN, picture.width, picture.height))
    above = picture.crop((0, picture.height - DRAW.MARGIN - 60, picture.width, picture.height - DRAW.MARGIN))
    assert colours_of(below) == {(255, 255, 255)}
    assert len(colours_of(above)) > 1


def colours_of(picture):
    return {colour for _, colour in picture.getcolors(picture.width * picture.height)}


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_has_its_colour(route):
    picture = DRAW.draw_report(
        findings(run([(kind(f"double {i}", route=route), {"elapsed_ms": 3.0}) for i in range(9)]))
    )
    shown = {
        name
        for name, colour in PARTS.ROUTE_COLOURS.items()
        if name and ImageColor.getrgb(colour) in colours_of(picture)
    }
    assert shown == {route}


def test_math_that_does_not_fit_the_card_is_red():
    red, bar = ImageColor.getrgb(CHART.RED), 300 * 20
    picture = DRAW.draw_report(PICTURES["math far beyond the card"])
    assert {colour: count for count, colour in picture.getcolors(1 << 20)}[red] > bar
    assert red not in colours_of(DRAW.draw_report(PICTURES["57 blocks"]))


def test_memory_that_differs_by_far_is_drawn_to_a_logarithmic_scale_and_says_so(written):
    DRAW.draw_report(PICTURES["math far beyond the card"])
    assert "(logarithmic scale)" in [text for text, *_ in written]
    written.clear()
    DRAW.draw_report(PICTURES["200 families"])
    assert "(logarithmic scale)" not in [text for text, *_ in written]


def test_alarms_have_a_red_ground():
    panel = ImageColor.getrgb(CHART.RED_PANEL)
    assert panel in colours_of(DRAW.draw_report(PICTURES["no calls"]))
    assert panel not in colours_of(DRAW.draw_report(PICTURES["57 blocks"]))


def test_the_first_line_says_what_was_gained_in_letters_that_are_read_on_the_node(monkeypatch):
    sizes = {}
    original = CHART.Board.text

    def text(board, x, y, text, size, *args, **options):
        sizes.setdefault(text, size)
        original(board, x, y, text, size, *args, **options)

    monkeypatch.setattr(CHART.Board, "text", text)
    tallies = [(kind("double 0", route="tiled", torch_stores=True), {"elapsed_ms": 9.0, "extra_bytes": 64 << 20})]
    DRAW.draw_report(findings(run(tallies), run(blocks(3), unique_id="6"), attention="attention_pytorch"))
    first = next(iter(sizes))
    assert first.startswith("Gained: 908 MiB less memory in the largest call (64 instead of")
    # A node 620 wide at zoom 0.6 shows 1600 pixels in 372.
    assert sizes[first] * 372 / 1600 > 12
    result = next(text for text in sizes if "1 of 1 call taken" in text)
    assert sizes[result] * 372 / 1600 > 6


def test_the_report_of_a_whole_workflow_is_wider_than_high_and_its_first_line_is_read_on_the_node(written):
    made = [run(blocks(30), unique_id=str(i), part=name) for i, name in enumerate(["diffusion model", "VAE", "x", "y"])]
    made.append(run(part="feed-forward", notes=["12 modules chunked"]))
    picture = DRAW.draw_report(findings(*made))
    assert picture.width > 1.2 * picture.height
    _, _, top, _, bottom = written[0]
    assert (bottom - top) * 620 / picture.width * 0.6 > 7  # of its ink, on a node 620 wide at zoom 0.6


def test_columns_are_as_high_as_their_times():
    low, high = (
        (kind("double 0"), {"elapsed_ms": 10.0}),
        [(kind(f"double {i}"), {"elapsed_ms": 40.0}) for i in range(1, 8)],
    )
    picture = DRAW.draw_report(findings(run([low, *high], peak_bytes=None)))
    blue = ImageColor.getrgb(PARTS.ROUTE_COLOURS["torch"])
    pixels = picture.load()
    columns = {}
    for x in range(130, picture.width):
        height = sum(pixels[x, y] == blue for y in range(300, 800))
        if height > 5:
            columns[x] = height
    heights = list(columns.values())
    assert heights[0] * 4 == pytest.approx(heights[-1], abs=5)


@pytest.mark.parametrize("top", [0.0, 0.3, 1.0, 7.0, 99.0, 12345.0, float("inf")])
def test_ticks_are_few_round_and_within(top):
    ticks = CHART.nice_ticks(top)
    assert ticks[0] == 0
    assert len(ticks) <= 5
    assert all(tick <= top * 1.001 for tick in ticks)
    assert len(ticks) >= 2 or top in (0.0, float("inf"))


def test_text_is_cut_where_it_does_not_fit():
    assert CHART.fitted("short", 500, 18) == "short"
    cut = CHART.fitted("encoder.layers.11.self_attn", 120, 18)
    assert cut.startswith("enc")
    assert cut.endswith("...")
    assert CHART.text_width(cut, 18) <= 120
    assert CHART.fitted("encoder.layers.11.self_attn", 120, 18, keeps_end=True).endswith("self_attn")
    assert CHART.fitted("anything", 3, 18) == ""
