"""The table ``tracking``: services that a run sends its figures to."""

from isobit.config.base import Strict


class TrackingConfig(Strict):
    """Where a run sends its figures, beside ``metrics.jsonl`` and TensorBoard, which it always
    writes.
    """

    wandb: bool | str = False
    """Weights & Biases: ``true`` for the project ``isobit``, or a project's name; needs ``pip
    install wandb``.
    """
