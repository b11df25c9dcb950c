"""Text, questions and answers that a model is scored with: `[eval]`, read and prepared. Torch-free."""
