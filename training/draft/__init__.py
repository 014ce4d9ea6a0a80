"""`foredraft train draft`: EAGLE-3, EAGLE-2 and MTP heads for a target that is already trained."""
