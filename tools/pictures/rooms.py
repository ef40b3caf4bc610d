"""The rooms of the package, from those that call to those that are called."""

from tools.pictures.canvas import SOFT, Canvas, Kind

Room = tuple[str, str, Kind]

LAYERS: tuple[tuple[Room, ...], ...] = (
    (("cli", "one file a command; api.py: the same from Python", "plain"),),
    (("run", "reinforcement learning, fine-tuning, evaluation", "plain"),),
    (
        ("proof", "verify, bisect, doctor", "plain"),
        ("rollout", "the engine: prompts to samples", "blue"),
        ("observe", "metrics, console, report", "plain"),
    ),
    (
        ("store", "journals, checkpoints, resume", "plain"),
        ("memory", "plans; who has the device when", "plain"),
        ("training", "packing, gradients, update", "green"),
    ),
    (
        ("models", "layers, decoder, policy, scorer", "violet"),
        ("rewards", "graders, and their failures", "plain"),
    ),
    (
        ("kernels", "backend.py; spec/, hopper/", "amber"),
        ("algorithms", "advantages, losses, KL", "plain"),
    ),
    (
        ("precision", "formats, flows, graphs", "plain"),
        ("data", "prompts in", "plain"),
        ("starter", "a model to try", "plain"),
    ),
    (
        ("records", "prompt, sequence, group, batch", "plain"),
        ("config", "tables of a recipe, their rules", "plain"),
        ("errors, files, clock", "", "plain"),
    ),
)
LEFT, WIDTH, GAP, HEIGHT, STEP = 90, 780, 16, 50, 66


def draw() -> Canvas:
    """A row a layer; imports go down."""
    canvas = Canvas(900, 60 + STEP * len(LAYERS), "The rooms of Isobit; imports go down only")
    canvas.text(
        LEFT,
        30,
        "The rooms: imports go down only, and to the right in the fourth row",
        weight=600,
        anchor="start",
    )
    for number, layer in enumerate(LAYERS):
        width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
        for place, (name, words, kind) in enumerate(layer):
            x, y = LEFT + place * (width + GAP), 46 + number * STEP
            canvas.box(
                round(x, 1), y, round(width, 1), HEIGHT, name, *filter(None, [words]), kind=kind
            )
    bottom = 46 + STEP * (len(LAYERS) - 1) + HEIGHT
    canvas.arrow((50, 50), (50, bottom - 4))
    canvas.text(50, 40, "calls", size=12, colour=SOFT)
    return canvas
