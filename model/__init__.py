"""DeepSeek-family models in Flax NNX: configuration, layers, checkpoints, tokenizer, templates."""
