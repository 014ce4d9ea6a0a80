"""The version of the protocol that verifier and draft must agree on before the first message."""

# Version of the messages between a verifier and a draft, and of the arena's contents. It grows
# whenever one of them would mean something else to an older peer. A new field that an older peer
# may overlook does not change it.
DRAFT_PROTOCOL = 1
