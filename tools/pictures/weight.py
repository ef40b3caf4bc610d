"""The life of a weight: from safetensors to a GEMM, round by round of training."""

from tools.pictures.canvas import SOFT, Canvas


def draw() -> Canvas:
    """Left to right into the products, and below them back into the master."""
    canvas = Canvas(1012, 400, "The life of a weight, from safetensors to a GEMM and back")
    canvas.text(24, 34, "The life of a weight", weight=600, anchor="start")
    canvas.box(24, 76, 160, 74, "model folder", "safetensors, read one", "tensor at a time")
    canvas.box(246, 76, 178, 74, "master", "FP32, the optimiser's;", "q, k, v fused", kind="violet")
    canvas.box(
        486,
        76,
        190,
        74,
        "publish",
        "rounded to BF16 once,",
        "quantised once, in place",
        kind="amber",
    )
    lines = ("E4M3, 128 x 128 blocks,", "a scale each;", "one tensor for both sides")
    canvas.box(760, 60, 228, 106, "published weight", *lines, kind="amber")
    canvas.arrow((186, 113), (243, 113))
    canvas.arrow((426, 113), (483, 113))
    canvas.arrow((678, 113), (757, 113))
    canvas.box(640, 226, 160, 60, "rollout", "Y = X W^T", kind="blue")
    canvas.box(828, 226, 160, 60, "training", "Y = X W^T, the same", kind="green")
    canvas.arrow((780, 168), (780, 223))
    canvas.arrow((908, 168), (908, 223))
    canvas.text(844, 190, "same kernels,", size=12, colour=SOFT)
    canvas.text(844, 206, "same bits", size=12, colour=SOFT)
    canvas.box(640, 322, 348, 54, "backward", "dX = dY W,  then dW += dY^T X", kind="green")
    canvas.arrow((908, 288), (908, 319))
    canvas.box(378, 322, 190, 54, "gradient", "FP32, one sum a micro-batch", kind="violet")
    canvas.arrow((637, 349), (571, 349))
    canvas.box(246, 226, 178, 54, "AdamW", "an update, clipped", kind="green")
    canvas.arrow((401, 320), (401, 283))
    canvas.arrow((335, 223), (335, 153))
    canvas.box(24, 226, 160, 54, "checkpoint", "FP32 masters, moments")
    canvas.box(24, 322, 160, 54, "trained model", "BF16 safetensors")
    canvas.arrow((262, 153), (262, 192), (104, 192), (104, 223), dashed=True)
    canvas.arrow((212, 192), (212, 349), (187, 349), dashed=True)
    return canvas
