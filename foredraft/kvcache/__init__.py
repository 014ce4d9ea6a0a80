"""The KV cache: page numbers and their owners, the prefix tree over them, the paged tensors."""
