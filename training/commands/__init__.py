"""The commands below `foredraft train`, one in each file; torch is imported when one runs."""
