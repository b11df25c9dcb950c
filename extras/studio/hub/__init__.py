"""Hugging Face folders, in and out.

In: a folder of safetensors, or a checkpoint root. Out: the other of the two, or the weights of a parallel model.
"""
