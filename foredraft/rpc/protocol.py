"""What verifier and draft have to agree on before the first message."""

# Of the messages between a verifier and a draft, and of the arena's contents. It grows whenever one of them comes to mean something
# else to an older peer; a new field that an older peer may overlook does not change it.
DRAFT_PROTOCOL = 1
