"""The mechanisms inside other people's tools: Hugging Face models, lm-evaluation-harness."""
