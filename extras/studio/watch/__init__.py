"""What a person sees of a run: curves, lines, the display.

In: finished steps, what the engine reports. Out: curves and lines; an output that fails never ends a run.
"""
