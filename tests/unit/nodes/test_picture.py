"""The report's picture: nothing leaves it, and what matters is in it."""

import pytest
from attn_support.comfy.pack import node_module
from attn_support.comfy.runs import FIND, blocks, findings, kind, run
from PIL import ImageColor, ImageDraw

PICTURE, TEXT = node_module("reporting.picture"), node_module("reporting.text")
LONG = "A model whose name goes on " * 8
PASSED = (kind("text 0", "passed to ComfyUI", why="fewer than 1024 keys"), {"count": 12})
HUGE = {"query": (1, 40, 75600, 128), "key": (1, 40, 75600, 128)}

PICTURES = {
    "nothing": findings(remarks=["There is no Pascal node in this prompt."]),
    "57 blocks": findings(run([*blocks(19), *blocks(38, "single"), PASSED])),
    "200 families with long names": findings(run([(kind(f"{LONG}{i} 0"), {"elapsed_ms": 5.0}) for i in range(200)])),
    "nothing taken": findings(run([PASSED])),
    "not timed": findings(run(blocks(9, elapsed_ms=0.0), device="mps")),
    "no calls": findings(run(), alarms=["no attention call reached the patch: " + LONG] * 30),
    "notes": findings(run(part="feed-forward", notes=[LONG] * 300)),
    "nine runs": findings(FIND.Shown(run(blocks(7)), "of an earlier prompt"), *[run(blocks(4)) for _ in range(8)]),
    "a word wider than the picture": findings(run(blocks(2), settings="x" * 400), alarms=["y" * 400]),
    "other letters": findings(run(blocks(2), subject="Ünïcode × 模型")),
    "a large call": findings(run([(kind("block 0", **HUGE), {"extra_bytes": 60 << 20})])),
}


@pytest.fixture
def written(monkeypatch):
    """Each text that is drawn: (text, left, top, right, bottom) of its ink."""
    found = []
    original = ImageDraw.ImageDraw.text

    def text(draw, at, text, *args, font, **options):
        original(draw, at, text, *args, font=font, **options)
        left, top, right, bottom = font.getbbox(text)
        found.append((text, at[0] + left, at[1] + top, at[0] + right, at[1] + bottom))

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_overlaps_another_or_leaves_the_picture(written, name):
    picture = TEXT.draw_report(PICTURES[name])
    assert 200 < picture.height < 6000
    assert written
    for index, (text, left, top, right, bottom) in enumerate(written):
        assert left >= 0, text
        assert right <= picture.width - 20, text
        assert bottom <= picture.height, text
        for other, x, y, to_x, to_y in written[:index]:
            apart = right <= x + 1 or to_x <= left + 1 or bottom <= y + 1 or to_y <= top + 1
            assert apart or other == text, (text, other)  # bold letters are drawn twice


def colours_of(picture):
    return {colour for _, colour in picture.getcolors(picture.width * picture.height)}


@pytest.mark.parametrize(("tone", "name"), [("bad", "no calls"), ("caution", "nothing")])
def test_what_went_wrong_is_coloured(tone, name):
    colour = ImageColor.getrgb(PICTURE.TONES[tone])
    assert colour in colours_of(TEXT.draw_report(PICTURES[name]))
    assert colour not in colours_of(TEXT.draw_report(findings(run(blocks(19)))))


@pytest.mark.parametrize("runs", [1, 3])
def test_the_first_lines_are_what_was_gained_and_what_ran_in_letters_that_are_read_on_the_node(written, runs):
    tallies = [(kind("double 0", route="tiled", torch_stores=True), {"elapsed_ms": 9.0, "extra_bytes": 64 << 20})]
    others = [run(blocks(30), unique_id=str(i), part=f"part {i}") for i in range(1, runs)]
    picture = TEXT.draw_report(findings(run(tallies), *others, attention="attention_pytorch"))
    text, _, top, _, bottom = written[0]
    assert text.startswith("Gained: 908 MiB less memory in the largest call")
    assert (bottom - top) * 620 / picture.width * 0.6 > 7  # of its ink, on a node 620 wide at zoom 0.6
    lines = {text: bottom - top for text, _, top, _, bottom in written if "1 call, 1 taken (tiled 1), 0 passed" in text}
    assert max(lines.values()) * 460 / picture.width > 7  # below it, on a node 460 wide
    assert runs == 1 or picture.width > 1.2 * picture.height
