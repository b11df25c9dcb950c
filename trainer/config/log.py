"""Where a run's outputs go, and how it is watched. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

DISPLAYS = ("auto", "live", "plain")
WANDB_MODES = ("", "online", "offline")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """The trace's folder, what is shown on the terminal, and the pages of curves.

    Attributes:
        folder: Of everything that the run writes besides checkpoints.
        every: Print a line each so many steps; the live display shows every step.
        display: "auto": live on a terminal; "live": also with CI, NO_COLOR or TERM=dumb set; "plain": lines.
        tensorboard: Whether curves are written to `folder`/tensorboard.
        wandb: Project of Weights & Biases; "": none.
        wandb_run: Name of the run's page; "": wandb chooses one.
        wandb_mode: "online", "offline"; "": as the environment says (WANDB_MODE).
        peak_tflops: Peak of one device for MFU, dense bfloat16; 0: that of the device, where it is known.
    """

    folder: str = "out/run"
    every: int = 1
    display: str = "auto"
    tensorboard: bool = False
    wandb: str = ""
    wandb_run: str = ""
    wandb_mode: str = ""
    peak_tflops: float = 0.0
