"""Hugging Face folders in and out: names, config.json, weights by byte range, tokenizer files.

In: a folder of safetensors, or a checkpoint root. Out: the other of the two, or the weights of a parallel model.
May import: trainer.config, trainer.model, the engine.
"""
