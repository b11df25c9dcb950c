"""Text, questions and answers that a model is scored with: `[eval]`. Torch-free."""
