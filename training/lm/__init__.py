"""`foredraft train lm`: a small Llama-architecture language model from text files."""
