"""Layouts: the device mesh, and what data, tensor, pipeline and expert parallelism do to the model.

In: a configuration, the world. Out: a model cut for this rank, its schedule, its mesh.
May import: trainer.config, trainer.model.
"""
