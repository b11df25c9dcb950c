"""What a person sees of a run: figures of a step, TensorBoard, wandb, plain lines or the live display.

In: finished steps, what the engine reports. Out: curves and lines; an output that fails never ends a run.
May import: config, nonfatal, the model's sizes, evaluate, generate, `train/metrics`, `train/hooks`.
"""
