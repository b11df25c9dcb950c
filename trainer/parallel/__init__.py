"""Layouts: the mesh, and how the model is cut along it.

In: a configuration, the world. Out: a model cut for this rank, its schedule, its mesh.
"""
