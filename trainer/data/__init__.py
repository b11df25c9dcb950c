"""The corpus of a run: fetched, tokenized, cut into windows.

In: a configuration. Out: datasets and samplers.
May import: flashckpt.sampler, trainer.config, trainer.data.byte_tokenizer.
"""
