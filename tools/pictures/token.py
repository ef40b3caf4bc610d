"""The life of a token: from a line of a dataset to a gradient."""

from tools.pictures.canvas import SOFT, Canvas, Kind

W, H, GAP = 172, 74, 30
LEFT, TOP, NEXT = 24, 64, 150

Stop = tuple[str, str, str, Kind]
OUT: tuple[Stop, ...] = (
    ("data", "a row becomes a Prompt:", "text, token ids", "plain"),
    ("run", "takes the step's prompts,", "makes a Request of each", "plain"),
    ("rollout", "schedules, decodes over", "pages of the KV cache", "blue"),
    ("kernels: draw", "token and log_prob,", "noise by (seed, .., position)", "amber"),
    ("records", "TokenSequence in a", "Completion, n to a Group", "plain"),
)
BACK: tuple[Stop, ...] = (
    ("masters", "FP32 gradients, each", "one finished sum added", "violet"),
    ("models: backward", "layers in reverse:", "DGrad, WGrad", "violet"),
    ("algorithms: loss", "ratio, clip, weights;", "d loss / d log_prob", "plain"),
    ("models: scorer", "one packed forward:", "log_prob of each token", "violet"),
    ("training: pack", "sequences end to end:", "a PackedBatch", "green"),
)


def draw() -> Canvas:
    """Out to the completion above, back to the gradient below."""
    canvas = Canvas(1028, 406, "The life of a token, from a prompt to a gradient")
    canvas.text(LEFT, 34, "The life of a token", weight=600, anchor="start")
    for row, stops in enumerate((OUT, BACK)):
        y = TOP + row * (H + NEXT)
        for place, (title, *lines, kind) in enumerate(stops):
            x = LEFT + place * (W + GAP)
            canvas.box(x, y, W, H, title, *lines, kind=kind)
            if place:
                ends = ((x - GAP + 2, y + H / 2), (x - 2, y + H / 2))
                canvas.arrow(*(ends if row == 0 else reversed(ends)))
    middle = TOP + H + NEXT / 2
    last = LEFT + 4 * (W + GAP) + W / 2
    canvas.box(
        last - W / 2, middle - 30, W, 60, "rewards, advantages", "graded, judged in its group"
    )
    canvas.arrow((last, TOP + H + 2), (last, middle - 32))
    canvas.arrow((last, middle + 32), (last, TOP + H + NEXT - 2))
    drawn = LEFT + 3 * (W + GAP) + W / 2
    canvas.arrow((drawn, TOP + H + 2), (drawn, TOP + H + NEXT - 2), dashed=True)
    canvas.text(
        drawn - 12, middle - 4, "recorded log_prob = trained log_prob,", size=13, anchor="end"
    )
    canvas.text(
        drawn - 12,
        middle + 14,
        "bit for bit, counted on every step",
        size=12,
        colour=SOFT,
        anchor="end",
    )
    columns = "id, loss mask, log_prob, weights version, advantage"
    words = f"A TokenSequence keeps for every token: {columns}."
    canvas.text(LEFT, 386, words, size=12, colour=SOFT, anchor="start")
    return canvas
