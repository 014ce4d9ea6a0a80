"""Text and token ids: tokenizer, chat template, incremental detokenizer, stop strings.

Never reaches torch.
"""
